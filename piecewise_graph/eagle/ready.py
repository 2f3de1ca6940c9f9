"""ReadyRound: a round whose phases are prepared, and what the host does around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from piecewise_graph.custom_ops.kv_cache import RequestTable, device_ints

from .forward import FULL
from .request import Request
from .round import Round
from .runner import PhaseRunner
from .weights import Weights


class ReadyRound:
    """Runs one round for the requests of a batch.

    Args:
        runners: the phases in order; the second, verify, writes the result that the host reads.
    """

    def __init__(
        self, round: Round, runners: Sequence[PhaseRunner], table: RequestTable, weights: Weights
    ) -> None:
        self.round, self.runners = round, tuple(runners)
        self._table, self._weights = table, weights
        self._slots: list[int] = [0] * round.size
        result = round.buffers.result
        self._on_gpu = result.is_cuda
        self._result = torch.zeros(result.shape, dtype=result.dtype, pin_memory=self._on_gpu)
        self._arrived = torch.cuda.Event() if self._on_gpu else None

    def run(self, requests: Sequence[Request]) -> list[list[int]]:
        """What each request accepted, the bonus last. Waits for verify, and not for what follows it."""
        self._ensure()
        self._fill([request.slot for request in requests])
        self._table.flush()
        draft, verify, *rest = self.runners
        draft()
        verify()
        self._result.copy_(self.round.buffers.result, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        for runner in rest:
            runner()
        if self._arrived is not None:
            self._arrived.synchronize()
        rows = self._result[: len(requests)].tolist()
        return [row[: row[-1]] for row in rows]

    def prepare(self) -> None:
        """Compile and capture every phase, over padding alone: nobody's tokens change."""
        self._fill([])
        for runner in self.runners:
            runner.prepare(self.round.buffers.result.device)
        if any(runner.way == FULL for runner in self.runners):
            self._weights.hold()

    def seconds(self) -> dict[str, float]:
        """Median time of every phase, over padding alone: nobody's tokens change."""
        self._ensure()
        self._fill([])
        return {runner.name: runner.seconds(self.round.buffers.result.device) for runner in self.runners}

    def _ensure(self) -> None:
        """Graphs may have been dropped, by pg.reset for instance."""
        if not all(runner.is_ready for runner in self.runners):
            self.prepare()

    def _fill(self, slots: list[int]) -> None:
        """Name the batch's requests to the device, where they are not those of the round before."""
        slots = slots + [0] * (self.round.size - len(slots))
        if slots != self._slots:
            buffers = self.round.buffers
            buffers.requests.copy_(device_ints(slots, buffers.requests.device))
            self._slots = slots
