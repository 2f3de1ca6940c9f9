"""One request: what it asked for, what it has so far, and what is under way for it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from .errors import SpeculatorError
from .options import Sampling
from .statistics import Counts


@dataclass(eq=False)
class Request:
    """Made by `Engine.add_request`; `tokens` and `finished` are what its caller reads.

    Attributes:
    index: among all requests of its engine; the one that came first is served first.
    prompt, sampling, max_new_tokens, stop, on_tokens: as asked for.
    tokens: what was generated; a stop token that ended it is the last of them.
    aborted: its caller wants no more of it.
    counts: what became of its rounds, for `Statistics`.

    The engine's own:
    slot: row of the request table while it runs; meaningless before and after.
    computed: tokens up to its `length` that prefill has sent to the device.
    drafted: tokens whose K and V the draft has.
    behind: rounds ran without the draft since, or are under way.
    ahead, results_ahead: most tokens that rounds under way may add, and how many results are under way.
    reported: tokens that `on_tokens` has seen.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop: frozenset[int]
    on_tokens: Callable[[Request, list[int]], None] | None = None
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    aborted: bool = False
    computed: int = 0
    drafted: int = 0
    behind: bool = False
    ahead: int = 0
    results_ahead: int = 0
    reported: int = 0

    @property
    def finished(self) -> bool:
        """It gets no more tokens."""
        ended = len(self.tokens) >= self.max_new_tokens or bool(self.tokens and self.tokens[-1] in self.stop)
        return ended or self.aborted

    @property
    def length(self) -> int:
        """Tokens whose K and V the target has, as far as the host knows: all but the last."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def limit(self) -> int:
        """Tokens that it may have in the end, the prompt's among them."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def is_done_soon(self) -> bool:
        """Every result under way brings a token, and no more are wanted than that."""
        return len(self.tokens) + self.results_ahead >= self.max_new_tokens

    def sequence(self, start: int, stop: int) -> list[int]:
        """Tokens of prompt and answer together."""
        return [*self.prompt, *self.tokens][start:stop]

    def take(self, tokens: Sequence[int], after: int) -> None:
        """`tokens` follow the first `after` ones, up to the one that ends the request."""
        room = self.max_new_tokens - after
        end = next((place + 1 for place, token in enumerate(tokens) if token in self.stop), len(tokens))
        self.tokens[after:] = tokens[: min(end, room)]

    def report(self) -> None:
        """Tell the caller of tokens that it has not seen."""
        new = self.tokens[self.reported :]
        self.reported = len(self.tokens)
        if new and self.on_tokens is not None:
            self.on_tokens(self, new)


def token_ids(index: int, what: str, given: Any) -> tuple[int, ...]:
    """Raises:
    SpeculatorError: they are none.
    """
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise SpeculatorError.bad_request(
            index, f"its {what} is {given!r}", "pass a sequence of token ids (of prompts: a list of such)."
        ) from None


def check_request(request: Request, vocab_size: int, max_seq_len: int) -> None:
    """Raises:
    SpeculatorError: the request can never be served.
    """
    prompt, index = request.prompt, request.index
    if not prompt:
        raise SpeculatorError.bad_request(index, "its prompt is empty", "pass at least one token.")
    for place, tokens in {"prompt": prompt, "stop tokens": sorted(request.stop)}.items():
        wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if wrong is not None:
            what = f"token {wrong} of its {place} is none of the target's {vocab_size}"
            raise SpeculatorError.bad_request(index, what, "encode text with the target's tokenizer.")
    if not isinstance(request.max_new_tokens, Integral) or request.max_new_tokens < 1:
        what = f"max_new_tokens is {request.max_new_tokens!r}"
        raise SpeculatorError.bad_request(index, what, "ask for at least one token, a whole number of them.")
    if not isinstance(request.sampling, Sampling):
        what = f"its sampling is {request.sampling!r}"
        raise SpeculatorError.bad_request(index, what, "pass Sampling(...), or None = greedy.")
    total = len(prompt) + request.max_new_tokens
    if total > max_seq_len:
        what = f"{len(prompt)} prompt tokens and {request.max_new_tokens} new ones are {total}"
        raise SpeculatorError.bad_request(
            index, what, f"keep to {max_seq_len}, or raise max_seq_len= of the speculator."
        )


def per_request(name: str, given: object, count: int) -> list[object]:
    """One value per request, from one for all or a sequence.

    Raises:
        SpeculatorError: a sequence of another length.
    """
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        if len(given) != count:
            what = f"{len(given)} values of {name} for {count} prompts"
            raise SpeculatorError.bad_setting(what, "pass one for all, or one per prompt.")
        return list(given)
    return [given] * count
