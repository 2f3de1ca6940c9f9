"""FlashInfer: its XQA kernel, which needs no plan, and its planned wrappers for the rest.

Note [Two modes]
`xqa` reads block table and lengths on the device and may be captured; every request has the same number of
rows (decode, verify, trees). It is what `trtllm_batch_decode_with_kv_cache` runs on Hopper, called without
that function's 8 MiB of semaphores. The wrappers take ragged batches and any page size, but cut the work
into pieces on the host: they want the lengths there, once per batch, and cannot be captured. What they read
from a batch (block table, tree mask) they read in `prepare`: a batch that changes is a new `AttentionBatch`.

FlashInfer compiles both at their first use, seconds to half a minute, once per dtype, head_dim, and window
or soft cap or not; XQA also per page size, group and rows per request. `prepare` has it done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kv_cache import PagedKVCache, to_device
from .batch import AttentionBatch
from .call import AttentionCall, Traits
from .implementations import Implementation, Mode
from .torch_attention import visible

try:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    from flashinfer.xqa import get_xqa_module, xqa

    from .kv_write import give_back, rows_of, write_kv, zero_padding
except ImportError:
    raise
except Exception as error:  # an installation that does not fit this machine
    raise ImportError(f"flashinfer does not load: {error}") from error

# FlashInfer recommends this much for the partial results of requests that it splits.
_FLOAT_WORKSPACE = 128 << 20
# Query heads times rows that one block of XQA's verify kernel serves.
_XQA_TILE = 32


@dataclass
class _Workspace:
    """Scratch memory of all attention over one cache; the stream orders its uses, as it orders the writes.

    Attributes:
        semaphores: int32, zero between kernels.
        scratch: uint8, XQA's partial results.
        floats: uint8, the wrappers'.
        wrappers: one per kind of call; each plan overwrites the one before.
    """

    semaphores: Tensor | None = None
    scratch: Tensor | None = None
    floats: Tensor | None = None
    wrappers: dict[tuple[Traits, bool], _Wrapper] = field(default_factory=dict)


_workspaces: WeakKeyDictionary[PagedKVCache, _Workspace] = WeakKeyDictionary()


def _workspace(batch: AttentionBatch) -> _Workspace:
    return _workspaces.setdefault(batch.kv_cache, _Workspace())


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# --- XQA: uniform batches, no plan ---


@dataclass(frozen=True, eq=False)
class _Xqa:
    """What all XQA calls of one batch have in common.

    Attributes:
        seq_lens: int32 `[requests, 1]`, a view.
        semaphores, scratch: kept alive here, because a captured graph goes on using them.
        packed: int32 `[num_tokens, words]`, bit c of a row: it sees row c of its request. None where a
            request has one row.
        mask: bool `[num_tokens, width]`, to be packed in every call; None = `packed` is causal, and done.
    """

    seq_lens: Tensor
    semaphores: Tensor
    scratch: Tensor
    packed: Tensor | None = None
    mask: Tensor | None = None


def _prepare_xqa(batch: AttentionBatch, call: AttentionCall) -> _Xqa:
    traits, rows, device = call.traits, batch.query_len or 1, batch.seq_lens.device
    group = traits.heads // traits.kv_heads
    dtype, windowed = traits.dtype, traits.window is not None
    get_xqa_module(dtype, dtype, batch.kv_cache.page_size, traits.head_dim, group, windowed, dtype, rows)
    work = _workspace(batch)
    tiles = -(-rows * group // _XQA_TILE)
    semaphores = batch.num_requests * traits.kv_heads * tiles
    if work.semaphores is None or work.semaphores.numel() < semaphores:
        work.semaphores = torch.zeros(max(semaphores, 1024), dtype=torch.int32, device=device)
    # Requests are split into so many parts that each multiprocessor gets one, or not at all. A part leaves
    # its maxima, its sums, and its result in 16 bits, head_dim rounded up to a power of two.
    row_bytes = 2 * max(64, 1 << (traits.head_dim - 1).bit_length()) + 8
    scratch = _multiprocessors(device) * tiles * _XQA_TILE * row_bytes + 4096
    if work.scratch is None or work.scratch.numel() < scratch:
        work.scratch = torch.empty(scratch, dtype=torch.uint8, device=device)
    packed, mask = (None, None) if rows == 1 else _xqa_mask(batch, rows)
    return _Xqa(batch.seq_lens.unsqueeze(1), work.semaphores, work.scratch, packed, mask)


def _xqa_mask(batch: AttentionBatch, rows: int) -> tuple[Tensor, Tensor | None]:
    device, words = batch.seq_lens.device, -(-rows // 32)
    if batch.tree_mask is not None:
        packed = torch.empty(batch.num_tokens, words, dtype=torch.int32, device=device)
        return packed, batch.tree_mask.view(-1, rows)
    bits = [[(1 << min(max(row + 1 - 32 * word, 0), 32)) - 1 for word in range(words)] for row in range(rows)]
    causal = torch.tensor(bits, dtype=torch.int64).to(torch.int32)  # wraps where the 32nd bit is the sign
    return to_device(causal, device).repeat(batch.num_requests, 1), None


def _attend_xqa(batch: AttentionBatch, state: _Xqa, call: AttentionCall) -> None:
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
        sm_count=_multiprocessors(q.device),
        enable_pdl=False,
        q_seq_len=rows,
        mask=state.packed,
    )
    # Where a request has no tokens, the kernel has divided by the sum of no weights.
    zero_padding(batch, call, out)
    give_back(call, batch.num_tokens, out)


def _xqa_limits(call: AttentionCall, batch: AttentionBatch) -> str | None:
    if call.q.is_cuda and _capability(call.q.device) not in (9, 10, 12):
        return "XQA runs on compute capability 9, 10 and 12"
    mask = batch.tree_mask
    if mask is not None and (mask.shape[2] != batch.max_query_len or not mask.is_contiguous()):
        return "XQA takes a contiguous tree mask that is as wide as a request has rows"
    if call.window is not None and batch.max_query_len > 1:
        return "XQA has a sliding window for requests of one row only"
    if not batch.block_table.is_contiguous():
        return "XQA takes a contiguous block table"
    return None


# --- Planned wrappers: ragged batches, any page size ---


@dataclass(eq=False)
class _Wrapper:
    """One of FlashInfer's wrappers, and which plan it has.

    Attributes:
        copied: when the plan's pinned memory has been read, and may be written again.
    """

    wrapper: Any
    planned: _Plan | None = None
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, eq=False)
class _Plan:
    """A batch as the wrapper wants it.

    Attributes:
        arguments: of the wrapper's `plan`.
        rows: of all requests; 0 = there is nothing to compute.
        padding: first and past-the-last row of what has to become zeros.
    """

    wrapper: _Wrapper
    arguments: dict[str, Any]
    rows: int
    padding: tuple[tuple[int, int], ...]

    def ensure(self) -> None:
        """Plan, unless the wrapper's last plan is this one: batches may take turns."""
        shared = self.wrapper
        if shared.planned is self or not self.rows:
            return
        if shared.copied is None:
            shared.copied = torch.cuda.Event()
        shared.copied.synchronize()
        shared.wrapper.plan(**self.arguments)
        shared.copied.record()
        shared.planned = self


def _prepare_planned(batch: AttentionBatch, call: AttentionCall) -> _Plan:
    rows, totals = batch.host_query_lens or (), batch.host_seq_lens or ()
    decode = batch.tree_mask is None and all(count == 1 for count in rows)
    starts = [0]
    for count in rows:
        starts.append(starts[-1] + count)
    padding = [(starts[i], starts[i + 1]) for i, total in enumerate(totals) if total == 0 and rows[i]]
    padding.append((starts[-1], batch.num_tokens))
    if not any(totals):
        return _Plan(_wrapper(batch, call, decode), {}, 0, ((0, batch.num_tokens),))
    # A padded request's rows look at the sink: as many tokens as rows, for no row may be before the first.
    lengths = [total or count for total, count in zip(totals, rows, strict=True)]
    arguments = _page_lists(batch, lengths, decode) | _common_arguments(batch, call)
    if not decode:
        qo_indptr = torch.tensor(starts, dtype=torch.int32)
        arguments |= {"qo_indptr": qo_indptr, "causal": True}
        arguments["head_dim_qk"] = arguments.pop("head_dim")
        if batch.tree_mask is not None:
            arguments |= _tree_arguments(batch, call, lengths, arguments)
    plan = _Plan(
        _wrapper(batch, call, decode), arguments, starts[-1], tuple(pad for pad in padding if pad[0] < pad[1])
    )
    plan.ensure()
    return plan


def _wrapper(batch: AttentionBatch, call: AttentionCall, decode: bool) -> _Wrapper:
    work = _workspace(batch)
    if work.floats is None:
        work.floats = torch.zeros(_FLOAT_WORKSPACE, dtype=torch.uint8, device=batch.seq_lens.device)
    found = work.wrappers.get((call.traits, decode))
    if found is None:
        if decode:
            # With tensor cores decode and prefill are one kernel, compiled once, for every group.
            made = BatchDecodeWithPagedKVCacheWrapper(work.floats, use_tensor_cores=True, backend="fa2")
        else:
            made = BatchPrefillWithPagedKVCacheWrapper(work.floats, backend="fa2")
        found = work.wrappers[call.traits, decode] = _Wrapper(made)
    return found


def _common_arguments(batch: AttentionBatch, call: AttentionCall) -> dict[str, Any]:
    traits = call.traits
    return {
        "num_qo_heads": traits.heads,
        "num_kv_heads": traits.kv_heads,
        "head_dim": traits.head_dim,
        "page_size": batch.kv_cache.page_size,
        "window_left": -1 if traits.window is None else traits.window - 1,
        "logits_soft_cap": traits.softcap,
        "q_data_type": traits.dtype,
        "sm_scale": 1.0,  # the call's own comes with `run`
    }


def _page_lists(batch: AttentionBatch, lengths: Sequence[int], decode: bool) -> dict[str, Any]:
    """The pages of every request one after another (on the device), and what says whose they are (host)."""
    page_size, width = batch.kv_cache.page_size, batch.block_table.shape[1]
    kv = torch.tensor(lengths, dtype=torch.int32)
    pages = (kv + page_size - 1) // page_size
    indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    indptr[1:] = pages.cumsum(0)
    request = torch.repeat_interleave(torch.arange(len(lengths)), pages)
    column = torch.arange(len(request)) - indptr[request]
    index = to_device(request * width + column.clamp(max=width - 1), batch.block_table.device)
    prefix = "" if decode else "paged_kv_"
    return {
        f"{prefix}indptr": indptr,
        f"{prefix}indices": batch.block_table.reshape(-1)[index],
        f"{prefix}last_page_len": torch.where(kv > 0, (kv - 1) % page_size + 1, 0),
    }


def _tree_arguments(
    batch: AttentionBatch, call: AttentionCall, lengths: Sequence[int], arguments: dict[str, Any]
) -> dict[str, Any]:
    """One flat mask, window included: a node's place is its depth, of which the wrapper knows nothing."""
    seen = visible(batch, call.window)
    rows = batch.host_query_lens or ()
    parts = [seen[i, : rows[i], :length].reshape(-1) for i, length in enumerate(lengths)]
    on_device = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
    moved = {name: arguments[name].to(seen.device) for name in on_device}
    return {"custom_mask": torch.cat(parts), "causal": False, "window_left": -1, **moved}


def _attend_planned(batch: AttentionBatch, plan: _Plan, call: AttentionCall) -> None:
    write_kv(batch, call)
    plan.ensure()
    if plan.rows:
        q, out = rows_of(call, plan.rows)
        cache = (batch.kv_cache.k[call.layer], batch.kv_cache.v[call.layer])
        plan.wrapper.wrapper.run(q, cache, out=out, q_scale=call.scale, enable_pdl=False)
        give_back(call, plan.rows, out)
    for first, last in plan.padding:
        call.out[first:last].zero_()


def _planned_limits(call: AttentionCall, batch: AttentionBatch) -> str | None:
    if call.q.is_cuda and _capability(call.q.device) < 8:
        return "it needs compute capability 8 or newer"
    return None


_DTYPES = frozenset({torch.float16, torch.bfloat16})

IMPLEMENTATION = Implementation(
    "flashinfer",
    (
        Mode(
            prepare=_prepare_xqa,
            attend=_attend_xqa,
            devices=frozenset({"cuda"}),
            dtypes=_DTYPES,
            head_dims=frozenset({64, 80, 96, 128}),
            page_sizes=frozenset({16, 32, 64, 128}),
            max_group=16,
            max_query_len=64,
            tree_mask=True,
            window=True,
            uniform=True,
            capturable=True,
            limits=_xqa_limits,
        ),
        Mode(
            prepare=_prepare_planned,
            attend=_attend_planned,
            devices=frozenset({"cuda"}),
            dtypes=_DTYPES,
            head_dims=frozenset({64, 128}),
            tree_mask=True,
            window=True,
            softcap=True,
            host_lengths=True,
            limits=_planned_limits,
        ),
    ),
)
