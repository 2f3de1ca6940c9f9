"""The load: which requests arrive when. The same seed gives the same requests."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import BenchError

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Load:
    """What requests look like.

    Attributes:
        input_len, output_len: largest number of tokens in a prompt and in its answer.
        range_ratio: lengths are uniform between `range_ratio` times the largest and the largest.
        request_rate: arrivals per second, a Poisson process; inf = all at once.
        vocab_size: of random prompts.
        texts: encoded prompts, taken in turn and cut to `input_len`; None = random tokens.
    """

    input_len: int
    output_len: int
    range_ratio: float = 1.0
    request_rate: float = float("inf")
    seed: int = 0
    vocab_size: int = 0
    texts: Texts | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; instead of the texts, their number."""
        row = asdict(self)
        del row["vocab_size"], row["texts"]
        rate = self.request_rate if self.request_rate < float("inf") else "inf"
        prompts = "random" if self.texts is None else f"{len(self.texts)} texts"
        return row | {"request_rate": rate, "prompts": prompts}


@dataclass(frozen=True)
class Arrival:
    """One request of a load.

    Attributes:
        due: seconds after the load began; the request may wait longer for others to finish.
    """

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    due: float = 0.0


def arrivals(load: Load, count: int) -> list[Arrival]:
    """The first `count` requests, in the order in which they are due."""
    # One source per column: longer prompts do not change when requests arrive.
    lengths, answers, tokens, gaps = (random.Random(f"{load.seed} {name}") for name in "lotg")
    made, due = [], 0.0
    for index in range(count):
        length = _length(lengths, load.input_len, load.range_ratio)
        if load.texts is None:
            prompt = tuple(tokens.randrange(load.vocab_size) for _ in range(length))
        else:
            prompt = tuple(load.texts[index % len(load.texts)][: load.input_len])
        new = _length(answers, load.output_len, load.range_ratio)
        if load.request_rate < float("inf"):
            due += gaps.expovariate(load.request_rate)
        made.append(Arrival(index, prompt, new, due))
    return made


def read_texts(file: Path, encode: Callable[[str], Sequence[int]]) -> list[Sequence[int]]:
    """One prompt per line that is not blank.

    Raises:
        BenchError: no such file, or nothing in it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError.unreadable_prompts(file, error) from None
    found = [tokens for line in lines if line.strip() and (tokens := encode(line))]
    if not found:
        raise BenchError.blank_prompts(file)
    return found


def _length(source: random.Random, longest: int, ratio: float) -> int:
    return source.randint(max(1, math.ceil(ratio * longest)), longest)
