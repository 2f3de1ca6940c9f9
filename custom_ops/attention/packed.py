"""Attention of packed sequences without a KV cache: the batch holds all tokens of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import AttentionError
from .call import AttentionCall
from .implementations import check_name
from .torch_attention import masked_attention


def attend_packed(call: AttentionCall, cu_seqlens: Tensor, captured: bool) -> None:
    """Write causal attention into `call.out`.

    Rows past the last sequence become zeros where they are padding. Where they are tokens of the forward, the
    lengths are wrong: that is an error on a CPU, and NaN on a GPU, where the host does not know the lengths.

    Args:
        cu_seqlens: int32 `[sequences + 1]`, from 0 to the number of rows.
        captured: as in `implementations.serve`; a call that is not bound may then have padding.

    Raises:
        AttentionError: another implementation than the reference is asked for, or other rows are covered.
    """
    check_name(call.implementation)
    if call.implementation not in ("auto", "torch"):
        reason = "packed sequences without a KV cache (cu_seqlens) are served by the reference only"
        raise AttentionError.incapable(call.implementation, reason, ("torch", "auto"))
    expected = 0 if captured and call.live is None else call.rows[1]
    if cu_seqlens.device.type == "cpu" and expected:
        starts = cu_seqlens.tolist()
        if starts[:1] != [0] or starts != sorted(starts) or starts[-1] != expected:
            raise AttentionError.wrong_lengths(starts, expected)
    rows = torch.arange(call.q.shape[0], device=cu_seqlens.device)
    # Padding may hold NaN, which a weight of 0 does not stop.
    live = ((rows >= cu_seqlens[0]) & (rows < cu_seqlens[-1]))[:, None, None]
    visible = _causal_mask(call.q.shape[0], cu_seqlens, call.window)
    q, k, v = (torch.where(live, x, 0)[None] for x in (call.q, call.k, call.v))
    result = masked_attention(q, k, v, visible[None], call.scale, call.softcap)[0]
    lost = ~live & (rows < expected)[:, None, None]
    call.out.copy_(torch.where(lost, float("nan"), torch.where(live, result, 0)))


def _causal_mask(num_tokens: int, cu_seqlens: Tensor, window: int | None = None) -> Tensor:
    """bool `[num_tokens, num_tokens]`: same sequence, not later. Made on the device, no host sync."""
    position = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, position, right=True)
    distance = position[:, None] - position[None, :]
    near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return (sequence[:, None] == sequence[None, :]) & near
