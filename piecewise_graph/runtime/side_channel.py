"""SideChannel: what pg.compile, pg.capture and pg.freeze tell the traces of a model, and learn from them.

Dynamo stands between the two: it calls a trace with the graph's arguments and hands its outputs on. Nothing
else gets through, so everything else passes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Purpose(Enum):
    """What the calls of a model are made for.

    SERVE answers them. TRACE ends them before anything runs. WARM_UP runs them without graphs, uncounted.
    CAPTURE runs them and captures their buckets.
    """

    SERVE = "serve"
    TRACE = "trace"
    WARM_UP = "warm up"
    CAPTURE = "capture"


_undone: ContextVar[bool] = ContextVar("undone", default=False)


@contextmanager
def undoing_writes(on: bool = True) -> Iterator[None]:
    """What segments write to static tensors in the block is undone after each call, or not."""
    before = _undone.set(on)
    try:
        yield
    finally:
        _undone.reset(before)


def undoes_writes() -> bool:
    return _undone.get()


class TracedOnly(Exception):
    """Ends a call that was made for its trace alone, before anything ran."""


@dataclass(frozen=True)
class Ran:
    """One graph that ran: the trace that served it, what it got, and what it returned."""

    trace: Any
    args: Sequence[Any]
    outputs: Sequence[Any]


class SideChannel(threading.local):
    """One per model, in which each thread sees its own calls alone.

    Attributes:
        purpose: of the current calls.
        graphs_run: graphs that began to run since the last `begin_call`.
        answer: what runs in place of a trace, called with it and its arguments; or None.
    """

    def __init__(self) -> None:
        self.purpose = Purpose.SERVE
        self.graphs_run = 0
        self.answer: Callable[[Any, Sequence[Any]], Any] | None = None
        self._observed: list[Ran] | None = None

    def begin_call(self) -> None:
        self.graphs_run = 0

    def enter(self) -> None:
        """A trace is about to run.

        Raises:
            TracedOnly: the call was made for its trace alone.
        """
        if self.purpose is Purpose.TRACE:
            raise TracedOnly

    def admitted(self) -> None:
        """The call fits the trace: from here on it has effects, and no other trace may answer it."""
        self.graphs_run += 1

    def leave(self, trace: Any, args: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A trace has run."""
        if self._observed is not None:
            self._observed.append(Ran(trace, args, outputs))

    @contextmanager
    def calls_for(self, purpose: Purpose) -> Iterator[None]:
        """The calls inside the block are made for `purpose`."""
        before, self.purpose = self.purpose, purpose
        try:
            yield
        finally:
            self.purpose = before

    @contextmanager
    def answering(self, answer: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
        """Calls inside the block are answered by `answer(trace, args)`; the traces do not run."""
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None

    @contextmanager
    def observing(self) -> Iterator[list[Ran]]:
        """Collect the graphs that run inside the block."""
        found: list[Ran] = []
        self._observed = found
        try:
            yield found
        finally:
            self._observed = None
