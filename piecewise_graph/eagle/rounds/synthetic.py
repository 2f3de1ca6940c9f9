"""Synthetic acceptance: models with random weights cost what a trained pair would.

The generated text means nothing, so every table and statistics object says that acceptance is synthetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real

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
            raise SpeculatorError.bad_rates(self.rates)

    @classmethod
    def of(cls, wanted: float | Sequence[float], steps: int, *, clamped: bool = False) -> Synthetic:
        """From a mean accept length, bonus included, or from one rate per position.

        With a mean, every position is equally likely to be accepted given that the one before it was.

        Args:
            clamped: a mean above `steps + 1` accepts everything; without it such a mean is an error.

        Raises:
            SpeculatorError: out of range, or not one rate per step.
        """
        if isinstance(wanted, (int, float, Real)):  # NumPy's numbers too
            mean = min(float(wanted), steps + 1) if clamped else float(wanted)
            if not 1 <= mean <= steps + 1:
                raise SpeculatorError.bad_mean(mean, steps)
            return cls(_geometric(mean - 1, steps))
        if isinstance(wanted, str):  # its characters are no rates
            raise SpeculatorError.bad_rates(wanted)
        try:
            rates = tuple(map(float, wanted))
        except (TypeError, ValueError):
            raise SpeculatorError.bad_rates(wanted) from None
        if len(rates) < steps:
            raise SpeculatorError.too_few_rates(len(rates), steps)
        return cls(rates[:steps])

    @property
    def accept_length(self) -> float:
        """The mean accept length of these rates, bonus included."""
        return 1 + sum(self.rates)

    def choices(self, tokens: Tensor, mask: Tensor | None, uniform: Tensor) -> Tensor:
        """The target's choice at every row, int32 `[B*N]`, as accept_greedy takes it.

        `uniform [B]` decides the accepted depth. Above it, each node chooses the next node of the path to the
        deepest one. At that depth, the node chooses a token that none of its children has. A pruned tree may
        be less deep than its steps; it accepts less.

        Args:
            tokens: int32 `[B, N]`, tokens of the nodes.
            mask: bool `[B, N, N]`, as `Tree.mask`; None for a chain.
        """
        depths = torch.stack([uniform < rate for rate in self.rates]).sum(0)[:, None]
        chosen = _in_chain(tokens, depths) if mask is None else _in_tree(tokens, mask, depths)
        return chosen.flatten()


def _in_chain(tokens: Tensor, accepted: Tensor) -> Tensor:
    following = tokens.roll(-1, 1)
    row = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    return torch.where(row < accepted, following, (following == 0).int())


def _in_tree(tokens: Tensor, mask: Tensor, depths: Tensor) -> Tensor:
    size, nodes = tokens.shape
    depth = mask.sum(-1) - 1
    deepest, at = depth.max(-1, keepdim=True)
    path = mask.gather(1, at[..., None].expand(-1, -1, nodes))[:, 0]
    accepted = torch.minimum(depths, deepest)
    # The path's tokens by depth; other nodes write to the last column, which is not read.
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
