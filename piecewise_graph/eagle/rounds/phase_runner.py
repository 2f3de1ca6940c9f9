"""PhaseRunner: one phase of a round as a graph, or line by line. The same class for all three."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg

from ..errors import SpeculatorError
from ..options import COMPILED, FULL

_SHOWN = {"extend": "draft-extend"}  # what traces call a phase


class PhaseRunner:
    """Runs `body(mode)`: every time, or once into a graph that is replayed from then on.

    Args:
        name: of the phase, as traces show it.
        body: the phase; reads and writes tensors that stay where they are, and returns nothing.
        mode: one of `options.GRAPH_MODES`.
        pool: whose memory and stream a full graph takes.
        ranks: who run the phase together: it is a graph on all of them, or on none.
        weights: what the phase reads and never writes.

    Attributes:
        failure: why its graph could not be captured. It runs compiled then, until the pool drops its graphs.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[str], None],
        mode: str,
        pool: pg.GraphPool,
        ranks: pg.Ranks,
        weights: Callable[[], Iterable[Tensor]],
    ) -> None:
        self.name, self.failure = name, ""
        self._asked, self._body, self._pool, self._ranks, self._weights = mode, body, pool, ranks, weights
        self._graph: Any = None  # what GraphPool.capture_call returned

    @property
    def mode(self) -> str:
        """The graph mode in which it runs."""
        return COMPILED if self.failure else self._asked

    @property
    def is_ready(self) -> bool:
        """Whether its graph is there, if it is to have one."""
        return self.mode != FULL or (self._graph is not None and self._graph.replay is not None)

    def drop_graphs(self) -> None:
        """Called by the pool: a capture that failed is tried again."""
        self.failure = ""

    def prepare(self, device: torch.device) -> None:
        """Compile, warm up, and capture where the phase is a full graph.

        The body runs: its round must hold padded requests only, which leave everything as it is.
        """
        self._body(self.mode)
        if self.mode != FULL:
            return
        try:
            self._graph = self._pool.capture_call(
                lambda: self._body(self.mode),
                device=device,
                name=_SHOWN.get(self.name, self.name),
                unwritten=self._weights(),
            )
        except Exception as error:  # the phase itself has run: it goes on without a graph
            self._graph, failure = None, f"{type(error).__name__}: {error}"
        else:
            failure = ""
        failures = self._ranks.answers(f"capture {self.name}", failure)
        if any(failures):
            self._graph = None
            self.failure = str(SpeculatorError.capture_failed(self.name, next(filter(None, failures))))
            self._pool.join(device, self)
            pg.counters.add("failed_captures")
            return
        pg.counters.add("phase_captures")

    def __call__(self) -> None:
        assert self.is_ready
        if self._graph is not None:
            self._graph()
            pg.counters.add("phase_replays")
            return
        if self.failure:
            pg.counters.add("not_full", reason="capture_failed")
        with named(self.name):
            self._body(self.mode)


def seconds_of(runners: Sequence[PhaseRunner], device: torch.device, rounds: int = 5) -> float:
    """Median time until the device has run these phases, one after the other."""
    taken = []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        for runner in runners:
            runner()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def named(phase: str) -> torch.profiler.record_function:
    """Mark a phase that is no graph in the trace of a profiler."""
    return torch.profiler.record_function(_SHOWN.get(phase, phase))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
