"""Scheduler: which requests run, first come first served, against free slots and pages. Host only.

Note [Upper bounds]
While results are in flight, the host knows only how long a request may be: its known length plus all tokens
that the rounds in flight may accept. Pages are reserved for that length, capped at the request's limit, plus
the lookahead slots of one round. A request that turns out to be finished has run one round too many, in
pages that are still its own; rows past its last page go to the null page.

Note [Preemption]
Running requests get pages before waiting ones. If pages run out, the youngest request is preempted: it gives
its pages back and waits at the head of the queue. Later it is prefilled again from its prompt and the tokens
that it has, which are not chosen anew. No request is admitted that needs more than all pages, so the oldest
one always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from piecewise_graph.custom_ops.kv_cache import RequestTable

from ..request import Request
from ..rounds.prefill import Piece

_GROWTH = (
    64  # tokens: while pages are plenty, they are reserved in such steps, so that few rounds reserve any
)


@dataclass
class Scheduler:
    """Queues of requests, and their slots and pages.

    Attributes:
        lookahead: tokens beyond its length that a request needs pages for during a round.
        waiting: requests without slot and pages, oldest first.
        prefilling: requests whose prompts were not sent to the device whole.
        running: requests that take part in rounds.
        preemptions: how often a request was preempted.
    """

    table: RequestTable
    lookahead: int
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0

    def batch(self) -> list[Request]:
        """Requests of the next round: all running ones but those whose last token is in flight."""
        return [request for request in self.running if not request.ends_in_flight]

    def missing(self) -> int:
        """Pages that the next round lacks."""
        return sum(self._missing(request, 0) for request in self.batch())

    def reserve(self) -> None:
        """Reserve the pages of the next round; preempt the youngest requests if there are too few.

        No result may be in flight if more are `missing` than are free.
        """
        batch = self.batch()
        plenty = sum(self._missing(request, _GROWTH) for request in batch) <= self.table.free_pages
        for request in batch:
            if request in self.running and self._fits(request):
                tokens = self._tokens(request, _GROWTH if plenty else 0)
                self.table.reserve({request.slot: tokens})

    def admit(self) -> list[Request]:
        """Give waiting requests slots, and pages for their prompts, up to the first that does not fit."""
        admitted: list[Request] = []
        while self.waiting and len(self.table.open_slots) < self.table.max_requests:
            request = self.waiting[0]
            needed = self._pages(request.length + self.lookahead)
            growing = sum(self._missing(r, _GROWTH) for r in self.running + self.prefilling)
            if needed + growing > self.table.free_pages:
                break
            slot = self.table.open()
            self.table.reserve({slot: request.length + self.lookahead})
            request.slot = slot
            request.progress.admitted()
            self.prefilling.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def pieces(self, max_rows: int) -> list[Piece]:
        """The next `max_rows` tokens of prompts."""
        found: list[Piece] = []
        for request in self.prefilling:
            start = request.progress.num_computed
            stop = min(start + max_rows, request.length)
            if stop > start:
                found.append(Piece(request, start, stop))
                max_rows -= stop - start
            if not max_rows:
                break
        return found

    def prefilled(self, pieces: Sequence[Piece]) -> None:
        """These were launched; a request whose last piece is among them runs from now on."""
        for piece in pieces:
            piece.request.progress.prefilled(piece.stop)
            if piece.is_last:
                self.prefilling.remove(piece.request)
                self.running.append(piece.request)

    def release(self, request: Request) -> None:
        """Take back slot and pages of a request, and forget it."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        for held in (self.prefilling, self.running):
            if request in held:
                held.remove(request)
                self.table.close(request.slot)

    def restart(self, requests: Sequence[Request]) -> None:
        """Let all of these wait again, without slots and pages, whatever an exception has left behind."""
        self.table.clear()
        self.prefilling, self.running = [], []
        self.waiting = deque(sorted(requests, key=lambda request: request.index))
        for request in requests:
            request.progress.restarted()

    def _fits(self, request: Request) -> bool:
        """Make pages free for a request; False if it was preempted itself. See Note [Preemption]."""
        while self._missing(request, 0) > self.table.free_pages:
            youngest = max(self.running + self.prefilling, key=lambda each: each.index)
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _missing(self, request: Request, extra: int) -> int:
        """Pages that a request lacks for its next round and `extra` tokens."""
        owned = self.table.capacity(request.slot) // self.table.page_size
        return max(self._pages(self._tokens(request, extra)) - owned, 0)

    def _tokens(self, request: Request, extra: int) -> int:
        """Tokens to reserve pages for. See Note [Upper bounds]."""
        bound = request.length + request.progress.tokens_in_flight + extra
        return min(bound, request.limit) + self.lookahead

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.table.page_size)
