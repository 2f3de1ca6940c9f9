"""Attention of packed sequences without a KV cache: each sequence of the batch is all there is of it."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import AttentionCall


def attend_packed(call: AttentionCall, cu_seqlens: Tensor) -> None:
    """Write causal attention into `call.out`; `cu_seqlens` is int32 `[sequences + 1]`, from 0 to the rows."""
    from .torch import masked_attention

    rows = torch.arange(call.q.shape[0], device=cu_seqlens.device)
    live = (rows < cu_seqlens[-1])[:, None, None]  # padding may hold NaN, which a weight of 0 does not stop
    visible = packed_causal_mask(call.q.shape[0], cu_seqlens, call.window)
    q, k, v = (torch.where(live, x, 0)[None] for x in (call.q, call.k, call.v))
    call.out.copy_(masked_attention(q, k, v, visible[None], call.scale, call.softcap)[0])


def packed_causal_mask(num_tokens: int, cu_seqlens: Tensor, window: int | None = None) -> Tensor:
    """bool `[num_tokens, num_tokens]`: same sequence, not later. Made on the device, no host sync."""
    position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, position, right=True)
    distance = position[:, None] - position[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (sequence[:, None] == sequence[None, :]) & near
