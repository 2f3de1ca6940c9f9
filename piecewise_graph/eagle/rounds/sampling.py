"""Logits to distributions and tokens: on the device, without state, inside graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from piecewise_graph.custom_ops.token_choice import first_largest

# Uses of a random number. A draft adds its step, an acceptance test its node, synthetic acceptance the
# request's index.
FIRST, DRAFT, ACCEPT, SYNTHETIC = 0, 1 << 20, 2 << 20, 3 << 20
_COLDEST = 1e-30  # temperature: logits divided by less may overflow


def distribution(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """The distribution that tokens are drawn from, in float32.

    A row whose largest logit is infinite or NaN has no distribution. All is on its `argmax` then, as at
    temperature 0.

    Args:
        logits: `[..., V]`.
        temperature: float32, `logits.shape[:-1]` or one that broadcasts to it; 0 = all on the largest logit.
        top_k, top_p: integers and float32 of the same shape, or None for neither.
    """
    logits = logits.float()
    scaled = logits / temperature.clamp(min=_COLDEST)[..., None]
    certain = (temperature == 0) | ~scaled.amax(-1).isfinite()
    if top_k is not None and top_p is not None:
        scaled = _filtered(scaled, top_k, top_p)
    best = torch.zeros_like(scaled).scatter_(-1, first_largest(logits)[..., None], 1.0)
    return torch.where(certain[..., None], best, scaled.softmax(-1))


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Minus infinity for tokens outside of the top k, then for those beyond a cumulated `top_p`."""
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
    # Rounding may end a sum early, and the token found may then have no probability: take the last that has.
    last = probs.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(found, last)
