"""The torch reference, on any device: what every other implementation is compared with."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from piecewise_graph.context import get_forward_context


def packed_causal_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """Write causal attention of packed sequences into `out`. Shapes as in `ops.attention`."""
    cu_seqlens = get_forward_context().get("cu_seqlens")
    mask = None if cu_seqlens is None else packed_causal_mask(q.shape[0], cu_seqlens)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    result = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out.copy_(result.squeeze(0).transpose(0, 1))


def packed_causal_mask(num_tokens: int, cu_seqlens: Tensor) -> Tensor:
    """`[num_tokens, num_tokens]` bool: same sequence, and not later. Made on the device, no host sync."""
    position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, position, right=True)
    return (sequence[:, None] == sequence[None, :]) & (position[:, None] >= position[None, :])
