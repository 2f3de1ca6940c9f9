"""PhaseRunner: one phase of a round as a graph, or line by line. The same class for all three."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import piecewise_graph as pg

from ..errors import SpeculatorError
from ..options import FULL

_SHOWN = {"extend": "draft-extend"}  # what traces call a phase


class PhaseRunner:
    """Runs `body(mode)`: every time, or once into a graph that is replayed from then on.

    Args:
        name: of the phase, as traces show it.
        body: the phase; reads and writes tensors that stay where they are, and returns nothing.
        mode: one of `options.GRAPH_MODES`.
        pool: whose memory and stream a full graph takes.
    """

    def __init__(self, name: str, body: Callable[[str], None], mode: str, pool: pg.GraphPool) -> None:
        self.name, self.mode = name, mode
        self._body, self._pool = body, pool
        self._graph: Any = None  # what GraphPool.capture_call returned

    @property
    def is_ready(self) -> bool:
        """Whether its graph is there, if it is to have one."""
        return self.mode != FULL or (self._graph is not None and self._graph.replay is not None)

    def prepare(self, device: torch.device) -> None:
        """Compile, warm up, and capture where the phase is a full graph.

        The body runs: its round must hold padded requests only, which leave everything as it is.
        """
        self._body(self.mode)
        if self.mode != FULL:
            return
        try:
            self._graph = self._pool.capture_call(
                lambda: self._body(self.mode), device=device, name=_SHOWN.get(self.name, self.name)
            )
        except torch.OutOfMemoryError as error:
            raise SpeculatorError.capture_failed(self.name, str(error)) from error
        pg.counters.add("phase_captures")

    def __call__(self) -> None:
        assert self.is_ready
        if self._graph is not None:
            self._graph()
            pg.counters.add("phase_replays")
            return
        with named(self.name):
            self._body(self.mode)

    def seconds(self, device: torch.device, rounds: int = 5) -> float:
        """Median time of one run, over what the round holds now."""
        taken = []
        for _ in range(rounds + 1):
            _wait(device)
            began = time.perf_counter()
            self()
            _wait(device)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])


def named(phase: str) -> torch.profiler.record_function:
    """Mark a phase that is no graph in the trace of a profiler."""
    return torch.profiler.record_function(_SHOWN.get(phase, phase))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
