"""Engine: continuous batching, with and without speculation; a reference to be read, not a server.

A round needs only one thing from the host: which requests take part. Lengths, accepted tokens and hidden
states stay on the device, in rows of the request table (round_buffers.py). So with `overlap` a step launches
its round and prompts first, and reads the results of the step before while the device is busy:

    step r      launch round r     |  read the results of step r - 1, hand out their tokens
    device      ... round r - 1    |  round r ...

The host is one step late. It reserves pages for upper bounds (scheduler.py). A request that ended in round
r - 1 takes part in round r for nothing, and that result is dropped. The tokens do not depend on it.

Source: overlap scheduling of speculative rounds, sglang#9588.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ..errors import SpeculatorError
from ..options import DraftShape, Sampling
from ..request import Request, token_ids
from ..rounds.phase_runner import named
from ..rounds.prefill import Piece
from ..rounds.round_launch import Launch
from .round_store import RoundPolicy, RoundStore
from .scheduler import Scheduler


class Engine:
    """Serves requests that come and go. Made by `Speculator.engine`.

    Call `step` while anything is `unfinished`. `add_request` and `abort` may be called between steps or from
    an `on_tokens` callback.

    Args:
        context: surrounds what runs on the device.
        claim: raises if another engine has requests, since both would use the same slots.
    """

    def __init__(
        self,
        rounds: RoundStore,
        policy: RoundPolicy,
        *,
        context: Callable[[], AbstractContextManager[None]],
        claim: Callable[[Engine], None],
    ) -> None:
        self._rounds, self._policy = rounds, policy
        self._resources, self._prefill = rounds.resources, rounds.prefill
        self._context, self._claim = context, claim
        self._scheduler = Scheduler(self._resources.table, self._resources.limits.lookahead)
        self._in_flight: deque[Launch] = deque()
        self._unreported: dict[Request, None] = {}  # requests with tokens for `on_tokens`, in order
        self._finished: list[Request] = []  # reported, and not returned by `step` yet
        self._unfinished: dict[Request, None] = {}
        self._num_requests = 0
        self._interrupted = False  # an exception ended a step: the device may be ahead of the host

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
        """How often a request gave its pages back, to be prefilled again later."""
        return self._scheduler.preemptions

    @property
    def synthetic_accept_length(self) -> float | None:
        """Mean accept length of synthetic acceptance; None = the target decides."""
        return self._policy.synthetic_accept_length

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
            stop: token ids that end it; the stop token that ended it is kept as its last token.
            on_tokens: called from `step` as `on_tokens(request, new_tokens)`; `step` raises what it raises.

        Returns:
            the request; its `tokens` grow until it is `finished`.

        Raises:
            SpeculatorError: it can never be served, or another engine of the speculator has requests.
            CacheError: it needs more pages than there are.
            AddressMovedError: a weight moved since the graphs that read it were captured.
            SpeculatorError: so did what a module holds beside weights, see `rounds/module_state.py`.
        """
        request = self.make_request(prompt, max_new_tokens, sampling, stop, on_tokens)
        self._resources.weights.check()
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
        """Check a request without queueing it."""
        index, limits = self._num_requests, self._resources.limits
        request = Request(
            index, token_ids(index, "prompt", prompt), Sampling() if sampling is None else sampling,
            max_new_tokens, frozenset(token_ids(index, "stop", stop)), on_tokens,
        )  # fmt: skip
        request.check(self._resources.target.vocab_size, limits.max_seq_len)
        self._resources.table.check_fits(request.limit + limits.lookahead)
        self._num_requests += 1
        return request

    def add(self, request: Request) -> None:
        """Queue a request of `make_request`."""
        self._claim(self)
        self._unfinished[request] = None
        self._scheduler.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now. It keeps its tokens; results in flight are dropped for it.

        A finished request stays as it is.

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
        self._in_flight.clear()
        for request in list(self._unfinished):
            self.abort(request)

    def step(self) -> list[Request]:
        """Launch a round of all running requests, a chunk of prompts, or both; then read results.

        Returns:
            the requests that were found to be finished.

        Raises:
            SpeculatorError: an exception ended the step before, and another engine has requests now.
            AddressMovedError: a module whose weights graphs read was replaced. Other weights are compared
                when a request is added.
            Exception: whatever `on_tokens` raises. Nothing is lost: the next step goes on from there, reports
                to the other callbacks first, and returns the requests that were finished. If nothing is
                unfinished, call it once more for those. `abort` ends a request whose callback always raises.
        """
        with self._context(), named("round"):
            self._resources.weights.check_copied()
            self._recover()
            self._interrupted = True
            launched = self._launch()
            self._settle(keep=launched if self._policy.overlap else 0)
            self._interrupted = False
        return self._report()

    def rewind(self) -> None:
        """Put the running requests back to where their prompts ended, to time the same rounds again.

        Statistics go on, and so do requests that are not running yet. The first draft afterwards starts from
        the hidden states of the last round, so fewer of its tokens may be accepted.
        """
        with self._context():
            self._recover()
            self._settle(keep=0)
            for request in self._scheduler.running:
                request.rewind()
            self._prefill.send_state(self._scheduler.running)

    def _launch(self) -> int:
        """Send the next step to the device; how many launches that took, 0 if there is nothing to do."""
        scheduler = self._scheduler
        # Where other ranks take the same steps, when a result arrives on one of them is no reason.
        if self._in_flight and not self._resources.ranks.several and self._in_flight[-1].has_arrived:
            self._settle(keep=0)  # the host is the slower one: no need to be late
        if missing := scheduler.missing():
            if missing > self._resources.table.free_pages:
                self._settle(keep=0)  # some requests may be finished
            scheduler.reserve()
        self._prefill.send_state(scheduler.admit())
        shape = self._choose(scheduler.batch())
        batch = scheduler.batch()  # choosing may have read results
        made = self._rounds.round_for(batch, shape, self._policy) if batch else None
        pieces = scheduler.pieces(self._resources.limits.prefill_rows)
        timed = self._rounds.begin_step(made, pieces)
        alone, shared = ([], pieces) if timed.shared else (pieces, [])
        if made:
            self._launched(made.launch(batch, shared), shared)
        if alone:  # behind the round, which the device runs while the host lays them out
            chunk = self._prefill.lay_out(alone)
            with named("prompts"):
                launch = self._prefill.launch(chunk)
            self._launched(launch, alone)
        self._rounds.pace.end(timed)
        return bool(made) + bool(alone)

    def _launched(self, launch: Launch, pieces: Sequence[Piece]) -> None:
        launch.begin()
        self._in_flight.append(launch)  # after an exception, what is in this queue is read
        self._scheduler.prefilled(pieces)

    def _settle(self, *, keep: int) -> None:
        """Read results until `keep` launches are in flight."""
        while len(self._in_flight) > keep:
            launch = self._in_flight[0]
            launch.read(self._policy.observe, self._resources.ranks.check)
            for request in launch.requests:
                if request.has_news:
                    self._unreported[request] = None
                if request.finished:
                    self._release(request)
            self._in_flight.popleft()  # last: after an exception above it is read once more

    def _release(self, request: Request) -> None:
        self._scheduler.release(request)
        self._unfinished.pop(request, None)

    def _choose(self, batch: Sequence[Request]) -> DraftShape:
        """The shape of the next round. A draft that was behind has caught up when this returns."""
        if not batch:
            return self._policy.shapes[0]
        if self._rounds.wants_times(batch, self._policy):
            self._settle(keep=0)
            self._rounds.time(batch, self._policy)
        shape = self._rounds.choose(batch, self._policy)
        late = [request for request in batch if request.progress.draft_is_behind] if shape.steps else []
        if late:
            self._settle(keep=0)  # the tokens that the draft missed have to be known
            self._prefill.catch_up([request for request in late if not request.finished])
        return shape

    def _report(self) -> list[Request]:
        """Hand out new tokens; the requests that are finished with them."""
        while self._unreported:
            request = next(iter(self._unreported))
            del self._unreported[request]
            if request.finished and not request.aborted:
                self._finished.append(request)
            request.report()
        finished, self._finished = self._finished, []
        return finished

    def _recover(self) -> None:
        """After an exception, read what was launched whole, and prefill all requests again from there."""
        if not self._interrupted:
            return
        self._claim(self)  # the table is about to be cleared
        self._settle(keep=0)
        self._unfinished = {request: None for request in self._unfinished if not request.finished}
        self._scheduler.restart(list(self._unfinished))
