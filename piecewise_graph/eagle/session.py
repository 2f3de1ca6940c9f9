"""Session: requests through rounds until they are finished; those that find no room wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from .phases import FILTERED, GREEDY, SAMPLED
from .planner import Planner
from .prefill import Prefill
from .request import Request
from .shapes import DraftShape
from .synthetic import Synthetic
from .workshop import RoundKey, Workshop


class Session:
    """One set of requests. `step` until `unfinished` is empty, or `close` before.

    Args:
        shape: of every round; or a planner that chooses before each.
        graphs: (phase, way) of each.
        room: tokens beyond its length that a request needs pages for during a round.
        batch_sizes: that rounds are made for, ascending.
        synthetic: a mean accept length or rates; None = the target decides.
        context: surrounds what runs on the device.

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
        self._torn = False  # an exception ended a round: the device may be ahead of the host

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
            if self._torn:
                self._prefill.place(self.running)
                self._torn = False
            self._admit()
            if self.running:
                self._round()

    @property
    def decreed(self) -> float | None:
        """The mean accept length that was decreed, for the longest draft that may run; None without it."""
        if self._synthetic is None:
            return None
        shapes = self._shape.shapes if isinstance(self._shape, Planner) else (self._shape,)
        steps = max(shape.steps for shape in shapes)
        return Synthetic.of(self._synthetic, steps, clamped=True).accept_length if steps else None

    def rewind(self) -> None:
        """Put the running requests back to where their prompts ended, for timings that want rounds alike.

        The first draft afterwards begins with the hidden states of the last round, and may be a poor one.
        """
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

    def _key(self, shape: DraftShape) -> RoundKey:
        """The round that serves the running requests with this shape."""
        rates = None
        if self._synthetic is not None and shape.steps:
            rates = Synthetic.of(self._synthetic, shape.steps, clamped=True).rates
        return RoundKey(self._size(), shape, _rule(self.running), self._graphs, rates)

    def _size(self) -> int:
        return next(size for size in self._batch_sizes if size >= len(self.running))

    def _round(self) -> None:
        shape = self._choose()
        if shape.steps:
            self._prefill.catch_up(self.running)
        ready = self._workshop.round_for(self._key(shape))
        self._torn = True
        found = ready.run(self.running)
        if isinstance(self._shape, Planner):
            self._shape.observe(shape, [len(tokens) for tokens in found])
        for request, tokens in zip(self.running, found, strict=True):
            request.counts.add_round(shape.steps, shape.nodes - 1, len(tokens))
            request.advance(len(tokens), drafted=shape.steps > 0)
            request.take(tokens)
        self._torn = False
        self._let_go()

    def _choose(self) -> DraftShape:
        if isinstance(self._shape, DraftShape):
            return self._shape
        planner, place = self._shape, (self._size(), _rule(self.running), self._graphs)
        if not planner.knows(place):
            keys = {shape: self._key(shape) for shape in planner.shapes}
            planner.measure(place, {s: self._workshop.round_for(key).seconds() for s, key in keys.items()})
        return planner.choose(place).shape

    def _admit(self) -> None:
        """Begin requests, with all the pages that they will ever need, until one does not fit."""
        started: list[Request] = []
        try:
            while self.waiting and len(self.running) + len(started) < self._workshop.table.max_requests:
                if not self._fits(self.waiting[0], alone=not (self.running or started)):
                    break
                started.append(self._begin(self.waiting.popleft()))
            first = self._prefill.run(started) if started else []
        except BaseException:  # an interrupt too: whoever goes on begins them anew
            for request in reversed(started):
                self._workshop.table.close(request.slot)
                self.waiting.appendleft(request)
            raise
        self.running += started
        for request, token in zip(started, first, strict=True):
            request.take([token])
        self._let_go()

    def _tokens(self, request: Request) -> int:
        """All that it will ever need room for."""
        return len(request.prompt) + request.max_new_tokens + self._room

    def _fits(self, request: Request, *, alone: bool) -> bool:
        """One that is alone has nobody to wait for: reserving says what is wrong."""
        table = self._workshop.table
        return alone or -(-self._tokens(request) // table.page_size) <= table.free_pages

    def _begin(self, request: Request) -> Request:
        table = self._workshop.table
        slot = table.open()
        try:
            table.reserve({slot: self._tokens(request)})
        except Exception:
            table.close(slot)
            self.waiting.appendleft(request)
            raise
        request.slot = slot
        return request

    def _let_go(self) -> None:
        for request in [request for request in self.running if request.finished]:
            self._workshop.table.close(request.slot)
            self.running.remove(request)


def _rule(requests: Sequence[Request]) -> str:
    """The cheapest rule that serves these requests; a greedy one among sampled ones stays greedy."""
    if any(request.sampling.filtered for request in requests):
        return FILTERED
    return GREEDY if all(request.sampling.greedy for request in requests) else SAMPLED
