"""Engine: continuous batching, with and without speculation; a reference to be read, not a server.

Note [One result late]
A round needs nothing from the host but who takes part: lengths, accepted tokens and hidden states stay on the
device, in rows of the request table (round_buffers.py). So with `overlap` a step launches its round first and
only then reads what the round before has found, while the device is busy:

    step r      launch round r     |  read the result of round r - 1, hand out its tokens
    device      ... round r - 1    |  round r ...

The host is one round late: it reserves pages for upper bounds (scheduler.py), and a request that ended in
round r - 1 takes part in round r for nothing; that result is dropped. Nobody's tokens depend on it.

Source: overlap scheduling of speculative rounds, sglang#9588.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ..errors import SpeculatorError
from ..options import DraftShape, Sampling
from ..request import Request, check_request, token_ids
from ..rounds.phase_runner import named
from ..rounds.prefill import Piece, Prefill
from .in_flight import Launch, fresh
from .round_choice import RoundChoice
from .scheduler import Scheduler
from .workshop import Workshop


class Engine:
    """Serves requests that come and go. Made by `Speculator.engine`.

    Call `step` while there is anything `unfinished`; `add_request` and `abort` at any time between steps, or
    from an `on_tokens` callback.

    Args:
        choice: of the rounds.
        room: tokens beyond its length that a request needs pages for during a round.
        max_seq_len: of prompt and new tokens together.
        overlap: read results one step late.
        context: surrounds what runs on the device.
        claim: raises where another engine has requests: both would take slots for their own.
    """

    def __init__(
        self,
        workshop: Workshop,
        prefill: Prefill,
        choice: RoundChoice,
        *,
        room: int,
        max_seq_len: int,
        overlap: bool,
        context: Callable[[], AbstractContextManager[None]],
        claim: Callable[[Engine], None],
    ) -> None:
        self._workshop, self._prefill, self._choice = workshop, prefill, choice
        self._room, self._max_seq_len = room, max_seq_len
        self._overlap, self._context, self._claim = overlap, context, claim
        self._scheduler = Scheduler(workshop.table, room)
        self._under_way: deque[Launch] = deque()
        self._news: dict[Request, None] = {}  # who has tokens that `on_tokens` has not seen, in order
        self._finished: list[Request] = []  # of these, who was told and not returned by `step` yet
        self._unfinished: dict[Request, None] = {}
        self._came = 0
        self._torn = False  # an exception ended a step: the device may be ahead of the host

    @property
    def unfinished(self) -> int:
        """Requests that want more tokens."""
        return len(self._unfinished)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests without slot and pages, the next one first."""
        return tuple(self._scheduler.waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests with slot and pages."""
        return (*self._scheduler.running, *self._scheduler.prefilling)

    @property
    def preemptions(self) -> int:
        """How often a request had to give its pages back, and was computed again later."""
        return self._scheduler.preemptions

    @property
    def decreed(self) -> float | None:
        """The mean accept length that was decreed; None where the target decides."""
        return self._choice.decreed

    def add_request(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        on_tokens: Callable[[Request, list[int]], None] | None = None,
    ) -> Request:
        """Queue a request; the next steps serve it.

        Args:
            prompt: token ids, at least one.
            sampling: None = greedy.
            stop: token ids that end it; the one that did is kept as its last token.
            on_tokens: called from `step` as `on_tokens(request, new_tokens)`; what it raises, `step` raises.

        Returns:
            the request; its `tokens` grow, until it is `finished`.

        Raises:
            SpeculatorError: it can never be served, or another engine of the speculator has requests.
            CacheError: it alone would need more pages than there are.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        request = self.make_request(prompt, max_new_tokens, sampling, stop, on_tokens)
        self._workshop.weights.check()
        self.add(request)
        return request

    def make_request(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: Sampling | None,
        stop: Sequence[int],
        on_tokens: Callable[[Request, list[int]], None] | None = None,
    ) -> Request:
        """A request that was checked and not queued."""
        request = Request(
            self._came, token_ids(self._came, "prompt", prompt), Sampling() if sampling is None else sampling,
            max_new_tokens, frozenset(token_ids(self._came, "stop", stop)), on_tokens,
        )  # fmt: skip
        check_request(request, self._workshop.sizes.vocab, self._max_seq_len)
        self._workshop.table.check_fits(request.limit + self._room)
        self._came += 1
        return request

    def add(self, request: Request) -> None:
        """Queue what `make_request` made."""
        self._claim(self)
        self._unfinished[request] = None
        self._scheduler.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now. It keeps the tokens that it has; what is under way for it is dropped.

        Nothing happens to one that is finished.

        Raises:
            SpeculatorError: it is a request of another engine.
        """
        if request.finished:
            return
        if request not in self._unfinished:
            raise SpeculatorError.foreign_request(request.index)
        request.aborted = True
        self._release(request)

    def close(self) -> None:
        """Abort all requests."""
        self._under_way.clear()
        for request in list(self._unfinished):
            self.abort(request)

    def step(self) -> list[Request]:
        """Launch what is due, a chunk of prompts, a round of all that run, or both; then read results.

        Returns:
            the requests that turned out to be finished.

        Raises:
            SpeculatorError: a phase could not be captured; or an exception ended the step before, and another
                engine has requests now.
            Exception: whatever `on_tokens` raises. Nothing is lost: the next step goes on from there, and
                tells the others first, and returns those that were finished; call it once more where nothing
                is unfinished. A callback that always raises is ended by `abort`.
        """
        with self._context(), named("round"):
            if self._torn:
                self._recover()
            self._torn = True
            launched = self._launch()
            self._settle(keep=int(self._overlap and launched))
            self._torn = False
        return self._report()

    def rewind(self) -> None:
        """Put the running requests back to where their prompts ended, for timings that want rounds alike.

        Statistics go on, and so do requests that are not running yet. The first draft afterwards begins with
        the hidden states of the last round, and may be a poor one.
        """
        with self._context():
            self._settle(keep=0)
            for request in self._scheduler.running:
                del request.tokens[1:]
                request.drafted, request.reported = request.length, min(request.reported, 1)
            self._prefill.place(self._scheduler.running)

    # What a step is made of.

    def _launch(self) -> bool:
        """Send the next step to the device; False where there is nothing to do."""
        scheduler = self._scheduler
        while self._under_way and self._under_way[0].result.has_arrived:
            self._settle(keep=len(self._under_way) - 1)  # the host is the slower one: no need to be late
        if scheduler.is_short():
            self._settle(keep=0)  # some may be finished
        scheduler.make_room()
        self._prefill.place(scheduler.admit())
        shape = self._choose(scheduler.batch())
        batch = scheduler.batch()  # choosing may have read results
        rows = self._choice.size(batch) * shape.nodes if batch else 0
        mixed = bool(batch) and self._may_mix(shape, rows)
        pieces = scheduler.pieces(self._prefill.most - rows if mixed else self._prefill.most)
        if pieces and not mixed:
            self._launch_prompts(pieces)
        if batch:
            self._launch_round(batch, shape, pieces if mixed else [])
        return bool(pieces or batch)

    def _may_mix(self, shape: DraftShape, rows: int) -> bool:
        """Whether prompts may share the forwards of a round, and would find room there."""
        return not shape.is_tree and 2 * rows <= self._prefill.most

    def _launch_prompts(self, pieces: Sequence[Piece]) -> None:
        chunk = self._prefill.lay_out(pieces)
        with named("prompts"):
            result = self._prefill.launch(chunk)
        self._launched(Launch(result, started=fresh(chunk)), pieces)

    def _launch_round(self, batch: Sequence[Request], shape: DraftShape, pieces: Sequence[Piece]) -> None:
        ready = self._workshop.round_for(self._choice.key(batch, shape))
        if pieces:
            chunk = self._prefill.lay_out(pieces)
            result = ready.launch_with(batch, self._prefill, chunk)
            self._launched(Launch(result, shape, tuple(batch), fresh(chunk)), pieces)
        else:
            self._launched(Launch(ready.launch(batch), shape, tuple(batch)), [])

    def _launched(self, launch: Launch, pieces: Sequence[Piece]) -> None:
        self._under_way.append(launch)
        launch.begin()
        self._scheduler.prefilled(pieces)

    def _settle(self, *, keep: int) -> None:
        """Read results until `keep` launches are under way."""
        while len(self._under_way) > keep:
            launch = self._under_way[0]
            launch.read(self._choice.observe)
            for request in launch.requests:
                if len(request.tokens) > request.reported:
                    self._news[request] = None
                if request.finished:
                    self._release(request)
            self._under_way.popleft()  # last: after an exception above it is read once more

    def _release(self, request: Request) -> None:
        self._scheduler.release(request)
        self._unfinished.pop(request, None)

    def _choose(self, batch: Sequence[Request]) -> DraftShape:
        """The shape of the next round; a draft that has fallen behind has caught up when this returns."""
        if not batch:
            return self._choice.shapes[0]
        if self._choice.wants_times(batch):
            self._settle(keep=0)
            self._choice.time(batch, self._workshop)
        shape = self._choice.choose(batch)
        late = [request for request in batch if request.behind] if shape.steps else []
        if late:
            self._settle(keep=0)  # what it missed has to be known
            self._prefill.catch_up([request for request in late if not request.finished])
            for request in late:
                request.behind = False
        return shape

    def _report(self) -> list[Request]:
        """Hand out new tokens; the requests that are finished with them."""
        while self._news:
            request = next(iter(self._news))
            del self._news[request]
            if request.finished and not request.aborted:
                self._finished.append(request)
            request.report()
        finished, self._finished = self._finished, []
        return finished

    def _recover(self) -> None:
        """Go on after an exception: read what was launched whole, and compute all requests from that."""
        self._claim(self)  # the table is about to be cleared: nobody else's
        self._settle(keep=0)
        self._unfinished = {request: None for request in self._unfinished if not request.finished}
        self._scheduler.restart(list(self._unfinished))
