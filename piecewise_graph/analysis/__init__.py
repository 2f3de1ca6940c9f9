"""What a segment does, found by running it once on fake tensors: facts, and whether it may be padded.

How to read the proof: `claims.py` says what is known of a value, `rules.py` how each op changes that, with
the reason of each rule, and `proof.py` runs the segment and follows writes. A segment is padded where
`analyse` has no findings.

To add a rule: write a function in `rules.py` under `@rule("name")`, whose docstring says which elements the
op reads for a live element of its result; add to `tests/test_padding_rules.py` a case that it proves, and a
wrong variant of it that the numbers refute.
"""

from piecewise_graph.analysis.claims import Claim, live_claim, stored_claim
from piecewise_graph.analysis.facts import SegmentFacts, observe
from piecewise_graph.analysis.proof import Finding, SegmentProof, analyse

__all__ = [
    "Claim",
    "Finding",
    "SegmentFacts",
    "SegmentProof",
    "analyse",
    "live_claim",
    "observe",
    "stored_claim",
]
