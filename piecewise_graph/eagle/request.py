"""One request of a generation: what it asked for and what it has so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .errors import SpeculatorError
from .shapes import Sampling
from .statistics import Counts


@dataclass
class Request:
    """Attributes:
    slot: row of the request table while it runs; meaningless before and after.
    tokens: what was generated; a stop token that ended it is the last of them.
    length: tokens whose K and V the target has; `drafted`: those whose K and V the draft has.
    """

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_new_tokens: int
    stop: frozenset[int]
    slot: int = 0
    tokens: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    length: int = field(init=False)
    drafted: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.drafted = len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.max_new_tokens or bool(self.tokens and self.tokens[-1] in self.stop)

    def advance(self, tokens: int, *, drafted: bool) -> None:
        """A round computed so many tokens, the draft with the target or not."""
        self.length += tokens
        if drafted:
            self.drafted = self.length

    def sequence(self, start: int, stop: int) -> list[int]:
        """Tokens of prompt and answer together."""
        return [*self.prompt, *self.tokens][start:stop]

    def take(self, tokens: Iterable[int]) -> None:
        """Append tokens up to the one that ends the request."""
        for token in tokens:
            if self.finished:
                break
            self.tokens.append(token)


def check_request(request: Request, vocab_size: int, max_seq_len: int) -> None:
    """Raises:
    SpeculatorError: the request can never be served.
    """
    prompt, index = request.prompt, request.index
    if not prompt:
        raise SpeculatorError.bad_request(index, "its prompt is empty", "pass at least one token.")
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        what = f"token {wrong} of its prompt is none of the target's {vocab_size}"
        raise SpeculatorError.bad_request(index, what, "encode the prompt with the target's tokenizer.")
    if request.max_new_tokens < 1:
        what = f"max_new_tokens is {request.max_new_tokens}"
        raise SpeculatorError.bad_request(index, what, "ask for at least one token.")
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
            raise SpeculatorError.bad_request(
                min(len(given), count), what, "pass one for all, or one per prompt."
            )
        return list(given)
    return [given] * count
