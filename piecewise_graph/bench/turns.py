"""Settings that take turns on one speculator, and the ratios between them.

Note [Turns]
A machine is not the same from minute to minute. Sides that are to be compared serve the same requests, one
after the other in one process, and the order is reversed in every second turn; what is compared are
medians over the turns, and each turn's own ratio says how far they can be trusted.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from piecewise_graph.eagle.speculator import Speculator

from .drive import Timeline, drive
from .load import Arrival
from .metrics import Metrics
from .settings import Setting

RATIO_COLUMNS = ("output_throughput", "median_tpot_ms", "median_ttft_ms")
_WARM_PROMPT = 8  # tokens: many such prompts fit into one step


@dataclass(frozen=True)
class Ratio:
    """One column of one side over another's.

    Attributes:
        value: ratio of the medians over all turns.
        low, high: of the ratios of single turns.
    """

    column: str
    value: float
    low: float
    high: float


def take_turns(
    speculator: Speculator,
    sides: Mapping[str, Setting],
    load: Sequence[Arrival],
    concurrency: int,
    *,
    seed: int = 0,
    turns: int = 1,
    warm_up: int | None = None,
) -> dict[str, list[Metrics]]:
    """Metrics of every side, turn by turn.

    Args:
        warm_up: requests that each side serves untimed first; None = as many as run at a time.
    """
    opened = {name: _Side(speculator, setting, concurrency, seed) for name, setting in sides.items()}
    found: dict[str, list[Metrics]] = {name: [] for name in sides}
    try:
        for side in opened.values():
            side.warm_up(load, concurrency if warm_up is None else warm_up)
        for turn in range(turns):
            for name in reversed([*opened]) if turn % 2 else opened:
                found[name].append(opened[name].serve(load))
    finally:
        for side in opened.values():
            side.close()
    return found


class _Side:
    """A setting's engine, kept for all of its turns; while others have theirs, it has no requests."""

    def __init__(self, speculator: Speculator, setting: Setting, concurrency: int, seed: int) -> None:
        self._speculator, self._concurrency = speculator, concurrency
        self._engine, self._sampling = setting.engine(speculator), setting.sampling(seed)
        self.close = self._engine.close

    def warm_up(self, load: Sequence[Arrival], requests: int) -> None:
        """Compile and capture every batch size that the load can reach, then serve some of it."""
        for size in self._sizes():
            self._drive([_short(load[index % len(load)]) for index in range(size)], size)
        if requests:
            self._drive([_now(load[index % len(load)]) for index in range(requests)], self._concurrency)

    def serve(self, load: Sequence[Arrival]) -> Metrics:
        """Serve the load once, from an idle device."""
        gc.collect()
        if self._speculator.device.type == "cuda":
            torch.cuda.synchronize(self._speculator.device)
        return Metrics.of(self._drive(load, self._concurrency), self._concurrency)

    def _drive(self, load: Sequence[Arrival], concurrency: int) -> Timeline:
        timeline = drive(self._engine, load, concurrency, self._sampling)
        self._engine.step()  # with overlap, a round for nobody is still under way
        return timeline

    def _sizes(self) -> list[int]:
        """Of the batches that may run, largest first: graphs share memory best that way."""
        smaller = [size for size in self._speculator.batch_sizes if size < self._concurrency]
        return [self._concurrency, *sorted(smaller, reverse=True)]


def ratios(first: Sequence[Metrics], second: Sequence[Metrics]) -> list[Ratio]:
    """Columns of `first` over those of `second`, turn by turn; what is undefined is left out."""
    found = []
    for column in RATIO_COLUMNS:
        ours, theirs = ([getattr(turn, column) for turn in side] for side in (first, second))
        if all(ours) and all(theirs):
            single = [a / b for a, b in zip(ours, theirs, strict=True)]
            value = statistics.median(ours) / statistics.median(theirs)
            found.append(Ratio(column, value, min(single), max(single)))
    return found


def _now(arrival: Arrival) -> Arrival:
    return Arrival(arrival.index, arrival.prompt, arrival.max_new_tokens)


def _short(arrival: Arrival) -> Arrival:
    return Arrival(arrival.index, arrival.prompt[:_WARM_PROMPT], arrival.max_new_tokens)
