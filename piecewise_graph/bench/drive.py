"""A load against an engine: arrivals, steps, and when whose tokens came."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piecewise_graph.eagle.options import Sampling
from piecewise_graph.eagle.statistics import Statistics

from .load import Arrival


@dataclass(frozen=True)
class RequestTimes:
    """One served request; times in seconds since the load began.

    Attributes:
        released: when it was given to the engine.
        first, last: when the host learned of its first and its last token.
    """

    input_tokens: int
    output_tokens: int
    released: float
    first: float
    last: float


@dataclass(frozen=True)
class Timeline:
    """A load that was served to its end.

    Attributes:
        most_at_once: requests in the engine at the same time.
        statistics: of all rounds; says whether acceptance was decreed.
    """

    requests: tuple[RequestTimes, ...]
    most_at_once: int
    statistics: Statistics

    @property
    def seconds(self) -> float:
        """From the beginning of the load to the last token."""
        return max(request.last for request in self.requests)


class _Watch:
    """Notes when the tokens of one request came."""

    def __init__(self, released: float, clock: Callable[[], float]) -> None:
        self.released, self._clock = released, clock
        self.first = self.last = released
        self._count = 0

    def __call__(self, _: Any, new_tokens: Sequence[int]) -> None:
        if not new_tokens:
            return
        self.last = self._clock()
        if not self._count:
            self.first = self.last
        self._count += len(new_tokens)

    def times(self, request: Any) -> RequestTimes:
        return RequestTimes(len(request.prompt), len(request.tokens), self.released, self.first, self.last)


def drive(
    engine: Any,
    load: Sequence[Arrival],
    concurrency: int,
    sampling: Sampling,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Timeline:
    """Serve every request of `load`, at most `concurrency` of them at a time.

    A request is released to the engine when it is due and there is room, and is timed from then on. The loop
    sleeps only while the engine has nothing to do.
    """
    waiting, served = deque(load), list[tuple[Any, _Watch]]()
    began, most = clock(), 0

    def now() -> float:
        return clock() - began

    while waiting or engine.unfinished:
        while waiting and engine.unfinished < concurrency and waiting[0].due <= now():
            arrival = waiting.popleft()
            watch = _Watch(now(), now)
            request = engine.add_request(
                arrival.prompt, max_new_tokens=arrival.max_new_tokens,
                sampling=replace(sampling, seed=sampling.seed + arrival.index), on_tokens=watch,
            )  # fmt: skip
            served.append((request, watch))
        most = max(most, engine.unfinished)
        if engine.unfinished:
            engine.step()
        elif waiting:
            sleep(max(waiting[0].due - now(), 0.0))
    times = tuple(watch.times(request) for request, watch in served)
    counts = tuple(request.counts for request, _ in served)
    return Timeline(times, most, Statistics(counts, engine.synthetic_accept_length))
