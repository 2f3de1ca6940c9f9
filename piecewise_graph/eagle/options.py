"""What users choose: the shape of a draft, how requests are sampled and served, a speculator's limits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from numbers import Integral, Real
from typing import Any

from .errors import SpeculatorError

AUTO = "auto"  # the planner chooses a shape for each round
FULL, PIECEWISE, COMPILED, EAGER = GRAPH_MODES = ("full", "piecewise", "compiled", "eager")
MAX_DRAFT_TOKENS = 256  # what the kernels of trees hold
PREFILL_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)  # rows of prompts that have tapes
# More rows, but cuBLAS of CUDA 13.0 takes 4 to 14 % less time with 3B to 14B models (H200), 4 % more with 1B.
FASTER_ROWS = {544: 560}


@dataclass(frozen=True)
class DraftShape:
    """How many tokens a round drafts. `DraftShape(0)` is plain decoding.

    Attributes:
        steps: S, the depth of the draft in tokens; it takes S - 1 draft forwards.
        topk: k, branches that each level keeps; 1 = a chain.
        num_draft_tokens: N, rows that the target verifies per request, the root included; None = S + 1 for a
            chain, for a tree `8 * steps` or the number of candidates, whichever is smaller.

    Raises:
        SpeculatorError: the values contradict each other, or the kernels cannot hold so many tokens.
    """

    steps: int
    topk: int = 1
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "topk", "num_draft_tokens"):
            value = getattr(self, name)
            if type(value) is not int and not (name == "num_draft_tokens" and value is None):
                raise SpeculatorError.not_whole(name, value)
        if self.steps < 0 or self.topk < 1 or (self.steps == 0 and self.topk > 1):
            raise SpeculatorError.bad_depth(self.steps, self.topk)
        drafted = 1 + self.candidates
        low, high = drafted if self.topk == 1 else 2, min(drafted, MAX_DRAFT_TOKENS)
        if self.num_draft_tokens is None:
            chosen = drafted if self.topk == 1 else min(high, 8 * self.steps)
            object.__setattr__(self, "num_draft_tokens", chosen)
        if not low <= self.nodes <= high:
            if low > high:
                raise SpeculatorError.too_deep(self.nodes, self.steps, self.topk, high - 1)
            wanted = high if low == high else f"{low} to {high}"
            raise SpeculatorError.bad_draft_tokens(self.nodes, self.steps, self.topk, wanted)

    @property
    def nodes(self) -> int:
        """N, filled in."""
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
    def lookahead(self) -> int:
        """Lookahead slots: tokens beyond its length that a request needs pages for during a round."""
        return max(self.nodes, (self.steps - 1) * self.topk)

    def __str__(self) -> str:
        if not self.steps:
            return "plain decoding"
        if not self.is_tree:
            return f"a chain of {self.steps}"
        return f"a tree of {self.steps} steps, top-k {self.topk}, {self.nodes} tokens"


def planner_shapes(*, trees: bool = True) -> list[DraftShape]:
    """Shapes that the command line gives the planner, beside plain decoding."""
    chains = [DraftShape(steps) for steps in (1, 2, 3, 4, 5)]
    return [*chains, DraftShape(3, 2), DraftShape(5, 4, 16)] if trees else chains


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen from the target's logits.

    Attributes:
        temperature: 0 = the most likely token.
        top_k: only the k most likely; 0 = all.
        top_p: only the most likely tokens whose probabilities sum to this; 1 = all. Applied after top_k.
        seed: two requests with the same prompt, seed and draft shape get the same tokens in every batch.
            With shape="auto" the measured times choose the shape, and so the tokens.

    Raises:
        SpeculatorError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        valid = {
            "temperature": _is_number(self.temperature) and 0 <= self.temperature < float("inf"),
            "top_k": is_whole(self.top_k, 0, 2**31),
            "top_p": _is_number(self.top_p) and 0 < self.top_p <= 1,
            "seed": is_whole(self.seed, 0, 2**62),
        }
        for name in (name for name, is_valid in valid.items() if not is_valid):
            raise SpeculatorError.bad_sampling(name, getattr(self, name))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine serves: the keywords of `Speculator.engine`, `generate` and `session`.

    Attributes:
        shape: one of the speculator's; "auto" = the planner chooses in every round; None = the first.
        graphs: graph modes that differ from the speculator's; prefill always runs in the speculator's.
        synthetic: synthetic acceptance, for models with random weights: a mean accept length, or one rate per
            position. The tokens mean nothing then, and the statistics say so.
        overlap: launch a round before the result of the round before is read, so that the device never waits
            for the host; the tokens are the same. None = only on a GPU.
    """

    shape: DraftShape | int | str | None = None
    graphs: str | Mapping[str, str] | None = None
    synthetic: float | Sequence[float] | None = None
    overlap: bool | None = None


def _is_number(value: Any) -> bool:
    """Of Python or NumPy; a bool, which Python calls a number too, is a mistake."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any, first: int, end: float) -> bool:
    """Whether it is a whole number from `first` on, and below `end`."""
    return _is_number(value) and isinstance(value, Integral) and first <= int(value) < end


def as_shapes(shapes: Any) -> tuple[DraftShape, ...]:
    """Shapes, or numbers of steps, as shapes: in order, each once."""
    listed = isinstance(shapes, Iterable) and not isinstance(shapes, str)
    found = tuple(dict.fromkeys(map(as_shape, shapes))) if listed else ()
    if not found:
        raise SpeculatorError.no_shapes(shapes)
    return found


def as_shape(shape: Any) -> DraftShape:
    """A shape, or the number of steps of a chain, as a shape."""
    if not isinstance(shape, (DraftShape, Integral)):
        raise SpeculatorError.not_a_shape(shape)
    if isinstance(shape, DraftShape):
        return shape
    return DraftShape(shape if isinstance(shape, bool) else int(shape))  # which refuses a bool


@dataclass(frozen=True)
class Limits:
    """What a speculator is made for; checked by `serving.model_checks.make_limits`.

    Attributes:
        shapes: that rounds may have.
        batch_sizes: ascending numbers of requests that rounds are captured for; the last is `max_requests`.
        max_seq_len: prompt and new tokens of one request together.
        page_size, num_pages: of both caches; the null page is one of `num_pages`.
        prefill_rows: tokens of prompts that one step takes at most.
    """

    shapes: tuple[DraftShape, ...]
    batch_sizes: tuple[int, ...]
    max_seq_len: int
    page_size: int
    num_pages: int
    prefill_rows: int

    @property
    def max_requests(self) -> int:
        """Requests that run at the same time."""
        return self.batch_sizes[-1]

    @property
    def mixed_rows(self) -> set[int]:
        """Row counts of forwards that a whole batch of prompts shares with a round: steps of 16, FASTER_ROWS.

        Empty where prompts alone have no tapes of so many rows: fewer prompts would be padded to them.
        """
        pairs = product(self.shapes, self.batch_sizes) if self.prefill_rows <= PREFILL_SIZES[-1] else ()
        rounds = {shape.nodes * size for shape, size in pairs if self.may_share(shape, size)}
        aligned = {self.prefill_rows + -(-rows // 16) * 16 for rows in rounds}
        return {FASTER_ROWS.get(rows, rows) for rows in aligned}

    @property
    def lookahead(self) -> int:
        """Lookahead slots of any round."""
        return max(shape.lookahead for shape in self.shapes)

    @property
    def table_tokens(self) -> int:
        """Tokens that a row of the request table holds.

        With overlap, a request that has reached its end runs one round more, behind its last token.
        """
        return self.max_seq_len + self.lookahead + max(shape.steps for shape in self.shapes) + 1

    def may_share(self, shape: DraftShape, requests: int) -> bool:
        """Whether prompts may stand in a round's forwards: chains only, of half as many rows at most."""
        return self.max_requests > 1 and not shape.is_tree and 2 * requests * shape.nodes <= self.prefill_rows
