"""ReadyRound: a round whose phases are prepared, and what the host does around them."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise_graph.custom_ops.kv_cache import RequestTable, device_ints

from ..options import FULL
from ..request import Request
from .mixed_round import Mixed
from .phase_runner import PhaseRunner, named
from .phases import Phases
from .prefill import Chunk, Prefill
from .results import Result
from .weights import Weights


class ReadyRound:
    """Runs one round for the requests of a batch.

    Args:
        phases: what the runners run.
        runners: draft, verify, and draft-extend where there is a draft.
    """

    def __init__(
        self, phases: Phases, runners: Sequence[PhaseRunner], table: RequestTable, weights: Weights
    ) -> None:
        self.round, self.runners = phases.round, tuple(runners)
        self._phases, self._table, self._weights = phases, table, weights
        self._slots: list[int] = [0] * phases.round.size

    def launch(self, requests: Sequence[Request]) -> Result:
        """Start a round, and wait for nothing: its result is under way when this returns."""
        self._begin(requests)
        draft, verify, *rest = self.runners
        draft()
        verify()
        result = Result.of(self.round.buffers.result, None)
        for extend in rest:
            extend()
        return result

    def launch_with(self, requests: Sequence[Request], prefill: Prefill, chunk: Chunk) -> Result:
        """The same, prompts sharing the forwards of target and draft."""
        self._begin(requests)
        mixed = Mixed(self._phases, prefill, chunk)
        self.runners[0]()
        with named("verify"):
            mixed.verify()
        result = Result.of(self.round.buffers.result, mixed.chosen)
        with named("extend"):
            mixed.extend()
        return result

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

    def _begin(self, requests: Sequence[Request]) -> None:
        self._ensure()
        self._fill([request.slot for request in requests])
        self._table.flush()

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
