"""Retired: graphs of static KV caches that are dead, for caches that come to lie where those lay.

`generate` makes a cache per call, and lets it go. An allocator tends to hand the same memory out again, and
graphs know a cache by its address alone. So a runtime outlives the static tensors that it writes, which its
tapes do not keep alive, and serves the next ones at these addresses.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from piecewise_graph.runtime.runtime import Runtime

_MOST = 4  # of one model, the latest


class Retired:
    """Runtimes of one trace that wait for their addresses to come back, by the model that they belong to."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, list[Runtime]] = {}

    def add(self, model: Hashable, runtime: Runtime) -> Iterable[Runtime]:
        """Have `runtime` wait; those that have no room any more are returned."""
        waiting = [runtime, *self._waiting.get(model, ())]
        self._waiting[model] = waiting[:_MOST]
        return waiting[_MOST:]

    def take(self, model: Hashable, args: Sequence[Any]) -> Runtime | None:
        """One whose graphs read and write the tensors of this call; it waits no longer."""
        waiting = self._waiting.get(model, [])
        found = next((each for each in waiting if each.addresses.hold(args, captured=True)), None)
        if found is not None:
            waiting.remove(found)
        return found

    def remove(self, model: Hashable, runtime: object) -> Iterable[Runtime]:
        """It waits no longer; returned if it did."""
        waiting = self._waiting.get(model, [])
        found = [each for each in waiting if each is runtime]
        waiting[:] = [each for each in waiting if each is not runtime]
        return found

    def drop(self, model: Hashable) -> Iterable[Runtime]:
        """Those of a model wait no longer, and are returned."""
        return self._waiting.pop(model, [])

    def drop_all(self) -> Iterable[Runtime]:
        """None waits any longer; all are returned."""
        return [each for model in list(self._waiting) for each in self.drop(model)]
