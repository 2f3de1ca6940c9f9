"""The torch reference, on any device: every other implementation is compared with it.

It gathers K and V of every request up to `max_seq_len` and masks what is not there. That is simple, has fixed
shapes (so it may be captured), and takes much memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import AttentionBatch
from .call import AttentionCall
from .modes import Mode


def attend(batch: AttentionBatch, state: None, call: AttentionCall) -> None:
    """Write K and V of the batch's tokens, then attention into `call.out`."""
    rows = batch.num_tokens
    k_cache, v_cache = batch.kv_cache.k[call.layer], batch.kv_cache.v[call.layer]
    _write(k_cache, batch.slot_mapping.long(), call.k[:rows])
    _write(v_cache, batch.slot_mapping.long(), call.v[:rows])
    request, index = _owners(batch)
    lookup = _query_rows(batch)
    keys, values = (_gather(cached, batch) for cached in (k_cache, v_cache))
    result = masked_attention(
        call.q[lookup.clamp(max=rows - 1)],
        keys,
        values,
        visible(batch, call.window),
        call.scale,
        call.softcap,
    )
    live = torch.arange(rows, device=request.device) < batch.qo_indptr[-1]
    call.out[:rows] = torch.where(live[:, None, None], result[request, index], 0)


def _write(cached: Tensor, slots: Tensor, new: Tensor) -> None:
    """K or V of rows to their slots; rows of negative slots repeat the first of the others."""
    live = slots >= 0
    source = torch.where(live, torch.arange(len(slots), device=slots.device), live.int().argmax())
    slots = slots[source].clamp(min=0)
    places = slots // cached.shape[1], slots % cached.shape[1]
    cached.index_put_(places, torch.where(live.any(), new[source], cached[places]))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attention as its formula says, in float32 or better.

    Args:
        q: `[requests, rows, heads, head_dim]`.
        k, v: `[requests, tokens, kv_heads, head_dim]`.
        visible: bool `[requests, rows, tokens]`; a row that sees nothing becomes zeros.

    Returns:
        as `q`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    k, v = (x.to(wide).repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible[:, None], float("-inf"))
    # Only rows that see nothing: a NaN among what a row does see is the model's, and has to show.
    sees = visible.any(-1)[:, None, :, None]
    weights = torch.where(sees, torch.softmax(scores, -1), 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).to(q.dtype)


def _owners(batch: AttentionBatch) -> tuple[Tensor, Tensor]:
    """The request of each row, and the row's index in it; padding goes to the last request."""
    row = torch.arange(batch.num_tokens, device=batch.qo_indptr.device, dtype=torch.int32)
    request = torch.searchsorted(batch.qo_indptr, row, right=True) - 1
    request = request.clamp(max=batch.num_requests - 1)
    return request, (row - batch.qo_indptr[request]).clamp(max=batch.max_query_len - 1)


def _query_rows(batch: AttentionBatch) -> Tensor:
    """`[requests, max_query_len]`: the row of each request's i-th query; past its last, some row."""
    return batch.qo_indptr[:-1, None] + torch.arange(
        batch.max_query_len, device=batch.qo_indptr.device, dtype=torch.int32
    )


def _gather(cached: Tensor, batch: AttentionBatch) -> Tensor:
    """`[requests, max_seq_len, kv_heads, head_dim]` of one layer's K or V, zeros past `seq_lens`."""
    pages = batch.block_table[:, : -(-batch.max_seq_len // batch.kv_cache.page_size)]
    gathered = cached[pages.long()].flatten(1, 2)
    there = torch.arange(gathered.shape[1], device=cached.device) < batch.seq_lens[:, None]
    return torch.where(there[:, :, None, None], gathered, 0)


def visible(batch: AttentionBatch, window: int | None) -> Tensor:
    """bool `[requests, max_query_len, tokens]`."""
    device, page_size = batch.seq_lens.device, batch.kv_cache.page_size
    tokens = -(-batch.max_seq_len // page_size) * page_size
    token = torch.arange(min(tokens, batch.block_table.shape[1] * page_size), device=device)[None, None]
    row = torch.arange(batch.max_query_len, device=device)[None, :, None]
    lengths = batch.seq_lens[:, None, None]
    rows = (batch.qo_indptr[1:] - batch.qo_indptr[:-1])[:, None, None]
    if batch.tree_mask is None:
        position = lengths - rows + row
        seen = token <= position
    else:
        width = batch.tree_mask.shape[2]
        column = token - (lengths - width)
        in_tree = batch.tree_mask.gather(2, column.clamp(0, width - 1).expand(-1, row.shape[1], -1))
        seen = torch.where(column < 0, True, in_tree)
        position = lengths - width + batch.tree_mask.sum(2, keepdim=True) - 1
    if window is not None:
        # A tree's nodes stand at their depth. All of them are inside of the window (window_below_tree).
        recent = token > position - window
        seen &= recent if batch.tree_mask is None else recent | (column >= 0)
    return seen & (token < lengths) & (row < rows)


MODE = Mode(attend, tree_mask=True, window=True, softcap=True, pages_apart=True, capturable=True)
