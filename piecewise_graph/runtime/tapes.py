"""TapeSet: what a trace has captured in one mode, with one graph_key."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from piecewise_graph.compiler.program import Program
from piecewise_graph.recorder.mode import Mode
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.runtime.dispatch import Captured
from piecewise_graph.runtime.replay import CapturedBucket, Replay


@dataclass(eq=False)
class TapeSet:
    """Grows as buckets are captured.

    Attributes:
        graph_key: of the forward context; always None in PIECEWISE mode.
        buckets: bucket -> what was captured for it.
        failed: bucket -> why its capture failed.
        ready: token count -> the replay that serves it. Of calls that asked for this mode; the tape may be
            of another one.
    """

    mode: Mode
    graph_key: Hashable = None
    buckets: dict[int, CapturedBucket] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    ready: dict[int, Replay] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As reports show it."""
        return self.mode.name if self.graph_key is None else f"{self.mode.name} {self.graph_key!r}"

    def drop_exact(self, sizes: Collection[int], most: int) -> None:
        """Drop the least recently used buckets beside `sizes` until no more than `most` are left."""
        extra = sorted((b.last_used, size) for size, b in self.buckets.items() if size not in sizes)
        for _, size in extra[: max(len(extra) - most, 0)]:
            del self.buckets[size]

    def captured(self, program: Program, proofs: PaddingProofs, sizes: tuple[int, ...]) -> Captured:
        """As a decision needs it."""
        proven = {size: bucket.tape.proven for size, bucket in self.buckets.items()}
        return Captured(proven, self.failed, self.mode.exact_only(program, proofs, sizes))
