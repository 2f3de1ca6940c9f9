"""`pg.counters`: what the library did, as numbers that a test can assert by formula."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from piecewise_graph.reasons import remedy

log = logging.getLogger(__name__)

NAMES = {
    "traces": "graphs that Dynamo handed to the backend",
    "segments": "compute segments that splitting produced (captured kind; inline ones apart)",
    "inline_segments": "segments without compute, evaluated once when a tape is bound",
    "op_steps": "steps between segments, each of one or more adjacent splitting ops",
    "merged_linears": "parallel linears that run as parts of one (merge_linears)",
    "unmerged_groups": "groups of parallel linears left apart; per reason as 'unmerged_groups:REASON'",
    "compiles": "distinct segment structures compiled",
    "cache_hits": "distinct segment structures loaded from cache_dir instead of compiled",
    "cache_misses": "lookups in cache_dir that ended in a compile",
    "cache_rejected": "of these, files that were there and not used; per reason as 'cache_rejected:REASON'",
    "cache_unsaved": "structures compiled and not written; per reason as 'cache_unsaved:REASON'",
    "specialized": "structures compiled for the exact size of a bucket (structures x sizes)",
    "not_specialized": "of these, what failed or disagreed and is not used; pg.explain says why",
    "rehearsals": "forwards run uncaptured before a capture, to prove and warm what it needs",
    "tapes": "buckets captured",
    "failed_captures": "buckets whose capture failed; pg.explain says why",
    "captures": "graphs captured (segments x buckets; on a CPU their stand-ins)",
    "replays": "forwards served by a tape",
    "padded_batches": "forwards whose batch was padded to a batch size",
    "slower_batches": "forwards whose batch was not padded, because their own sizes are faster",
    "phase_captures": "phases of a speculative round captured as one graph (eagle)",
    "phase_replays": "phases served by such a graph",
    "full_replays": "replays of a full graph, splitting ops included",
    "not_full": "forwards that asked for a full graph and ran otherwise; per reason as 'not_full:REASON'",
    "unpadded_segments": "segments that a replay ran uncaptured at the exact token count",
    "fallbacks": "forwards served without a tape; per reason as 'fallbacks:REASON'",
}


class Counters:
    """Monotonic counts. `snapshot()` copies them, `expect()` asserts how they change."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1, *, reason: str | None = None) -> None:
        """Add to `name`, and to `name:reason` where there is one."""
        self._counts[name] += amount
        if reason is not None:
            self._counts[f"{name}:{reason}"] += amount

    def add_each(self, amounts: Iterable[tuple[str, int]]) -> None:
        """Add to several names at once, reasons included as `name:reason`: what every replay counts."""
        counts = self._counts
        for name, amount in amounts:
            counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All counts by name; every name of `NAMES` is present, reasons as they occurred."""
        return dict.fromkeys(NAMES, 0) | dict(self._counts)

    def clear(self) -> None:
        self._counts.clear()

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Whatever happens inside the `with` block is not counted."""
        before = Counter(self._counts)
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def expect(self, **deltas: int) -> Iterator[None]:
        """Assert that exactly these changes happen inside the `with` block.

        Counters that are not named may change freely. Reasons contain a colon, so they are given by
        `**{"fallbacks:above_max_tokens": 1}`.

        Raises:
            AssertionError: naming each counter that moved differently.
            ValueError: a name that no counter has.
        """
        unknown = [name for name in deltas if name.partition(":")[0] not in NAMES]
        if unknown:
            raise ValueError(f"no counter is named {', '.join(unknown)}; there are {', '.join(NAMES)}")
        before = self.snapshot()
        yield
        wrong = _differences(before, self.snapshot(), deltas)
        if wrong:
            raise AssertionError("counters moved differently: " + "; ".join(wrong))

    def __repr__(self) -> str:
        return f"Counters({self.snapshot()})"


def _differences(before: Mapping[str, int], after: Mapping[str, int], deltas: Mapping[str, int]) -> list[str]:
    found = {name: after.get(name, 0) - before.get(name, 0) for name in deltas}
    return [
        f"{name}: expected {deltas[name]:+d}, found {found[name]:+d}"
        for name in deltas
        if found[name] != deltas[name]
    ]


counters = Counters()


def count_fallback(fallbacks: Counter[str], reason: str) -> None:
    """Count one forward that no tape served, here and in `fallbacks`; log the first one of each reason."""
    counters.add("fallbacks", reason=reason)
    fallbacks[reason] += 1
    if fallbacks[reason] == 1:
        log.info("first fallback %s: %s", reason, remedy(reason))
