"""The work around library kernels: K and V into the cache, zeros into padded rows.

Both are Triton kernels with bound launches (launch.py). Strides and widths are constants of a model, so they
are constexprs. A row is then known to be aligned, and moves in wide loads and stores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from piecewise_graph.kernels.launch import Launch, Launcher

from .batch import AttentionBatch
from .call import AttentionCall

# Programs that share the padded rows of one request.
_ZERO_PARTS = 8
# A call that meets ever new batch objects may not remember something for each of them.
_MEMO_LIMIT = 64


@triton.jit
def _write_kernel(  # type: ignore[no-untyped-def]
    k, v, k_cache, v_cache, slots, mask, packed,
    K_ROW: tl.constexpr, K_HEAD: tl.constexpr, K_DIM: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, V_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    MASK_WIDTH: tl.constexpr, MASK_WORDS: tl.constexpr, WORDS_BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = (at < WIDTH) & (slot >= 0)
    head, dim = at // HEAD_DIM, at % HEAD_DIM
    new_k = tl.load(k + row * K_ROW + head * K_HEAD + dim * K_DIM, mask=there)
    new_v = tl.load(v + row * V_ROW + head * V_HEAD + dim * V_DIM, mask=there)
    tl.store(k_cache + slot * WIDTH + at, new_k, mask=there)
    tl.store(v_cache + slot * WIDTH + at, new_v, mask=there)
    if MASK_WIDTH > 0:
        word = tl.arange(0, WORDS_BLOCK)[:, None]
        bit = tl.arange(0, 32)[None, :]
        column = word * 32 + bit
        seen = tl.load(mask + row * MASK_WIDTH + column, mask=column < MASK_WIDTH, other=0)
        # Each bit is set at most once, so a sum is an or; in 64 bits, for the 32nd is the sign of an int32.
        words = tl.sum((seen != 0).to(tl.int64) << bit, axis=1)
        index = tl.arange(0, WORDS_BLOCK)
        tl.store(packed + row * MASK_WORDS + index, words.to(tl.int32), mask=index < MASK_WORDS)


@triton.jit(do_not_specialize=["requests", "rows"])
def _zero_kernel(  # type: ignore[no-untyped-def]
    out, seq_lens, qo_indptr, requests, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    first = tl.load(qo_indptr + request)
    # The program past the last request has the rows that belong to none.
    last = tl.load(qo_indptr + request + 1, mask=request < requests, other=rows)
    length = tl.load(seq_lens + request, mask=request < requests, other=0)
    if length == 0:
        at = tl.arange(0, BLOCK)
        nothing = tl.zeros([BLOCK], dtype=out.dtype.element_ty)
        row = first + tl.program_id(1)
        while row < last:
            tl.store(out + row.to(tl.int64) * WIDTH + at, nothing, mask=at < WIDTH)
            row += PARTS


_write = Launcher(_write_kernel, num_warps=4)
_zero = Launcher(_zero_kernel, num_warps=4)


def write_kv(
    batch: AttentionBatch, call: AttentionCall, mask: Tensor | None = None, packed: Tensor | None = None
) -> None:
    """Write K and V of the batch's rows to their slots; optionally pack their tree mask on the way.

    Args:
        mask: bool or uint8 `[num_tokens, width]`, contiguous.
        packed: int32 `[num_tokens, ceil(width / 32)]`, gets column c of a row as bit c % 32 of word c // 32.
    """
    tensors = batch.slot_mapping, batch.kv_cache.k[call.layer], mask, packed
    key = "write", batch.num_tokens, *(tensor.data_ptr() for tensor in tensors if tensor is not None)
    remembered(call, key, lambda: _bind_write(batch, call, mask, packed))()


def zero_padding(batch: AttentionBatch, call: AttentionCall, out: Tensor) -> None:
    """Zeros into the rows of `out` that belong to a padded request or to none.

    Args:
        out: `[num_tokens, ...]`, contiguous.
    """
    addresses = (tensor.data_ptr() for tensor in (batch.seq_lens, batch.qo_indptr, out))
    key = "zero", batch.num_requests, batch.num_tokens, *addresses
    remembered(call, key, lambda: _bind_zero(batch, call, out))()


def rows_of(call: AttentionCall, rows: int, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    """The first rows of `call.q` and `call.out`, contiguous, as `shape` (None: `[rows, heads, head_dim]`).

    Where `call.out` is not contiguous, the second is a stand-in, to be copied back with `give_back`.
    """
    if not (call.q.is_contiguous() and call.out.is_contiguous()):
        q = call.q[:rows].contiguous()
        return (q, torch.empty_like(q)) if shape is None else (q.view(shape), torch.empty_like(q).view(shape))
    shape = shape or (rows, *call.q.shape[1:])
    return remembered(call, shape, lambda: (call.q[:rows].view(shape), call.out[:rows].view(shape)))


def give_back(call: AttentionCall, rows: int, out: Tensor) -> None:
    """Make sure that `call.out` has what was computed into the second result of `rows_of`."""
    if not (call.q.is_contiguous() and call.out.is_contiguous()):
        call.out[:rows].copy_(out.view(rows, *call.out.shape[1:]))


def remembered(call: AttentionCall, key: object, make: Callable[[], Any]) -> Any:
    """What `make` returned the first time that this call came with `key`, as long as there is room."""
    found = call.memo.get(key)
    if found is None:
        if len(call.memo) >= _MEMO_LIMIT:
            call.memo.clear()
        found = call.memo[key] = make()
    return found


def _bind_write(
    batch: AttentionBatch, call: AttentionCall, mask: Tensor | None, packed: Tensor | None
) -> Launch:
    k, v, slots = call.k, call.v, batch.slot_mapping
    width = k.shape[1] * k.shape[2]
    mask_width = 0 if mask is None else mask.shape[1]
    words = -(-mask_width // 32)
    tensors = (
        k, v, batch.kv_cache.k[call.layer], batch.kv_cache.v[call.layer], slots,
        slots if mask is None else mask.view(torch.uint8), slots if packed is None else packed,
    )  # fmt: skip
    constants = (
        *k.stride(), *v.stride(), k.shape[2], width, triton.next_power_of_2(width),
        mask_width, words, triton.next_power_of_2(max(words, 1)),
    )  # fmt: skip
    return _write.bind((batch.num_tokens, 1, 1), tensors, *constants)


def _bind_zero(batch: AttentionBatch, call: AttentionCall, out: Tensor) -> Launch:
    width = call.traits.heads * call.traits.head_dim
    grid = (batch.num_requests + 1, _ZERO_PARTS, 1)
    args = (out, batch.seq_lens, batch.qo_indptr, batch.num_requests, batch.num_tokens)
    return _zero.bind(grid, args, width, triton.next_power_of_2(width), _ZERO_PARTS)
