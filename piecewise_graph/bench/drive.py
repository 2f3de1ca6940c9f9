"""Serves a load on an engine, and lets settings take turns on one speculator.

The speed of a machine changes from minute to minute. Settings that are compared therefore serve the same
requests one after the other in one process, in reversed order in every second turn. Medians over the turns
are compared, and the spread of each turn's own ratio says how far they can be trusted.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch

from piecewise_graph.eagle.options import Sampling
from piecewise_graph.eagle.speculator import Speculator
from piecewise_graph.eagle.statistics import Statistics

from .load import Arrival
from .metrics import Metrics, RequestTimes, Timeline
from .setting import Setting

_WARM_PROMPT = 8  # tokens: many such prompts fit into one step
_NAP = 1.0  # seconds at most, so that ranks which wait for a decision hear of one


def wait(device: torch.device) -> None:
    """Return when the device has done everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def drive(
    engine: Any,
    load: Sequence[Arrival],
    concurrency: int,
    sampling: Sampling,
    *,
    decide: Callable[[int], int] = int,
    leads: bool = True,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Timeline:
    """Serve every request of `load`, at most `concurrency` of them at a time.

    A request is released to the engine when it is due and a place is free, and is timed from then on. The
    loop sleeps only while the engine has nothing to do.

    Args:
        decide: how many requests a step releases, from how many this process finds due. Several ranks have
            clocks of their own, and release the same requests at the same step.
        leads: the clock of this process is the one that counts. The others wait for it in `decide` alone: one
            that sleeps by a clock of its own would come late to the next step.
    """
    waiting, served = deque(load), list[tuple[Any, list[float]]]()
    began, most = clock(), 0

    def now() -> float:
        return clock() - began

    while waiting or engine.unfinished:
        room, moment = max(concurrency - engine.unfinished, 0), now()
        due = sum(each.due <= moment for each in islice(waiting, room))
        for _ in range(decide(due) if waiting and room else 0):  # on all ranks there is room, or on none
            arrival, moments = waiting.popleft(), [now()]
            request = engine.add_request(
                arrival.prompt, max_new_tokens=arrival.max_new_tokens,
                sampling=replace(sampling, seed=sampling.seed + arrival.index),
                on_tokens=partial(_note, moments, now),
            )  # fmt: skip
            served.append((request, moments))
        most = max(most, engine.unfinished)
        if engine.unfinished:
            engine.step()
        elif waiting and leads:
            sleep(min(max(waiting[0].due - now(), 0.0), _NAP))
    times = tuple(
        RequestTimes(len(request.prompt), len(request.tokens), released, (came or [released])[0], moments[-1])
        for request, moments in served
        for released, *came in [moments]
    )
    counts = tuple(request.counts for request, _ in served)
    return Timeline(times, most, Statistics(counts, engine.synthetic_accept_length))


def _note(moments: list[float], now: Callable[[], float], _: Any, new_tokens: Sequence[int]) -> None:
    if new_tokens:
        moments.append(now())


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
        warm_up: requests that each side serves before it is timed; None = `concurrency`.
    """
    # What is due from the beginning is due on every rank.
    decide = speculator.ranks.decisions().next if any(each.due for each in load) else int
    opened = {name: _Side(speculator, setting, concurrency, seed, decide) for name, setting in sides.items()}
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
    """The engine of a setting, kept for all turns. It has no requests while other sides have their turn."""

    def __init__(
        self,
        speculator: Speculator,
        setting: Setting,
        concurrency: int,
        seed: int,
        decide: Callable[[int], int],
    ) -> None:
        self._speculator, self._concurrency, self._decide = speculator, concurrency, decide
        self._engine, self._sampling = setting.engine(speculator), replace(setting.sampling, seed=seed)
        self.close = self._engine.close

    def warm_up(self, load: Sequence[Arrival], requests: int) -> None:
        """Compile and capture every batch size that the load can reach, then serve some of it."""
        smaller = [size for size in self._speculator.batch_sizes if size < self._concurrency]
        for size in [self._concurrency, *sorted(smaller, reverse=True)]:  # largest first: less graph memory
            some = [load[index % len(load)] for index in range(size)]
            self._drive([replace(each, prompt=each.prompt[:_WARM_PROMPT], due=0.0) for each in some], size)
        if requests:
            some = [load[index % len(load)] for index in range(requests)]
            self._drive([replace(each, due=0.0) for each in some], self._concurrency)

    def serve(self, load: Sequence[Arrival]) -> Metrics:
        """Serve the load once, from an idle device."""
        gc.collect()
        wait(self._speculator.device)
        return Metrics.of(self._drive(load, self._concurrency), self._concurrency)

    def _drive(self, load: Sequence[Arrival], concurrency: int) -> Timeline:
        leads = self._speculator.ranks.rank == 0
        timeline = drive(self._engine, load, concurrency, self._sampling, decide=self._decide, leads=leads)
        self._engine.step()  # with overlap, a round without requests is still under way
        return timeline
