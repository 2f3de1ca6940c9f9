"""What a round of speculation looks like, and how a request is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .errors import SpeculatorError

AUTO = "auto"  # the planner chooses a shape for each round
FULL, PIECEWISE, COMPILED, EAGER = WAYS = ("full", "piecewise", "compiled", "eager")  # of running a phase
MAX_DRAFT_TOKENS = 256  # what the kernels of trees hold


@dataclass(frozen=True)
class DraftShape:
    """How much a round drafts. `DraftShape(0)` is plain decoding.

    Attributes:
        steps: S, how many tokens deep; S - 1 draft forwards.
        topk: k, branches that each level keeps; 1 = a chain.
        num_draft_tokens: N, rows that the target verifies per request, the root included; None = S + 1 for a
            chain, else `8 * steps` or as many candidates as there are.

    Raises:
        SpeculatorError: such a round cannot be.
    """

    steps: int
    topk: int = 1
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "topk", "num_draft_tokens"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "num_draft_tokens" and value is None):
                raise SpeculatorError.bad_shape(f"{name}={value!r}", "pass a whole number.")
        if self.steps < 0 or self.topk < 1 or (self.steps == 0 and self.topk > 1):
            what = f"{self.steps} steps with top-k {self.topk}"
            raise SpeculatorError.bad_shape(
                what, "pass steps=0 for plain decoding, else 1 or more; topk=1 for a chain, more for a tree."
            )
        most = 1 + self.candidates
        if self.num_draft_tokens is None:
            chosen = most if self.topk == 1 else min(most, 8 * self.steps, MAX_DRAFT_TOKENS)
            object.__setattr__(self, "num_draft_tokens", chosen)
        low, high = most if self.topk == 1 else 2, min(most, MAX_DRAFT_TOKENS)
        if not low <= self.nodes <= high:
            what = f"{self.num_draft_tokens} draft tokens of {self.steps} steps with top-k {self.topk}"
            wanted = f"{low} to {high}" if low < high else f"{high}"
            if low > high:
                raise SpeculatorError.bad_shape(what, f"draft at most {MAX_DRAFT_TOKENS - 1} tokens.")
            raise SpeculatorError.bad_shape(what, f"pass num_draft_tokens={wanted}, the root included.")

    @property
    def nodes(self) -> int:
        """N as a number."""
        assert self.num_draft_tokens is not None
        return self.num_draft_tokens

    @property
    def candidates(self) -> int:
        """Tokens that are drafted, of which N - 1 are verified."""
        return self.topk + (self.steps - 1) * self.topk**2 if self.steps else 0

    @property
    def is_tree(self) -> bool:
        return self.topk > 1

    @property
    def room(self) -> int:
        """Tokens beyond its length that a request needs pages for during a round."""
        return max(self.nodes, (self.steps - 1) * self.topk)

    def __str__(self) -> str:
        if not self.steps:
            return "plain decoding"
        if not self.is_tree:
            return f"a chain of {self.steps}"
        return f"a tree of {self.steps} steps, top-k {self.topk}, {self.nodes} tokens"


def planner_shapes(*, trees: bool = True) -> list[DraftShape]:
    """What the command line lets the planner choose from, beside plain decoding."""
    chains = [DraftShape(steps) for steps in (1, 2, 3, 4, 5)]
    return [*chains, DraftShape(3, 2), DraftShape(5, 4, 16)] if trees else chains


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen from the target's logits.

    Attributes:
        temperature: 0 = the most likely token.
        top_k: only the k most likely; 0 = all.
        top_p: only the most likely that have this probability together; 1 = all. After top_k.
        seed: two requests with the same prompt, seed and draft shape get the same tokens, whatever shares
            their batch. With shape="auto" timing chooses the shape, and with it the tokens.

    Raises:
        SpeculatorError: a value that means nothing.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        faults = {
            "temperature": (0 <= self.temperature < float("inf"), "pass 0 for greedy, or more."),
            "top_k": (_is_whole(self.top_k, 2**31), "pass how many tokens to keep; 0 = all."),
            "top_p": (0 < self.top_p <= 1, "pass a probability above 0 and up to 1; 1 = all."),
            "seed": (_is_whole(self.seed, 2**62), "pass a whole number from 0 to 2**62 - 1."),
        }
        for name, (fine, remedy) in faults.items():
            if not fine:
                raise SpeculatorError.bad_sampling(f"{name}={getattr(self, name)!r}", remedy)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


def _is_whole(value: Any, end: int) -> bool:
    return isinstance(value, Integral) and 0 <= int(value) < end


def as_shapes(shapes: Any) -> tuple[DraftShape, ...]:
    """Each once, in order."""
    if isinstance(shapes, (str, int, DraftShape)) or not shapes:
        raise SpeculatorError.bad_shape(f"{shapes=}", "pass a list, such as [3, 0]; 0 = plain decoding.")
    return tuple(dict.fromkeys(map(as_shape, shapes)))


def as_shape(shape: Any) -> DraftShape:
    """A shape, or the number of steps of a chain."""
    if not isinstance(shape, (DraftShape, int)):
        what = f"{shape!r} is no shape"
        raise SpeculatorError.bad_shape(
            what, 'pass a DraftShape or a number of steps; "auto" is for shape= of generate and engine.'
        )
    return shape if isinstance(shape, DraftShape) else DraftShape(shape)
