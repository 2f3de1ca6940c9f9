"""Which round serves a batch: its size, its shape and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..options import DraftShape
from ..request import Request
from ..rounds.phases import FILTERED, GREEDY, SAMPLED
from ..rounds.synthetic import Synthetic
from .in_flight import Observer
from .shape_planner import Place, Planner
from .workshop import RoundKey, Workshop


@dataclass(frozen=True)
class RoundChoice:
    """What the rounds of an engine follow.

    Attributes:
        shape: of every round; or a planner that chooses before each.
        graphs: (phase, way) of each.
        batch_sizes: that rounds are made for, ascending.
        synthetic: a mean accept length or rates; None = the target decides.
    """

    shape: DraftShape | Planner
    graphs: tuple[tuple[str, str], ...]
    batch_sizes: Sequence[int]
    synthetic: float | Sequence[float] | None

    @property
    def shapes(self) -> tuple[DraftShape, ...]:
        """All that may be chosen."""
        return self.shape.shapes if isinstance(self.shape, Planner) else (self.shape,)

    @property
    def observe(self) -> Observer | None:
        """Whom to tell what rounds have found."""
        return self.shape.observe if isinstance(self.shape, Planner) else None

    @property
    def decreed(self) -> float | None:
        """The mean accept length that was decreed, for the longest draft that may run; None without it."""
        steps = max(shape.steps for shape in self.shapes)
        if self.synthetic is None or not steps:
            return None
        return Synthetic.of(self.synthetic, steps, clamped=True).accept_length

    def wants_times(self, batch: Sequence[Request]) -> bool:
        """Whether the phases have to be timed before a round of this batch can be chosen."""
        return isinstance(self.shape, Planner) and not self.shape.knows(self._place(batch))

    def time(self, batch: Sequence[Request], workshop: Workshop) -> None:
        """Time the phases of all shapes; nothing else may be under way."""
        assert isinstance(self.shape, Planner)
        rounds = {shape: workshop.round_for(self.key(batch, shape)) for shape in self.shapes}
        self.shape.measure(self._place(batch), {shape: each.seconds() for shape, each in rounds.items()})

    def choose(self, batch: Sequence[Request]) -> DraftShape:
        """The shape of the next round."""
        return self.shape.choose(self._place(batch)).shape if isinstance(self.shape, Planner) else self.shape

    def key(self, batch: Sequence[Request], shape: DraftShape) -> RoundKey:
        """The round that serves these requests with this shape."""
        rates = None
        if self.synthetic is not None and shape.steps:
            rates = Synthetic.of(self.synthetic, shape.steps, clamped=True).rates
        return RoundKey(self.size(batch), shape, _rule(batch), self.graphs, rates)

    def size(self, batch: Sequence[Request]) -> int:
        """Requests of the round, padding included."""
        return next(size for size in self.batch_sizes if size >= len(batch))

    def _place(self, batch: Sequence[Request]) -> Place:
        return self.size(batch), _rule(batch), self.graphs


def _rule(requests: Sequence[Request]) -> str:
    """The cheapest rule that serves these requests; a greedy one among sampled ones stays greedy."""
    if any(request.sampling.filtered for request in requests):
        return FILTERED
    return GREEDY if all(request.sampling.greedy for request in requests) else SAMPLED
