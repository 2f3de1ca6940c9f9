"""Attention as one Triton launch per call, for any batch: decode, verify, draft-extend, prefill, mixed.

Note [What is fixed when]
A variant of the kernel is chosen from what few batches of a model differ in (`Config`). `prepare` adds what
belongs to one batch: grid, addresses, workspace. What belongs to a call (its addresses, strides, scale) stays
in its memo under the Config, so that a new batch costs a call nothing. A launch joins the three.

Note [Workspace]
Calls that share a workspace have to run one after the other. It belongs to a KV cache and the stream on which
`prepare` ran: batches of one cache and stream come one after the other, and graphs that were captured on one
stream share their memory pool, which forbids replaying them side by side anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from piecewise_graph.kernels.launch import Enqueue, Grid, Launcher, address, dependent_launches, interpreted

from ..errors import AttentionError
from ..kv_cache import PagedKVCache
from .attention_kernels import attend_kernel
from .batch import AttentionBatch
from .call import AttentionCall
from .implementations import Implementation, Mode
from .tiling import Plan, Problem, Tiling, plan

_LOG2_E = math.log2(math.e)
_REQUESTS = 32  # shortest vector of requests: one warp holds it


@dataclass(frozen=True, eq=False)
class Config:
    """What selects a variant of the kernel; the same object for equal ones.

    Attributes:
        constants: the kernel's constexprs but the last two.
    """

    launcher: Launcher
    constants: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class State:
    """A batch as the kernel takes it.

    Attributes:
        args: the arguments that belong to the batch.
        layers: per layer K and V cache, as arguments.
        tensors: what `args` are the addresses of.
    """

    config: Config
    grid: Grid
    args: tuple[Any, ...]
    layers: tuple[tuple[Any, Any], ...]
    tensors: tuple[Tensor, ...]


def prepare(batch: AttentionBatch, call: AttentionCall) -> State:
    """Choose variant and grid from shapes and bounds, and find the workspace."""
    _check_layout(batch)
    traits, mask = call.traits, batch.tree_mask
    chosen = plan(_problem(batch, call))
    config = _config(
        chosen.tiling, traits.heads, traits.kv_heads, traits.head_dim, traits.dtype, batch.kv_cache.page_size,
        max(triton.next_power_of_2(batch.num_requests), _REQUESTS), batch.query_len is None, mask is not None,
        traits.window is not None, traits.softcap is not None, dependent_launches(batch.seq_lens.device),
    )  # fmt: skip
    drawn = batch.seq_lens if mask is None else mask.view(torch.uint8)
    mask_sizes = (0, 0, 0, 0) if mask is None else (*mask.stride(), mask.shape[2])
    tensors = (
        batch.block_table, batch.seq_lens, batch.qo_indptr, batch.slot_mapping, drawn,
        *_workspace(batch, chosen, traits.kv_heads, triton.next_power_of_2(traits.head_dim)),
    )  # fmt: skip
    integers = (
        batch.num_requests, batch.num_tokens, batch.block_table.stride(0), *mask_sizes, chosen.target,
        chosen.min_tiles,
    )  # fmt: skip
    args = (*map(address, tensors), *integers)
    return State(config, (traits.kv_heads, chosen.items, 1), args, _layers(batch.kv_cache), tensors)


def attend(batch: AttentionBatch, state: State, call: AttentionCall) -> None:
    """One launch: K and V of the batch's tokens into the cache, attention into `call.out`."""
    entry = call.memo.get(state.config)
    if entry is None:
        entry = call.memo[state.config] = _entry(batch, state, call)
    enqueue, args = entry
    enqueue(state.grid, state.args + state.layers[call.layer] + args)


def _entry(batch: AttentionBatch, state: State, call: AttentionCall) -> tuple[Enqueue, tuple[Any, ...]]:
    """The variant for a call, and the call's part of the arguments."""
    tensors = (call.q, call.k, call.v, call.out)
    if any(tensor.stride(2) != 1 for tensor in tensors):
        what = "q, k, v or out has a stride within a head"
        raise AttentionError.bad_batch(what, "make their last dimension contiguous")
    # The stride of a dimension of size 1 is never used, and may be anything.
    strides = [tensor.stride(d) if tensor.shape[d] > 1 else 0 for tensor in tensors for d in (0, 1)]
    unit = 16 // call.q.element_size()
    if any(stride % unit for stride in strides):
        unit = 1
    scale, softcap = call.scale * _LOG2_E, 0.0
    if call.softcap is not None:
        scale, softcap = call.scale / call.softcap, call.softcap * _LOG2_E
    own: tuple[Any, ...] = (
        *tensors,
        *(stride // unit for stride in strides),
        scale,
        softcap,
        call.window or 0,
    )
    constants = (*state.config.constants, unit, state.config.launcher.dependent)
    cached = batch.kv_cache.k[call.layer], batch.kv_cache.v[call.layer]
    integers = state.args[len(state.tensors) :]
    enqueue = state.config.launcher.variant((*state.tensors, *integers, *cached, *own), *constants)
    return enqueue, (*map(address, own), *constants)


def _problem(batch: AttentionBatch, call: AttentionCall) -> Problem:
    traits, mask = call.traits, batch.tree_mask
    span = batch.max_seq_len
    if traits.window is not None:
        span = min(span, traits.window + (batch.max_query_len if mask is None else mask.shape[2]))
    return Problem(
        group=traits.heads // traits.kv_heads,
        kv_heads=traits.kv_heads,
        head_dim=traits.head_dim,
        itemsize=traits.dtype.itemsize,
        requests=batch.num_requests,
        num_tokens=batch.num_tokens,
        max_query_len=batch.max_query_len,
        span=span,
        processors=_processors(batch.seq_lens.device),
    )


@lru_cache(maxsize=1024)
def _config(
    tiling: Tiling,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    requests: int,
    ragged: bool,
    tree: bool,
    window: bool,
    softcap: bool,
    dependent: bool,
) -> Config:
    group = heads // kv_heads
    precision = "ieee" if dtype == torch.float32 else "tf32"
    constants = (
        head_dim, triton.next_power_of_2(head_dim), kv_heads, group, triton.next_power_of_2(group), page_size,
        requests, tiling.block_m, tiling.block_n, tiling.rows, tiling.parts, tiling.split, ragged, tree,
        precision, tiling.stages, window, softcap,
    )  # fmt: skip
    return Config(_launcher(tiling.warps, dependent), constants)


@cache
def _launcher(warps: int, dependent: bool) -> Launcher:
    return Launcher(attend_kernel, num_warps=warps, launch_pdl=dependent)


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


_layers_of: WeakKeyDictionary[PagedKVCache, tuple[tuple[Any, Any], ...]] = WeakKeyDictionary()
_workspaces: WeakKeyDictionary[PagedKVCache, dict[int, tuple[Tensor, Tensor]]] = WeakKeyDictionary()


def _layers(kv_cache: PagedKVCache) -> tuple[tuple[Any, Any], ...]:
    layers = _layers_of.get(kv_cache)
    if layers is None:
        layers = tuple((address(k), address(v)) for k, v in zip(kv_cache.k, kv_cache.v, strict=True))
        _layers_of[kv_cache] = layers
    return layers


def _workspace(batch: AttentionBatch, chosen: Plan, kv_heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Partial results and counters; see split_kernels.py, Note [Last arriver]."""
    tiles = chosen.items * kv_heads if chosen.tiling.split else 1
    floats = tiles * chosen.tiling.block_m * (dim + 2)
    device = batch.seq_lens.device
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing:  # memory of the graph, which nobody else may use
        return _allocate(floats, tiles, device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    known = _workspaces.setdefault(batch.kv_cache, {})
    workspace = known.get(stream)
    if workspace is None or workspace[0].numel() < floats or workspace[1].numel() < tiles:
        workspace = known[stream] = _allocate(floats, tiles, device)
    return workspace


def _allocate(floats: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(floats, dtype=torch.float32, device=device),
        torch.zeros(tiles, dtype=torch.int32, device=device),
    )


def _check_layout(batch: AttentionBatch) -> None:
    dense = {
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "qo_indptr": batch.qo_indptr,
        "slot_mapping": batch.slot_mapping,
    }
    for name, tensor in dense.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            what = f"{name} has stride {tensor.stride(-1)} in its last dimension"
            raise AttentionError.bad_batch(what, f"pass {name}.contiguous()")


_MODE = Mode(
    prepare=prepare,
    attend=attend,
    devices=frozenset({"cuda", "cpu"} if interpreted() else {"cuda"}),
    dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32}),
    head_dims=frozenset(range(16, 257, 8)),
    page_sizes=frozenset(2**i for i in range(12)),
    max_group=128,
    tree_mask=True,
    window=True,
    softcap=True,
    capturable=True,
)

IMPLEMENTATION = Implementation("triton", (_MODE,))
