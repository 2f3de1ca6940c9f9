"""What may be padded: what was proved when the trace was made, and what trials found since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from piecewise_graph.compiler.program import Program
from piecewise_graph.splitter.split_graph import SegmentStep

# A structure, and the bucket that its trial speaks for; None: for every bucket.
Key = tuple[str, int | None]

UNPROVED = "no_padding_proof"

# Why a bucket may serve its exact size only.
PADDING_REASONS = frozenset(
    {
        UNPROVED,
        "derived_size",
        "mixes_tokens",
        "overlapping_memory",
        "padding_unproven",
        "proof_failed",
        "size_is_a_number",
        "writes_static_input",
    }
)


def trial_key(program: Program, step: SegmentStep, bucket: int) -> Key | None:
    """What a trial of the segment in `bucket` settles; None where it is never padded.

    A proved segment is tried once per compiled code, against miscompiles. An unproved one, which
    `padding="tried"` lets through, is tried in every bucket.
    """
    if not step.padded or program.token is None:
        return None
    segment = program.compiled[step.index]
    exact_code = bucket in segment.exact
    return segment.key, bucket if exact_code or step.index in program.unproved else None


class PaddingProofs:
    """For each key that was tried: None where padding is harmless, else why it is not.

    All traces of one model share the trials, because they share the structures. Entries are added and never
    changed.
    """

    def __init__(self) -> None:
        self._tried: dict[Key, str | None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._tried

    def add(self, key: Key, reason: str | None) -> None:
        self._tried[key] = reason

    def reason(self, program: Program, step: SegmentStep, bucket: int) -> str | None:
        """Why the segment must not be padded to `bucket`; None where it may be, or is not known yet."""
        if not step.padded:
            return UNPROVED
        key = trial_key(program, step, bucket)
        return None if key is None else self._tried.get(key)

    def is_harmless(self, program: Program, step: SegmentStep, bucket: int) -> bool:
        """The segment may be padded to `bucket`."""
        if step.index in program.unproved and trial_key(program, step, bucket) not in self._tried:
            return False
        return self.reason(program, step, bucket) is None

    def failed(self) -> Mapping[str, str]:
        """Structures that a trial found unfit for padding, and why."""
        return {structure: reason for (structure, _), reason in self._tried.items() if reason is not None}

    def complete(self, program: Program, bucket: int) -> bool:
        """Every segment of the trace may be padded to `bucket`, or is known not to be."""
        return all(
            self.is_harmless(program, step, bucket) or self.reason(program, step, bucket) is not None
            for step in program.split.segments
        )

    def exact_only(self, program: Program, bucket: int, *, one_graph: bool) -> str | None:
        """Why `bucket` serves its exact size only, as far as is known; None where it is padded.

        A segment that must not be padded runs between the graphs, at the exact size, its inputs laid out for
        it, its outputs copied to buffers. Three kinds cannot: those with sizes derived from the token count,
        those that write memory which two inputs share, in strides that depend on the token count, and those
        with outputs that share storage, because a splitting op that writes one output would not reach the
        other. A forward that is one graph (`one_graph`) has no place between graphs.
        """
        return program.unpaddable or next(self._stuck(program, bucket, one_graph), None)

    def _stuck(self, program: Program, bucket: int, one_graph: bool) -> Iterator[str]:
        for step in program.split.segments:
            reason = self.reason(program, step, bucket)
            if reason is None:
                continue
            facts = program.compiled[step.index].facts
            stays = step.padded and (facts.entangled_outputs or not facts.computes)
            stays |= facts.aliased_write and program.split.strides_vary(step, facts.written)
            if one_graph or stays or reason == "derived_size":
                yield reason

    def at(self, bucket: int) -> dict[Key, str | None]:
        """What trials found that concerns `bucket`."""
        return {key: reason for key, reason in self._tried.items() if key[1] in (bucket, None)}
