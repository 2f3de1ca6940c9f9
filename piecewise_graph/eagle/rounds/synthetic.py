"""Acceptance by decree, for models with random weights: what a round would cost a trained pair.

Whatever it is used in has to say so: the text that comes out means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..errors import SpeculatorError


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

    def choices(self, tokens: Tensor, mask: Tensor | None, uniform: Tensor) -> Tensor:
        """What the target is said to choose at every row, int32 `[B*N]`, for accept_greedy.

        Down to a depth that `uniform [B]` decides, the next node on the way to the deepest one; there, a
        token that none of its children has. A tree that is less deep than its steps accepts less.

        Args:
            tokens: int32 `[B, N]`, of the nodes.
            mask: bool `[B, N, N]`, as `Tree.mask`; None for a chain.
        """
        decreed = torch.stack([uniform < rate for rate in self.rates]).sum(0)[:, None]
        chosen = _in_chain(tokens, decreed) if mask is None else _in_tree(tokens, mask, decreed)
        return chosen.flatten()


def _in_chain(tokens: Tensor, accepted: Tensor) -> Tensor:
    following = tokens.roll(-1, 1)
    row = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    return torch.where(row < accepted, following, (following == 0).int())


def _in_tree(tokens: Tensor, mask: Tensor, decreed: Tensor) -> Tensor:
    size, nodes = tokens.shape
    depth = mask.sum(-1) - 1
    deepest, at = depth.max(-1, keepdim=True)
    path = mask.gather(1, at[..., None].expand(-1, -1, nodes))[:, 0]
    accepted = torch.minimum(decreed, deepest)
    # The path's tokens by depth; those of other nodes go where nobody looks.
    by_depth = tokens.new_zeros(size, nodes + 1).scatter_(1, torch.where(path, depth, nodes), tokens)
    goes_on = path & (depth < accepted)
    tip = (path & (depth == accepted)).int().argmax(-1)
    below_tip = mask.gather(2, tip.view(-1, 1, 1).expand(-1, nodes, -1))[..., 0]
    children = torch.where(below_tip & (depth == accepted + 1), tokens, -1)
    candidates = torch.arange(nodes, dtype=torch.int32, device=tokens.device)
    taken = (candidates[:, None] == children[:, None, :]).any(-1)
    other = (~taken).int().argmax(-1).int()
    return torch.where(goes_on, by_depth.gather(1, depth + 1), other[:, None])


@cache
def _geometric(drafts: float, steps: int) -> tuple[float, ...]:
    """Powers of one rate that sum to `drafts`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, steps + 1)) < drafts else (low, middle)
    return tuple(high**i for i in range(1, steps + 1))
