"""Replay: a captured bucket, bound to one token count. Calls through Dynamo and frozen calls share it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from piecewise_graph.context import ForwardContext
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.ranks.exchange import Ranks
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.runtime.bound_addresses import BoundAddresses
from piecewise_graph.runtime.captured_context import CapturedContext
from piecewise_graph.telemetry import counters

_clock = itertools.count()  # orders uses


class CapturedBucket:
    """A recorded tape, what recording it cost, and how often it was replayed.

    Args:
        record: its costs.
        context: the forward context of the capture; None in PIECEWISE mode.
    """

    def __init__(self, tape: ReplayTape, record: BucketRecord, context: CapturedContext | None) -> None:
        self.tape, self.context = tape, context
        self.replays, self.last_used = 0, next(_clock)
        self._record = record

    @property
    def record(self) -> BucketRecord:
        """As reports show it."""
        return replace(
            self._record,
            replays=self.replays,
            token_counts=self.tape.token_counts,
            bind_seconds=self.tape.bind_seconds,
        )


class Replay:
    """What a forward of one token count does: check, and launch once its inputs are copied in.

    Args:
        captured: the bucket that serves it.
        addresses: of the weights that the tape reads.
        ranks: who replay together.
        not_full: why it is no full graph, where the caller asked for one.
        check_always: look into the objects of the forward context in every replay, not in the first alone.
    """

    def __init__(
        self,
        captured: CapturedBucket,
        num_tokens: int,
        *,
        addresses: BoundAddresses,
        pool: GraphPool,
        ranks: Ranks,
        not_full: str | None,
        check_always: bool,
    ) -> None:
        self.bound, self.num_tokens = captured.tape.bind(num_tokens), num_tokens
        self.not_full = not_full
        self.captured, self._addresses, self._pool = captured, addresses, pool
        self._ranks = ranks if ranks.several else None
        self._look_inside, self._check_always = True, check_always
        self._counted = tuple(self._counts())

    def _counts(self) -> Iterator[tuple[str, int]]:
        """What each replay counts: (name, amount)."""
        yield "replays", 1
        if self.captured.context is not None:
            yield "full_replays", 1
        if self.not_full is not None:
            yield "not_full", 1
            yield f"not_full:{self.not_full}", 1
        for reason, segments in self.bound.unpadded.items():
            yield "unpadded_segments", segments
            yield f"unpadded_segments:{reason}", segments

    def check(self, context: ForwardContext, addressed: Sequence[Any] | None) -> None:
        """Refuse what the graphs do not fit. Call it inside `pool.using()`, before anything is copied in.

        Args:
            addressed: the graph's arguments, to compare the weights among them with those that graphs read;
                None compares nothing.

        Raises:
            AddressMovedError: a weight was moved.
            ContextError: the forward context differs from the one that a full graph was captured under.
            RankError: an earlier sum over ranks has waited in vain.
        """
        if self._ranks is not None:
            self._ranks.check()
        if addressed is not None:
            self._addresses.check(addressed)
        captured = self.captured.context
        if captured is not None:
            captured.check(context, self.captured.tape.bucket, self.num_tokens, thorough=self._look_inside)
            self._look_inside = self._check_always

    def launch_uncounted(self, args: Sequence[Any]) -> None:
        """Replay a call's arguments for the time that it takes, inside `pool.using()`."""
        self.bound.copy_in.fill(args)
        self._pool.run_off_default_stream(self.bound.calls)

    def launch(self) -> None:
        """Replay what lies in the static inputs, inside `pool.using()`; results lie in `bound.outputs`."""
        self._pool.run_off_default_stream(self.bound.calls)
        counters.add_each(self._counted)
        self.captured.replays += 1
        self.captured.last_used = next(_clock)
