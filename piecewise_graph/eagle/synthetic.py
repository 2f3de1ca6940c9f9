"""Acceptance by decree, for models with random weights: what a round would cost a trained pair.

Whatever it is used in has to say so: the text that comes out means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md

from .buffers import Buffers
from .errors import SpeculatorError
from .sampling import SYNTHETIC, uniforms


@dataclass(frozen=True)
class Synthetic:
    """How often each position of a draft is accepted.

    Attributes:
        rates: share of rounds that accept position i, from 0 to 1 and none above the one before it.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        above = (1.0, *self.rates[:-1])
        if not all(0 <= rate <= before for rate, before in zip(self.rates, above, strict=True)):
            raise SpeculatorError.bad_rates(str(self.rates))

    @classmethod
    def of(cls, wanted: float | Sequence[float], steps: int, *, clamped: bool = False) -> Synthetic:
        """From a mean accept length, bonus included, or from rates per position.

        Args:
            clamped: a mean above what `steps` can give means all of them.

        A mean makes every position as likely as the one before it, given that one.

        Raises:
            SpeculatorError: out of range, or not one rate per step.
        """
        if isinstance(wanted, (int, float)):
            wanted = min(wanted, steps + 1) if clamped else wanted
            if not 1 <= wanted <= steps + 1:
                raise SpeculatorError.bad_rates(f"a mean of {wanted} tokens from {steps} steps")
            return cls(_geometric(wanted - 1, steps))
        if len(wanted) < steps:
            raise SpeculatorError.bad_rates(f"{len(wanted)} rates for {steps} steps")
        return cls(tuple(wanted[:steps]))

    @property
    def accept_length(self) -> float:
        """The mean that they amount to, bonus included."""
        return 1 + sum(self.rates)

    def choices(self, tree: md.Tree, buffers: Buffers, seed: Tensor) -> Tensor:
        """What the target is said to choose at every row, int32 `[B*N]`, for accept_greedy.

        Down to a drawn depth every node's first child is chosen; below, a token that no node has. So a tree
        accepts no deeper than its best branch goes, which may be less than what was decreed.
        """
        size, nodes = tree.next_token.shape
        tokens = tree.tokens.view(size, nodes)
        depth = tree.positions.view(size, nodes) - buffers.seq_lens[:, None]
        uniform = uniforms(seed, buffers.seq_lens, torch.full_like(seed, SYNTHETIC))
        accepted = torch.stack([uniform < rate for rate in self.rates]).sum(0)
        child = tree.next_token
        forced = tokens.gather(1, child.clamp(min=0).long())
        candidates = torch.arange(nodes + 1, dtype=torch.int32, device=tokens.device)
        taken = (candidates[:, None] == tokens[:, None, :]).any(-1)  # [B, N + 1]
        other = (~taken).int().argmax(-1).int()
        goes_on = (child >= 0) & (depth < accepted[:, None])
        return torch.where(goes_on, forced, other[:, None]).flatten()


@cache
def _geometric(drafts: float, steps: int) -> tuple[float, ...]:
    """Powers of one rate that sum to `drafts`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, steps + 1)) < drafts else (low, middle)
    return tuple(high**i for i in range(1, steps + 1))
