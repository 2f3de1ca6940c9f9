"""What the parts of bench_stacks share: their setting, counting, and a side's times as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import Timing

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


@contextmanager
def counted(found: dict[str, int]) -> Iterator[None]:
    """Replays of the block, captured tapes, fallbacks, and regions between graphs are added to `found`."""
    before = pg.counters.snapshot()
    yield
    after = pg.counters.snapshot()
    for name in ("replays", "tapes", "fallbacks", "unpadded_segments"):
        found[name] = found.get(name, 0) + after.get(name, 0) - before.get(name, 0)


def milliseconds(timing: Timing, each: int = 1) -> dict[str, float]:
    """Median and quartiles of one of `each` things that a timed call does."""
    return {
        "ms": timing.median / each * 1e3,
        "low": timing.low / each * 1e3,
        "high": timing.high / each * 1e3,
    }
