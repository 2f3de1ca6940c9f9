"""What is known of padding, per segment structure and bucket."""

from __future__ import annotations

from collections.abc import Iterator

from piecewise_graph.compiler.program import Program

Key = tuple[str, int]  # structure, bucket


class PaddingProofs:
    """For each (structure, bucket) that was tried: None where padding is harmless, else why it is not.

    All traces of one model share the proofs, because they share the structures. Entries are added and never
    changed.
    """

    def __init__(self) -> None:
        self._known: dict[Key, str | None] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._known

    def add(self, structure: str, bucket: int, reason: str | None) -> None:
        self._known[structure, bucket] = reason

    def reason(self, structure: str, bucket: int) -> str | None:
        """Why the structure must not be padded to `bucket`; None where it may be, or is not known yet."""
        return self._known.get((structure, bucket))

    def reasons(self) -> Iterator[tuple[Key, str]]:
        """Everything that must not be padded."""
        return ((key, reason) for key, reason in self._known.items() if reason is not None)

    def is_new(self, structure: str) -> bool:
        """The structure was tried in no bucket yet."""
        return all(known != structure for known, _ in self._known)

    def complete(self, program: Program, bucket: int) -> bool:
        """Every segment of the trace was tried in `bucket`."""
        return all((segment.key, bucket) in self._known for segment in program.compiled.values())

    def exact_only(self, program: Program, bucket: int, *, one_graph: bool) -> str | None:
        """Why `bucket` serves its exact size only, as far as the proofs are known; None where it is padded.

        A segment that must not be padded runs between the graphs, at the exact size, its outputs copied to
        buffers. Two kinds cannot: those with sizes derived from the token count, and those with outputs that
        share storage, because a splitting op that writes one output would not reach the other. A forward that
        is one graph (`one_graph`) has no place between graphs.
        """
        for segment in program.compiled.values():
            reason = self.reason(segment.key, bucket)
            stays = segment.facts.entangled_outputs or not segment.facts.computes
            if reason is not None and (one_graph or stays or reason == "derived_size"):
                return reason
        return program.unpaddable

    def at(self, bucket: int) -> dict[Key, str | None]:
        """What is known of one bucket."""
        return {key: reason for key, reason in self._known.items() if key[1] == bucket}
