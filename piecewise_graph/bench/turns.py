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

from .drive import drive
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
    for setting in sides.values():
        _warm_up(speculator, setting, load, concurrency, concurrency if warm_up is None else warm_up, seed)
    found: dict[str, list[Metrics]] = {name: [] for name in sides}
    for turn in range(turns):
        for name in reversed([*sides]) if turn % 2 else sides:
            found[name].append(serve(speculator, sides[name], load, concurrency, seed))
    return found


def serve(
    speculator: Speculator, setting: Setting, load: Sequence[Arrival], concurrency: int, seed: int = 0
) -> Metrics:
    """Serve the load once with an engine of its own, from an idle device."""
    gc.collect()
    engine = setting.engine(speculator)
    try:
        if speculator.device.type == "cuda":
            torch.cuda.synchronize(speculator.device)
        return Metrics.of(drive(engine, load, concurrency, setting.sampling(seed)), concurrency)
    finally:
        engine.close()


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


def _warm_up(
    speculator: Speculator,
    setting: Setting,
    load: Sequence[Arrival],
    concurrency: int,
    requests: int,
    seed: int,
) -> None:
    """Compile and capture every batch size that the load can reach, then serve some of it."""
    engine = setting.engine(speculator)
    try:
        for size in _sizes(speculator, concurrency):
            short = [_short(load[index % len(load)]) for index in range(size)]
            drive(engine, short, size, setting.sampling(seed))
        if requests:
            some = [load[index % len(load)] for index in range(requests)]
            drive(engine, [_now(arrival) for arrival in some], concurrency, setting.sampling(seed))
    finally:
        engine.close()


def _sizes(speculator: Speculator, concurrency: int) -> list[int]:
    """One batch for each size that rounds are made for, largest first: graphs share memory best that way."""
    return [concurrency, *sorted((s for s in speculator.batch_sizes if s < concurrency), reverse=True)]


def _now(arrival: Arrival) -> Arrival:
    return Arrival(arrival.index, arrival.prompt, arrival.max_new_tokens)


def _short(arrival: Arrival) -> Arrival:
    return Arrival(arrival.index, arrival.prompt[:_WARM_PROMPT], arrival.max_new_tokens)
