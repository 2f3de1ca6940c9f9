"""From logits to distributions and tokens: on the device, without state, inside a graph.

Note [Randomness without a generator]
A generator's state would depend on which requests share a batch, on how much is drafted, and on which graphs
were replayed. So a random number is a hash of the request's seed, of the length at which it is used, and of
what for: the same request draws the same numbers in every batch and in every graph mode.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a number is drawn for; a draft's use adds its step, a test of acceptance its node, a decreed one the
# request's place among the prompts.
FIRST, DRAFT, ACCEPT, SYNTHETIC = 0, 1 << 20, 2 << 20, 3 << 20
# The constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as int64.
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_COLDEST = 1e-30  # temperature: logits divided by less may overflow


def uniforms(seed: Tensor, length: Tensor, use: Tensor) -> Tensor:
    """float32 in [0, 1): a function of three integers.

    Args:
        seed: int64; length, use: integers; shapes that broadcast.
    """
    mixed = _mix(_mix(_mix(seed.long()) + length.long()) + use.long())
    return _shift(mixed, 40).to(torch.float32) * 2**-24


def _mix(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """What tokens are drawn from, in float32.

    Args:
        logits: `[..., V]`.
        temperature: float32, `logits.shape[:-1]` or one that broadcasts to it; 0 = all on the largest logit.
        top_k, top_p: integers and float32 of the same shape, or None for neither.
    """
    greedy = temperature == 0
    logits = logits.float()
    scaled = logits / temperature.clamp(min=_COLDEST)[..., None]
    if top_k is not None and top_p is not None:
        scaled = _filtered(scaled, top_k, top_p)
    best = torch.zeros_like(scaled).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return torch.where(greedy[..., None], best, scaled.softmax(-1))


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Minus infinity for all but the top k, and of these for all after those that hold `top_p` together."""
    ordered, index = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    kept = (rank < top_k[..., None]) | (top_k[..., None] <= 0)
    mass = ordered.masked_fill(~kept, float("-inf")).softmax(-1)
    before = mass.cumsum(-1) - mass
    kept = kept & ((before < top_p[..., None]) | (top_p[..., None] >= 1))
    kept = kept | (rank == 0)
    return scaled.masked_fill(~torch.zeros_like(kept).scatter_(-1, index, kept), float("-inf"))


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """`[n]` tokens from `probs [n, V]`: the first whose cumulated probability exceeds `uniform [n]`."""
    cumulated = probs.cumsum(-1)
    found = torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)[:, 0]
    # Rounding may end a sum early: what is found then may have no probability, the last that has some does.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(found, last)
