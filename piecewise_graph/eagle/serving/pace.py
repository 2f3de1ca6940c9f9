"""Pace: whether prompts beside a round are faster in its forwards or alone, found by timing both.

In the round's forwards, one read of the weights serves prompts and round. Alone, they leave verify and
draft-extend the graphs that they are, with few launches for the host. Which is faster depends on the model,
the host, and how many rows there are.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

_KEPT = 3  # latest times of a way; the median of so many leaves out a step in which a kernel was compiled
_RETRY = 16  # steps until the slower way is tried again; twice as many after each time


def _times() -> deque[float]:
    return deque(maxlen=_KEPT)


@dataclass
class _Ways:
    """Times of both ways, and when the slower one is tried again."""

    shared: deque[float] = field(default_factory=_times)
    alone: deque[float] = field(default_factory=_times)
    interval: int = _RETRY
    left: int = _RETRY

    def next_shares(self) -> bool:
        if not self.shared or not self.alone:
            return not self.shared
        is_faster = statistics.median_low(self.shared) <= statistics.median_low(self.alone)
        self.left -= 1
        if self.left:
            return is_faster
        self.interval = self.left = 2 * self.interval
        return not is_faster


@dataclass(frozen=True)
class Timed:
    """A step that has begun, and the way that its prompts go.

    Attributes:
        shared: prompts go with the round's forwards.
        times: where its time belongs; None = it is not timed.
        start: mark of the device's clock.
    """

    shared: bool
    times: deque[float] | None = None
    start: Any = None


class Pace:
    """Tells which way the next prompts go, from how long the steps before took on the device.

    The faster way is kept, and the slower one is tried ever more rarely.

    Args:
        mark: marks the end of what was launched so far; the mark has `query` and `elapsed_time` as
            `torch.cuda.Event`. None = nothing is timed, and prompts share.
    """

    def __init__(self, mark: Callable[[], Any] | None) -> None:
        self._mark = mark
        self._ways: dict[Hashable, _Ways] = defaultdict(_Ways)
        self._running: deque[tuple[Timed, Any]] = deque()

    def begin(self, key: Hashable) -> Timed:
        """Choose the way of a step's prompts, before anything of the step is launched.

        Args:
            key: of all steps whose times compare.
        """
        if self._mark is None:
            return Timed(True)
        while self._running and self._running[0][1].query():
            timed, end = self._running.popleft()
            assert timed.times is not None
            timed.times.append(timed.start.elapsed_time(end))
        ways = self._ways[key]
        shared = ways.next_shares()
        return Timed(shared, ways.shared if shared else ways.alone, self._mark())

    def end(self, timed: Timed) -> None:
        """The step is launched whole."""
        if self._mark is not None and timed.times is not None:
            self._running.append((timed, self._mark()))
