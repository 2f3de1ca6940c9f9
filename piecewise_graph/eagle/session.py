"""Session: requests through rounds until they are finished; those that find no room wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from .phases import FILTERED, GREEDY, SAMPLED
from .planner import Planner
from .prefill import Prefill
from .request import Request
from .rounds import RoundKey, Workshop
from .shapes import DraftShape
from .synthetic import Synthetic


class Session:
    """One set of requests. `step` until `unfinished` is empty, or `close` before.

    Args:
        shape: of every round; or a planner that chooses before each.
        graphs: (phase, way) of each.
        synthetic: a mean accept length or rates; None = the target decides.
        running: surrounds what runs on the device.

    Attributes:
        waiting, running: requests that have no slot yet, and those in rounds.
    """

    def __init__(
        self,
        workshop: Workshop,
        prefill: Prefill,
        requests: Sequence[Request],
        *,
        shape: DraftShape | Planner,
        room: int,
        batch_sizes: Sequence[int],
        graphs: tuple[tuple[str, str], ...],
        synthetic: float | Sequence[float] | None,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.waiting, self.running = deque(requests), list[Request]()
        self._workshop, self._prefill, self._shape = workshop, prefill, shape
        self._room, self._batch_sizes, self._graphs = room, batch_sizes, graphs
        self._synthetic, self._context = synthetic, context
        self._latest: RoundKey | None = None

    @property
    def unfinished(self) -> int:
        """Requests that want more tokens."""
        return len(self.waiting) + len(self.running)

    def step(self) -> None:
        """Start the requests that there is room for, then run one round of all that run.

        Raises:
            CacheError: one request alone needs more pages than there are.
        """
        with self._context():
            self._admit()
            if self.running:
                self._round()

    def rewind(self) -> None:
        """Put the running requests back to where their prompts ended, for timings that want rounds alike."""
        with self._context():
            for request in self.running:
                del request.tokens[1:]
                request.length = request.drafted = len(request.prompt)
            self._prefill.place(self.running)

    def close(self) -> None:
        """Give back the slots and pages of requests that are not finished."""
        self.waiting.clear()
        while self.running:
            self._workshop.table.close(self.running.pop().slot)

    @property
    def decreed(self) -> float | None:
        """The mean accept length of synthetic acceptance, of the last round's shape; None without it."""
        rates = self._latest.rates if self._latest else None
        return None if rates is None else Synthetic(rates).accept_length

    def key(self, shape: DraftShape, requests: Sequence[Request]) -> RoundKey:
        """The round that serves these requests with this shape."""
        size = next(size for size in self._batch_sizes if size >= len(requests))
        rates = None
        if self._synthetic is not None and shape.steps:
            rates = Synthetic.of(self._synthetic, shape.steps).rates
        return RoundKey(size, shape, _rule(requests), self._graphs, rates)

    def _round(self) -> None:
        shape = self._choose()
        if shape.steps:
            self._prefill.catch_up(self.running)
        self._latest = self.key(shape, self.running)
        ready = self._workshop.round_for(self._latest)
        found = ready.run(self.running)
        if isinstance(self._shape, Planner):
            self._shape.observe(shape, [len(tokens) for tokens in found])
        for request, tokens in zip(self.running, found, strict=True):
            request.counts.add_round(shape.steps, shape.nodes - 1, len(tokens))
            request.advance(len(tokens), drafted=shape.steps > 0)
            request.take(tokens)
        self._let_go()

    def _choose(self) -> DraftShape:
        if isinstance(self._shape, DraftShape):
            return self._shape
        planner = self._shape
        keys = {shape: self.key(shape, self.running) for shape in planner.shapes}
        size = next(iter(keys.values())).size
        if not planner.knows(size):
            planner.measure(size, {s: self._workshop.round_for(key).seconds() for s, key in keys.items()})
        return planner.choose(size).shape

    def _admit(self) -> None:
        """Begin requests, with all the pages that they will ever need, until one does not fit."""
        table, started = self._workshop.table, list[Request]()
        while self.waiting and len(self.running) + len(started) < table.max_requests:
            request = self.waiting[0]
            tokens = len(request.prompt) + request.max_new_tokens + self._room
            if (self.running or started) and -(-tokens // table.page_size) > table.free_pages:
                break
            slot = table.open()
            try:
                table.reserve({slot: tokens})
            except Exception:
                table.close(slot)
                raise
            request.slot = slot
            started.append(self.waiting.popleft())
        self.running += started
        if started:
            for request, token in zip(started, self._prefill.run(started), strict=True):
                request.take([token])
            self._let_go()

    def _let_go(self) -> None:
        for request in [request for request in self.running if request.finished]:
            self._workshop.table.close(request.slot)
            self.running.remove(request)


def _rule(requests: Sequence[Request]) -> str:
    """The cheapest rule that serves these requests; a greedy one among sampled ones stays greedy."""
    if any(request.sampling.filtered for request in requests):
        return FILTERED
    return GREEDY if all(request.sampling.greedy for request in requests) else SAMPLED
