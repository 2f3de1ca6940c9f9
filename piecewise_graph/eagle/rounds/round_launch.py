"""Launch: what was sent to the device and not read yet, and what reading it does to the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..options import DraftShape
from ..request import Request

Observer = Callable[[DraftShape, list[int]], None]


class Launch:
    """A round, a chunk of prompts, or both, whose results are on their way into pinned memory.

    The tensors may be overwritten by whatever is launched next: their copies are made here.

    Args:
        accepted: int32 `[B, S + 2]`: the tokens that each request of the round accepted, padded, then how
            many; None without a round.
        first: int32 `[n]`: the token after each prompt that ended; None without prompts.
        shape: of the round; None without one.
        running: requests of the round.
        started: requests whose prompts ended; None in place of one whose next token was known before.
    """

    def __init__(
        self,
        accepted: Tensor | None,
        first: Tensor | None,
        shape: DraftShape | None = None,
        running: Sequence[Request] = (),
        started: Sequence[Request | None] = (),
    ) -> None:
        self.shape, self.running, self.started = shape, tuple(running), tuple(started)
        self._accepted, self._first = _to_host(accepted), _to_host(first)
        self._arrived: torch.cuda.Event | None = None  # on a CPU the copies are there at once
        if any(tensor is not None and tensor.is_cuda for tensor in (accepted, first)):
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._had: dict[Request, int] = {}  # tokens before this result: reading it twice does no harm

    @property
    def requests(self) -> list[Request]:
        """Requests that it brings tokens."""
        return [request for request in (*self.running, *self.started) if request is not None]

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would return at once. Always False on a CPU, which simulates a busy device."""
        return self._arrived is not None and self._arrived.query()

    def wait(self) -> None:
        """Wait for the copies; whatever was launched after them goes on."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def accepted(self) -> list[list[int]]:
        """Tokens of each request of the round, the bonus last, padded requests included. After `wait`."""
        rows = [] if self._accepted is None else self._accepted.tolist()
        return [row[: row[-1]] for row in rows]

    def first_tokens(self) -> list[int]:
        """First tokens of the prompts that ended. After `wait`."""
        found: list[int] = [] if self._first is None else self._first.tolist()
        return found

    def begin(self) -> None:
        """Tell the requests that a result is in flight."""
        if self.shape is not None:
            max_new, plain = self.shape.steps + 1, not self.shape.steps
            for request in self.running:
                request.progress.launched(max_new, plain=plain)
        for started in self.started:
            if started is not None:
                started.progress.launched(0)

    def read(self, observe: Observer | None, check: Callable[[], None]) -> None:
        """Wait for the result, and give requests their tokens.

        Args:
            observe: called with the shape and the accept length of every request of the round.
            check: raises if the result is wrong, before a request is given a token.
        """
        self.wait()
        check()
        first_tokens = self.first_tokens()
        # A request that ended in the round before, or was aborted since, ran for nothing; padding comes last.
        rounds = [(r, tokens, r.finished) for r, tokens in zip(self.running, self.accepted(), strict=False)]
        live = [len(tokens) for _, tokens, finished in rounds if not finished]
        if observe is not None and live and self.shape is not None:
            observe(self.shape, live)
        for request, tokens, finished in rounds:
            self._read_round(request, tokens, finished)
        for started, token in zip(self.started, first_tokens, strict=True):
            if started is not None:
                before = self._settle(started, 0)
                if not started.aborted:
                    started.take([token], after=before)

    def _read_round(self, request: Request, tokens: Sequence[int], finished: bool) -> None:
        shape = self.shape
        assert shape is not None
        before = self._had.get(request)
        if before is None:
            before = self._settle(request, shape.steps + 1)
            if not finished:
                request.counts.add_round(shape.steps, shape.nodes - 1, len(tokens))
        if finished:
            return
        request.take(tokens, after=before)
        if shape.steps:
            request.progress.drafted(request.length)

    def _settle(self, request: Request, max_new: int) -> int:
        """How many tokens the request had before this result. Settles it at the first reading only."""
        if request not in self._had:
            self._had[request] = len(request.tokens)
            request.progress.settled(max_new)
        return self._had[request]


def _to_host(tensor: Tensor | None) -> Tensor | None:
    """A copy; torch copies to pinned memory where the host need not wait."""
    if tensor is None:
        return None
    return tensor.to("cpu", non_blocking=True) if tensor.is_cuda else tensor.clone()
