"""Scheduler: which requests run, first come first served, against free slots and pages. On the host alone.

Note [Upper bounds]
While results are under way the host does not know how long a request is, only how long it can be: its known
length and all that the rounds under way may accept. Pages are reserved for that, never beyond what the
request may have in the end, plus the `room` of one round. A request that turns out to be finished has then
run a round too many, in pages that are still its own; rows past its last page go to the sink.

Note [Giving way]
Who runs gets pages before who waits. Where they run out, the request that came last gives its pages back and
waits at the head of the queue, to be computed again from its prompt and the tokens that it has; its tokens
are not chosen anew. No request is let in that would fill all pages alone, so the first one always goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from piecewise_graph.custom_ops.kv_cache import RequestTable

from ..request import Request
from ..rounds.prefill import Piece

_GROWTH = 64  # tokens: pages are taken in such steps where there are enough, so that few steps take any


@dataclass
class Scheduler:
    """Attributes:
    room: tokens beyond its length that a request needs pages for during a round.
    waiting: without slot and pages, in the order in which they came.
    prefilling: with prompts that have not gone to the device whole.
    running: in rounds.
    preemptions: how often a request gave its pages back.
    """

    table: RequestTable
    room: int
    waiting: deque[Request] = field(default_factory=deque)
    prefilling: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0

    def batch(self) -> list[Request]:
        """Who takes part in the next round: not those whose last token is under way."""
        return [request for request in self.running if not request.is_done_soon]

    def is_short(self) -> bool:
        """Whether the next round needs more pages than are free."""
        return sum(self._missing(request, 0) for request in self.batch()) > self.table.free_pages

    def make_room(self) -> None:
        """Reserve the pages of the next round, the youngest requests giving way where there are too few.

        No result may be under way where `is_short`.
        """
        batch = self.batch()
        if not any(self._missing(request, 0) for request in batch):
            return
        plenty = sum(self._missing(request, _GROWTH) for request in batch) <= self.table.free_pages
        for request in batch:
            if request in self.running and self._makes_room_for(request):
                tokens = self._tokens(request, _GROWTH if plenty else 0)
                self.table.reserve({request.slot: tokens})

    def admit(self) -> list[Request]:
        """Give waiting requests slots, and pages for their prompts, until one does not fit."""
        admitted: list[Request] = []
        while self.waiting and len(self.table.open_slots) < self.table.max_requests:
            request = self.waiting[0]
            needed = self._pages(request.length + self.room)
            growing = sum(self._missing(r, _GROWTH) for r in self.running + self.prefilling)
            if needed + growing > self.table.free_pages:
                break
            slot = self.table.open()
            self.table.reserve({slot: request.length + self.room})
            request.slot, request.computed = slot, 0
            self.prefilling.append(self.waiting.popleft())
            admitted.append(request)
        return admitted

    def pieces(self, most: int) -> list[Piece]:
        """The next `most` tokens of prompts."""
        found: list[Piece] = []
        for request in self.prefilling:
            stop = min(request.computed + most, request.length)
            if stop > request.computed:
                found.append(Piece(request, request.computed, stop))
                most -= stop - request.computed
            if not most:
                break
        return found

    def prefilled(self, pieces: Sequence[Piece]) -> None:
        """These have been launched; requests whose last they were take part in rounds from now on."""
        for piece in pieces:
            piece.request.computed = piece.stop
            if piece.is_last:
                piece.request.drafted, piece.request.behind = piece.stop, False
                self.prefilling.remove(piece.request)
                self.running.append(piece.request)

    def release(self, request: Request) -> None:
        """Give back what a request holds, and forget it."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        for held in (self.prefilling, self.running):
            if request in held:
                held.remove(request)
                self.table.close(request.slot)

    def restart(self, requests: Sequence[Request]) -> None:
        """All of these wait, nothing is held, whatever was: an exception may have come anywhere."""
        self.table.clear()
        self.prefilling, self.running = [], []
        self.waiting = deque(sorted(requests, key=lambda request: request.index))
        for request in requests:
            request.ahead = request.results_ahead = 0

    def _makes_room_for(self, request: Request) -> bool:
        """Whether a request may go on; the youngest give way until it can, itself at last."""
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

    def _missing(self, request: Request, ahead: int) -> int:
        """Pages that a request lacks for its next round and `ahead` tokens more."""
        owned = self.table.capacity(request.slot) // self.table.page_size
        return max(self._pages(self._tokens(request, ahead)) - owned, 0)

    def _tokens(self, request: Request, ahead: int) -> int:
        """See Note [Upper bounds]."""
        return min(request.length + request.ahead + ahead, request.limit) + self.room

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.table.page_size)
