"""Launch: what was sent to the device and not read yet, and what reading it does to the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..options import DraftShape
from ..request import Request
from ..rounds.prefill import Chunk
from ..rounds.results import Result

Observer = Callable[[DraftShape, list[int]], None]


@dataclass(frozen=True)
class Launch:
    """A round, a chunk of prompts, or both.

    Attributes:
        shape: of the round; None without one.
        running: who takes part in it.
        started: whose prompts ended with it; None for those whose next token was known before.
        had: how many tokens requests had before this result, so that reading it twice does no harm.
    """

    result: Result
    shape: DraftShape | None = None
    running: tuple[Request, ...] = ()
    started: tuple[Request | None, ...] = ()
    had: dict[Request, int] = field(default_factory=dict)

    @property
    def requests(self) -> list[Request]:
        """Whom it brings tokens."""
        return [request for request in (*self.running, *self.started) if request is not None]

    def begin(self) -> None:
        """It is under way: requests may be longer than the host knows."""
        for request in self.requests:
            request.results_ahead += 1
        for request in self.running:
            request.ahead += self._most
            request.behind |= self._most == 1

    def read(self, observe: Observer | None) -> None:
        """Wait for the result, and give requests their tokens.

        Args:
            observe: told how many tokens each request of the round got; None = nobody wants to know.
        """
        self.result.wait()
        rounds = zip(self.running, self.result.accepted(), strict=False)  # padding is behind
        # Requests that ended in the round before, or were aborted since, ran for nothing.
        live = [(request, tokens) for request, tokens in rounds if not request.finished]
        if observe is not None and live and self.shape is not None:
            observe(self.shape, [len(tokens) for _, tokens in live])
        for request in self.running:
            request.ahead -= self._most
        for request in self.requests:
            request.results_ahead -= 1
        for request, tokens in live:
            self._give_round(request, tokens)
        for started, token in zip(self.started, self.result.first_tokens(), strict=True):
            if started is not None and not started.aborted:
                self._give(started, [token])

    @property
    def _most(self) -> int:
        """Tokens that a request of the round gets at most."""
        return self.shape.steps + 1 if self.shape is not None else 0

    def _give_round(self, request: Request, tokens: Sequence[int]) -> None:
        assert self.shape is not None
        if request not in self.had:  # a second reading counts nothing
            request.counts.add_round(self.shape.steps, self.shape.nodes - 1, len(tokens))
        self._give(request, tokens)
        if self.shape.steps:
            request.drafted = request.length

    def _give(self, request: Request, tokens: Sequence[int]) -> None:
        request.take(tokens, after=self.had.setdefault(request, len(request.tokens)))


def fresh(chunk: Chunk) -> tuple[Request | None, ...]:
    """Whose first tokens a chunk chooses; None where the next token is known."""
    return tuple(piece.request if piece.root is None else None for piece in chunk.done)
