"""PhaseRunner: one phase of a round as a graph, or line by line. The same class for all three."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.recorder.record import capturing
from piecewise_graph.telemetry import counters

from ..errors import SpeculatorError
from ..options import FULL

_SHOWN = {"extend": "draft-extend"}  # what traces call a phase


class PhaseRunner:
    """Runs `body(way)`: every time, or once into a graph that is replayed from then on.

    Args:
        name: of the phase, as traces show it.
        body: the phase; reads and writes tensors that stay where they are, and returns nothing.
        way: one of `forward.WAYS`.
        pool: whose memory and stream a full graph takes.
    """

    def __init__(self, name: str, body: Callable[[str], None], way: str, pool: pg.GraphPool) -> None:
        self.name, self.way = name, way
        self._body, self._pool = body, pool
        self._replay: Callable[[], None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its graph is there, if it is to have one."""
        return self.way != FULL or self._replay is not None

    def prepare(self, device: torch.device) -> None:
        """Compile, warm up, and capture where the phase is a full graph.

        The body runs: its round must hold padded requests only, which leave everything as it is.
        """
        self._body(self.way)
        if self.way != FULL:
            return
        self._pool.join(device, self)
        try:
            with self._pool.session():
                self._body(self.way)
                with capturing(device):
                    self._replay, _ = self._pool.capture(self._run, ())
        except torch.OutOfMemoryError as error:
            raise SpeculatorError.capture_failed(self.name, str(error)) from error
        counters.add("phase_captures")

    def __call__(self) -> None:
        assert self.is_ready
        with named(self.name):
            if self._replay is None:
                self._body(self.way)
                return
            with self._pool.using():
                self._pool.run_off_default_stream([self._replay])
            counters.add("phase_replays")

    def drop_graphs(self) -> None:
        """Called by the pool: the phase has to be prepared again."""
        self._replay = None

    def _run(self) -> list[torch.Tensor]:
        self._body(self.way)
        return []

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


def named(phase: str) -> AbstractContextManager[Any]:
    """Mark a phase in the trace of a profiler; free of cost where none runs."""
    if not _torch.is_profiling():
        return nullcontext()
    return torch.profiler.record_function(_SHOWN.get(phase, phase))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
