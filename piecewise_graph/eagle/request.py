"""One request: what it asked for, what it has so far, and how far it is on its way through the engine."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import SpeculatorError
from .options import Sampling, is_whole
from .statistics import Counts


@dataclass
class Progress:
    """How far a request is. Its counters change through its methods only, which hold the invariants.

    The host reads results one step late, so it knows upper bounds: `launched` adds what a result may bring,
    `settled` takes the same away again when the result is read.

    Attributes:
        num_computed: tokens of the request's length that prefill has sent to the device.
        num_drafted: tokens whose K and V the draft has.
        draft_is_behind: plain rounds were launched since the draft last read this request.
        results_in_flight: launched results that were not read.
        tokens_in_flight: how much these results may add to the request's length at most.
        num_reported: generated tokens that `on_tokens` has seen.
    """

    num_computed: int = 0
    num_drafted: int = 0
    draft_is_behind: bool = False
    results_in_flight: int = 0
    tokens_in_flight: int = 0
    num_reported: int = 0

    def admitted(self) -> None:
        """The request got a slot: both caches are empty there. Nothing may be in flight."""
        assert not self.results_in_flight, "admitted with a result in flight"
        self.num_computed = self.num_drafted = 0
        self.draft_is_behind = False

    def prefilled(self, stop: int) -> None:
        """Target and draft compute the tokens up to `stop`."""
        assert stop >= self.num_computed, "prefilled backwards"
        self.num_computed = self.num_drafted = stop

    def launched(self, max_new: int, *, plain: bool = False) -> None:
        """A result is in flight that adds up to `max_new` tokens to the length: S + 1 of a round, else 0.

        Args:
            plain: it is of a round without a draft.
        """
        self.results_in_flight += 1
        self.tokens_in_flight += max_new
        self.draft_is_behind |= plain

    def settled(self, max_new: int) -> None:
        """A result was read that was launched with the same `max_new`."""
        self.results_in_flight -= 1
        self.tokens_in_flight -= max_new
        assert self.results_in_flight >= 0, "more was settled than launched"
        assert self.results_in_flight or not self.tokens_in_flight, "settled with another max_new"

    def drafted(self, length: int) -> None:
        """A round with a draft was read: the draft has all of the request's `length`."""
        self.num_drafted = length

    def caught_up(self, length: int) -> None:
        """The draft was sent what it missed. No round may be in flight."""
        assert not self.tokens_in_flight, "caught up while a round is in flight"
        self.num_drafted, self.draft_is_behind = length, False

    def reported(self, count: int) -> None:
        """`on_tokens` was called with all tokens up to the first `count`."""
        assert count >= self.num_reported, "reported backwards"
        self.num_reported = count

    def rewound(self, length: int) -> None:
        """All generated tokens but the first were dropped. No result may be in flight."""
        assert not self.results_in_flight, "rewound with a result in flight"
        self.num_computed = min(self.num_computed, length)
        self.num_drafted, self.num_reported = length, min(self.num_reported, 1)

    def restarted(self) -> None:
        """An exception ended a step: results in flight are lost, and prefill begins again."""
        self.results_in_flight = self.tokens_in_flight = 0


@dataclass(eq=False)
class Request:
    """Made by `Engine.add_request`; `tokens` and `finished` are what its caller reads.

    Attributes:
        index: number of the request in its engine; the lowest is served first.
        prompt, sampling, max_new_tokens, stop, on_tokens: as asked for.
        tokens: generated so far; a stop token that ended the request is the last of them.
        aborted: its caller wants no more tokens.
        counts: acceptance of its rounds, for `Statistics`.
        slot: row of the request table while it runs; meaningless before and after.
        progress: how far the engine is with it.
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
    progress: Progress = field(default_factory=Progress)

    @property
    def finished(self) -> bool:
        """Whether it gets no more tokens."""
        ended = len(self.tokens) >= self.max_new_tokens or bool(self.tokens and self.tokens[-1] in self.stop)
        return ended or self.aborted

    @property
    def length(self) -> int:
        """Tokens whose K and V the target has, as far as the host knows: all but the last."""
        return len(self.prompt) + max(len(self.tokens) - 1, 0)

    @property
    def limit(self) -> int:
        """Prompt and new tokens together, at most."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def ends_in_flight(self) -> bool:
        """The results in flight bring at least one token each, and no more tokens are wanted."""
        return len(self.tokens) + self.progress.results_in_flight >= self.max_new_tokens

    @property
    def has_news(self) -> bool:
        """It has tokens that `on_tokens` has not seen."""
        return len(self.tokens) > self.progress.num_reported

    def sequence(self, start: int, stop: int) -> list[int]:
        """Tokens of prompt and answer together."""
        return [*self.prompt, *self.tokens][start:stop]

    def take(self, tokens: Sequence[int], after: int) -> None:
        """Keep the first `after` tokens, then `tokens` up to the one that ends the request."""
        wanted = self.max_new_tokens - after
        end = next((index + 1 for index, token in enumerate(tokens) if token in self.stop), len(tokens))
        self.tokens[after:] = tokens[: min(end, wanted)]

    def rewind(self) -> None:
        """Drop all tokens but the first."""
        del self.tokens[1:]
        self.progress.rewound(self.length)

    def report(self) -> None:
        """Hand new tokens to `on_tokens`."""
        new = self.tokens[self.progress.num_reported :]
        self.progress.reported(len(self.tokens))
        if new and self.on_tokens is not None:
            self.on_tokens(self, new)

    def check(self, vocab_size: int, max_seq_len: int) -> None:
        """Refuse what can never be served.

        Raises:
            SpeculatorError: see the catalogue.
        """
        if not self.prompt:
            raise SpeculatorError.empty_prompt(self.index)
        for where, tokens in {"prompt": self.prompt, "stop tokens": sorted(self.stop)}.items():
            wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
            if wrong is not None:
                raise SpeculatorError.unknown_token(self.index, wrong, where, vocab_size)
        if not is_whole(self.max_new_tokens, 1, float("inf")):
            raise SpeculatorError.bad_max_new_tokens(self.index, self.max_new_tokens)
        if not isinstance(self.sampling, Sampling):
            raise SpeculatorError.no_sampling(self.index, self.sampling)
        if self.limit > max_seq_len:
            sizes = len(self.prompt), self.max_new_tokens, self.limit, max_seq_len
            raise SpeculatorError.request_too_long(self.index, *sizes)


def token_ids(index: int, what: str, given: Any) -> tuple[int, ...]:
    """A prompt, or stop tokens, as a tuple.

    Raises:
        SpeculatorError: they are no integers.
    """
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise SpeculatorError.no_token_ids(index, what, given) from None


def per_request(name: str, given: object, count: int) -> list[Any]:
    """One value per request, from one for all or a sequence.

    Raises:
        SpeculatorError: a sequence of another length.
    """
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        if len(given) != count:
            raise SpeculatorError.wrong_count(len(given), name, count)
        return list(given)
    return [given] * count
