"""What the parts of bench_stacks share: their setting, and the turns of their sides as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.common import Timing, alternate, seconds_of

OURS = ("piecewise", "full")  # the sides of this backend
EAGER_ROUNDS = 1  # it is by far the slowest side, and no mark is about its time
SIDE_SECONDS = 1.0  # about as long takes each side of a case whose calls are decode steps

Row = dict[str, Any]
Measure = Callable[[], list[Row]]  # of a case that is ready: takes the times, returns a row per side


@dataclass(frozen=True)
class Setting:
    """What the options say, for one device."""

    device: torch.device
    compiler: str
    rounds: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@dataclass(frozen=True)
class Taken:
    """What a side took and gave, the sides of a case taking turns.

    Attributes:
        calls: of the side, those that warmed it up included.
        served: replays in all these calls, and what else `counted` counts.
        result: what the last call returned.
    """

    timing: Timing
    calls: int
    served: dict[str, int]
    result: Any


def in_turns(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, repeat: int = 1, warmups: int = 1
) -> dict[str, Taken]:
    """Time and count calls of all sides."""
    served: dict[str, dict[str, int]] = {side: {} for side in sides}
    results: dict[str, Any] = {}

    def call(side: str) -> None:
        results[side] = sides[side]()

    calls = {side: partial(call, side) for side in sides}
    rounds_of = {side: EAGER_ROUNDS if side == "eager" else rounds for side in sides}
    timings = alternate(
        calls,
        rounds=rounds,
        repeat=repeat,
        warmups=warmups,
        rounds_of=rounds_of,
        around=lambda side: counted(served[side]),
    )
    return {
        side: Taken(timing, warmups + rounds_of[side] * repeat, served[side], results[side])
        for side, timing in timings.items()
    }


def rounds_for(call: Callable[[], Any], repeat: int, rounds: int) -> int:
    """How many rounds of `repeat` calls to take: `rounds` at least, ten times as many of a fast call."""
    fitting = int(SIDE_SECONDS / (repeat * seconds_of(call)))
    return min(max(fitting, rounds), 10 * rounds)


@contextmanager
def counted(found: dict[str, int]) -> Iterator[None]:
    """Replays of the block, captured tapes, fallbacks, and regions between graphs are added to `found`."""
    before = pg.counters.snapshot()
    yield
    after = pg.counters.snapshot()
    for name in ("replays", "tapes", "fallbacks", "unpadded_segments"):
        found[name] = found.get(name, 0) + after.get(name, 0) - before.get(name, 0)


def rows_of(common: Row, turns: Mapping[str, Taken], each: int = 1, forwards: float = 1) -> list[Row]:
    """A row per side, with median and quartiles.

    Args:
        each: how many of the things that a row gives the time of one call does.
        forwards: of one call, those that graphs could serve.
    """
    rows = []
    for side, taken in turns.items():
        timing = taken.timing
        times = {"ms": timing.median, "low": timing.low, "high": timing.high}
        row = common | {"side": side, **{name: seconds / each * 1e3 for name, seconds in times.items()}}
        share = taken.served["replays"] / (taken.calls * forwards)
        rows.append(row | ({"replayed": share} if side in OURS else {}))
    return rows


def first_difference(found: Tensor, wanted: Tensor) -> int | None:
    """The first new token, the last dimension, that differs in any row; None where none does."""
    different = (found != wanted).any(0).nonzero()
    return int(different[0]) if len(different) else None
