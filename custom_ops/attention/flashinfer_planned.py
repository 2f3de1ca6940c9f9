"""FlashInfer's planned wrappers: ragged batches, and any page size.

They cut the work into pieces on the host. So they want the lengths there, once per batch, and cannot be
captured. `prepare` reads what they need from a batch (block table, tree mask); a batch that changes is a new
`AttentionBatch`.

FlashInfer compiles them at their first use, which takes seconds to half a minute: once per dtype, head_dim,
window (or none) and soft cap (or none). `prepare` has it done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

from ..kv_cache import to_device
from .batch import AttentionBatch
from .call import AttentionCall
from .kv_write import give_back, rows_of, write_kv
from .modes import Mode
from .torch_attention import visible

# FlashInfer recommends this many bytes for the partial results of requests that it splits.
_WORKSPACE = 128 << 20


@dataclass(eq=False)
class _Wrapper:
    """One of FlashInfer's wrappers, and which batch its plan is for.

    Attributes:
        planned: each plan overwrites the one before.
        copied: when the plan's pinned memory has been read, and may be written again.
    """

    wrapper: Any
    planned: _PlannedBatch | None = None
    copied: torch.cuda.Event = field(default_factory=torch.cuda.Event)


@dataclass(frozen=True, eq=False)
class _PlannedBatch:
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
        shared.copied.synchronize()
        shared.wrapper.plan(**self.arguments)
        shared.copied.record()
        shared.planned = self


def _prepare(batch: AttentionBatch, call: AttentionCall) -> _PlannedBatch:
    rows, totals = batch.host_query_lens or (), batch.host_seq_lens or ()
    decode = batch.tree_mask is None and all(count == 1 for count in rows)
    wrapper = _wrapper(batch, call, decode)
    if not any(totals):
        return _PlannedBatch(wrapper, {}, 0, ((0, batch.num_tokens),))
    starts = [0, *accumulate(rows)]
    ends = [*starts[1:], batch.num_tokens]
    padding = [(a, b) for a, b, total in zip(starts, ends, (*totals, 0), strict=True) if total == 0 and a < b]
    # A padded request's rows look at the null page: as many tokens as rows, for no row may be before the
    # first.
    lengths = [total or count for total, count in zip(totals, rows, strict=True)]
    arguments = _page_lists(batch, lengths, decode) | _common_arguments(batch, call)
    if not decode:
        qo_indptr = torch.tensor(starts, dtype=torch.int32)
        arguments |= {"qo_indptr": qo_indptr, "causal": True}
        arguments["head_dim_qk"] = arguments.pop("head_dim")
        if batch.tree_mask is not None:
            arguments |= _tree_arguments(batch, call, lengths, arguments)
    planned = _PlannedBatch(wrapper, arguments, starts[-1], tuple(padding))
    planned.ensure()
    return planned


def _wrapper(batch: AttentionBatch, call: AttentionCall, decode: bool) -> _Wrapper:
    """The wrapper of all such calls over this cache: the stream orders its uses, as it orders the writes."""
    floats = batch.kv_cache.scratch("flashinfer", _WORKSPACE, torch.uint8)
    key = "wrapper", call.traits, decode
    found = batch.kv_cache.memo.get(key)
    if found is None:
        kind = BatchDecodeWithPagedKVCacheWrapper if decode else BatchPrefillWithPagedKVCacheWrapper
        # With tensor cores decode and prefill are one kernel, compiled once, for every group.
        options = {"use_tensor_cores": True} if decode else {}
        found = batch.kv_cache.memo[key] = _Wrapper(kind(floats, backend="fa2", **options))
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
    """The pages of every request one after another (on the device), and which request owns them (host)."""
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
    """One flat mask, window included: a node's position is its depth, which the wrapper cannot know."""
    seen = visible(batch, call.window)
    rows = batch.host_query_lens or ()
    parts = [seen[i, : rows[i], :length].reshape(-1) for i, length in enumerate(lengths)]
    on_device = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
    moved = {name: arguments[name].to(seen.device) for name in on_device}
    return {"custom_mask": torch.cat(parts), "causal": False, "window_left": -1, **moved}


def _attend(batch: AttentionBatch, planned: _PlannedBatch, call: AttentionCall) -> None:
    write_kv(batch, call)
    planned.ensure()
    if planned.rows:
        q, out = rows_of(call, planned.rows)
        cache = (batch.kv_cache.k[call.layer], batch.kv_cache.v[call.layer])
        planned.wrapper.wrapper.run(q, cache, out=out, q_scale=call.scale, enable_pdl=False)
        give_back(call, planned.rows, out)
    for first, last in planned.padding:
        call.out[first:last].zero_()


MODE = Mode(
    _attend,
    _prepare,
    devices={"cuda"},
    capabilities=range(8, 100),
    dtypes={torch.float16, torch.bfloat16},
    head_dims={64, 128},
    tree_mask=True,
    window=True,
    softcap=True,
    host_lengths=True,
)
