"""FlashInfer's XQA kernel: batches of the same number of rows from every request (decode, verify, trees).

It reads block table and lengths on the device, so it needs no plan and may be captured.
`trtllm_batch_decode_with_kv_cache` runs the same kernel on Hopper; called directly, it does without that
function's 8 MiB of semaphores.

FlashInfer compiles it at its first use, which takes seconds to half a minute: once per dtype, head_dim, page
size, group, rows per request, and window or none. `prepare` has it done.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.xqa import get_xqa_module, xqa
from torch import Tensor

from piecewise_graph.kernels.launch import multiprocessors

from ..kv_cache import to_device
from .batch import AttentionBatch
from .call import AttentionCall
from .kv_write import give_back, rows_of, write_kv, zero_padding
from .modes import Mode

# Query heads times rows that one block of XQA's verify kernel serves.
_TILE = 32


@dataclass(frozen=True, eq=False)
class _State:
    """What all XQA calls of one batch have in common.

    Attributes:
        seq_lens: int32 `[requests, 1]`, a view.
        semaphores: int32, zero between kernels.
        scratch: uint8, partial results. A captured graph goes on using both, so they are kept alive here.
        packed: int32 `[num_tokens, words]`, bit c of a row: it sees row c of its request. None where a
            request has one row.
        mask: bool `[num_tokens, width]`, to be packed in every call; None = `packed` is causal, and done.
    """

    seq_lens: Tensor
    semaphores: Tensor
    scratch: Tensor
    packed: Tensor | None = None
    mask: Tensor | None = None


def _prepare(batch: AttentionBatch, call: AttentionCall) -> _State:
    traits, rows, cache = call.traits, batch.query_len or 1, batch.kv_cache
    dtype, windowed = traits.dtype, traits.window is not None
    get_xqa_module(dtype, dtype, cache.page_size, traits.head_dim, traits.group, windowed, dtype, rows)
    tiles = -(-rows * traits.group // _TILE)
    # Requests are split into so many parts that each multiprocessor gets one, or not at all. A part leaves
    # its maxima, its sums, and its result in 16 bits, head_dim rounded up to a power of two.
    row_bytes = 2 * max(64, 1 << (traits.head_dim - 1).bit_length()) + 8
    scratch = multiprocessors(batch.seq_lens.device) * tiles * _TILE * row_bytes + 4096
    packed, mask = (None, None) if rows == 1 else _masks(batch, rows)
    return _State(
        batch.seq_lens.unsqueeze(1),
        cache.scratch("semaphores", max(batch.num_requests * traits.kv_heads * tiles, 1024), torch.int32),
        cache.scratch("xqa", scratch, torch.uint8),
        packed,
        mask,
    )


def _masks(batch: AttentionBatch, rows: int) -> tuple[Tensor, Tensor | None]:
    """`packed` and `mask` of the state."""
    device, words = batch.seq_lens.device, -(-rows // 32)
    if batch.tree_mask is not None:
        packed = torch.empty(batch.num_tokens, words, dtype=torch.int32, device=device)
        return packed, batch.tree_mask.view(-1, rows)
    bits = [[(1 << min(max(row + 1 - 32 * word, 0), 32)) - 1 for word in range(words)] for row in range(rows)]
    causal = torch.tensor(bits, dtype=torch.int64).to(torch.int32)  # wraps where the 32nd bit is the sign
    return to_device(causal, device).repeat(batch.num_requests, 1), None


def _attend(batch: AttentionBatch, state: _State, call: AttentionCall) -> None:
    traits, rows, layer = call.traits, batch.query_len or 1, call.layer
    write_kv(batch, call, state.mask, None if state.mask is None else state.packed)
    beam = (1,) if rows == 1 else (1, rows)
    q, out = rows_of(call, batch.num_tokens, (batch.num_requests, *beam, traits.heads, traits.head_dim))
    xqa(
        q,
        batch.kv_cache.k[layer],
        batch.kv_cache.v[layer],
        batch.block_table,
        state.seq_lens,
        out,
        state.scratch,
        state.semaphores,
        traits.kv_heads,
        batch.kv_cache.page_size,
        q_scale=call.scale * traits.head_dim**0.5,  # the kernel divides by the root
        sliding_win_size=traits.window or 0,
        sm_count=multiprocessors(q.device),
        enable_pdl=False,
        q_seq_len=rows,
        mask=state.packed,
    )
    # Where a request has no tokens, the kernel has divided by the sum of no weights.
    zero_padding(batch, call, out)
    give_back(call, batch.num_tokens, out)


def _limits(call: AttentionCall, batch: AttentionBatch) -> str | None:
    mask = batch.tree_mask
    if mask is not None and (mask.shape[2] != batch.max_query_len or not mask.is_contiguous()):
        return "XQA takes a contiguous tree mask that is as wide as a request has rows"
    if call.window is not None and batch.max_query_len > 1:
        return "XQA has a sliding window for requests of one row only"
    if not batch.block_table.is_contiguous():
        return "XQA takes a contiguous block table"
    return None


MODE = Mode(
    _attend,
    _prepare,
    devices={"cuda"},
    capabilities={9, 10, 12},
    dtypes={torch.float16, torch.bfloat16},
    head_dims={64, 80, 96, 128},
    page_sizes={16, 32, 64, 128},
    max_group=16,
    max_query_len=64,
    tree_mask=True,
    window=True,
    uniform=True,
    capturable=True,
    limits=_limits,
)
