"""RoundStore: the rounds of a speculator, and which of them serves a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..options import DraftShape
from ..request import Request
from ..rounds.phase_runner import PhaseRunner
from ..rounds.phases import FILTERED, GREEDY, SAMPLED, Phases
from ..rounds.prefill import Piece, Prefill
from ..rounds.round import Round
from ..rounds.round_launch import Observer
from ..rounds.round_tensors import RoundTensors
from ..rounds.synthetic import Synthetic
from .pace import Pace, Timed
from .shape_planner import Planner, PlannerKey

GraphModes = tuple[tuple[str, str], ...]  # (phase, graph mode) of each
RoundKey = tuple[DraftShape, int, str, GraphModes, Synthetic | None]  # what `RoundStore.get` takes


@dataclass(frozen=True)
class RoundPolicy:
    """What the `EngineOptions` of one engine mean for its rounds.

    Attributes:
        planned: the shape of every round, or a planner that chooses before each.
        synthetic: synthetic acceptance of each shape; empty = the target decides.
        overlap: read results one step late.
    """

    planned: DraftShape | Planner
    graphs: GraphModes
    synthetic: dict[DraftShape, Synthetic]
    overlap: bool

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """All shapes that may be chosen."""
        return self.planned.shapes if isinstance(self.planned, Planner) else (self.planned,)

    @property
    def observe(self) -> Observer | None:
        """The planner's observer; None without a planner."""
        return self.planned.observe if isinstance(self.planned, Planner) else None

    @property
    def synthetic_accept_length(self) -> float | None:
        """Mean accept length of synthetic acceptance, of the longest draft that may run; None without it."""
        longest = max(self.synthetic, key=lambda shape: shape.steps, default=None)
        return None if longest is None else self.synthetic[longest].accept_length


class RoundStore:
    """Makes rounds when they are first asked for, and keeps them.

    Args:
        prefill: holds the resources of all rounds.

    Attributes:
        made: the rounds so far.
        pace: of prompts beside rounds.
    """

    def __init__(self, prefill: Prefill) -> None:
        self.prefill, self.resources = prefill, prefill.resources
        self.made: dict[RoundKey, Round] = {}
        # All ranks have to take the same steps, and their clocks differ.
        is_timed = self.resources.device.type == "cuda" and not self.resources.ranks.several
        self.pace = Pace(_timed_event if is_timed else None)

    @property
    def failures(self) -> tuple[str, ...]:
        """Phases without the graph that they were to have, and why."""
        return tuple(
            f"{key[1]} requests, {key[0]}: {runner.failure}"
            for key, made in self.made.items()
            for runner in made.runners
            if runner.failure
        )

    def size(self, requests: Sequence[Request]) -> int:
        """Requests of the round that serves these, padding included."""
        return next(size for size in self.resources.limits.batch_sizes if size >= len(requests))

    def choose(self, requests: Sequence[Request], policy: RoundPolicy) -> DraftShape:
        """The shape of the next round; a planner must not want times."""
        planned = policy.planned
        return planned.choose(self._key(requests, policy)).shape if isinstance(planned, Planner) else planned

    def wants_times(self, requests: Sequence[Request], policy: RoundPolicy) -> bool:
        """Whether a planner must time the phases before it can choose a round for these requests."""
        planned = policy.planned
        return isinstance(planned, Planner) and not planned.knows(self._key(requests, policy))

    def time(self, requests: Sequence[Request], policy: RoundPolicy) -> None:
        """Time the phases of all shapes. Nothing else may be in flight."""
        assert isinstance(policy.planned, Planner)
        rounds = {shape: self.round_for(requests, shape, policy) for shape in policy.shapes}
        seconds = {shape: each.seconds() for shape, each in rounds.items()}
        seconds = self.resources.ranks.first("time the phases of a round", seconds)
        policy.planned.measure(self._key(requests, policy), seconds)

    def round_for(self, requests: Sequence[Request], shape: DraftShape, policy: RoundPolicy) -> Round:
        """The round that serves these requests with this shape."""
        size, rule = self.size(requests), _rule(requests)
        return self.get(shape, size, rule, policy.graphs, policy.synthetic.get(shape))

    def begin_step(self, beside: Round | None, pieces: Sequence[Piece]) -> Timed:
        """Choose whether prompts share the forwards of a round, or go alone."""
        limits = self.resources.limits
        if not beside or not pieces or not limits.may_share(beside.tensors.shape, beside.tensors.size):
            return Timed(shared=False)
        rows = beside.rows + sum(piece.stop - piece.start for piece in pieces)
        return self.pace.begin((beside, self.prefill.padded(rows)))  # as many, padding included, take as long

    def get(
        self,
        shape: DraftShape,
        size: int,
        rule: str,
        graphs: GraphModes,
        synthetic: Synthetic | None = None,
    ) -> Round:
        """A round; a new one is captured when it is prepared or launched."""
        key = shape, size, rule, graphs, synthetic
        self.make([key])
        return self.made[key]

    def make(self, keys: Iterable[RoundKey]) -> None:
        """Make those that are new, and have the kernels of all compiled side by side."""
        for key in keys:
            if key not in self.made:
                self.made[key] = self._make(*key)
                self.made[key].compile_ahead()

    def _make(
        self, shape: DraftShape, size: int, rule: str, graphs: GraphModes, synthetic: Synthetic | None
    ) -> Round:
        tensors = RoundTensors.make(self.resources, shape, size, sampled=rule != GREEDY)
        phases = Phases(self.resources, tensors, rule, synthetic)
        bodies: dict[str, Callable[[str], None]] = {"draft": phases.draft, "verify": phases.verify}
        if shape.steps:
            bodies["extend"] = phases.extend
        modes, found = dict(graphs), self.resources
        given = found.pool, found.ranks, found.weights.parameters
        runners = [PhaseRunner(name, body, modes[name], *given) for name, body in bodies.items()]
        return Round(phases, runners, self.prefill)

    def _key(self, requests: Sequence[Request], policy: RoundPolicy) -> PlannerKey:
        return self.size(requests), _rule(requests), policy.graphs


def _timed_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _rule(requests: Sequence[Request]) -> str:
    """The cheapest rule that serves these requests; a greedy one among sampled ones stays greedy."""
    if any(request.sampling.filtered for request in requests):
        return FILTERED
    return GREEDY if all(request.sampling.greedy for request in requests) else SAMPLED
