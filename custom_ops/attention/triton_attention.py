"""Attention as one Triton launch per call, for any batch: decode, verify, draft-extend, prefill, mixed.

A launch joins three things that are fixed at different times. The variant of the kernel (`Config`) follows
from what few batches of a model differ in. `prepare` adds what belongs to one batch: grid, addresses,
workspace. What belongs to a call (its addresses, strides, scale) stays in the call's memo under the Config,
and so a new batch costs a call nothing.

The workspace belongs to a KV cache and the stream on which `prepare` ran, because calls that share it have to
run one after the other. Batches of one cache and stream do. So do graphs that were captured on one stream:
they share their memory pool, which forbids replaying them side by side anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from piecewise_graph.kernels.early_reads import may_read_early
from piecewise_graph.kernels.launch import (
    Enqueue,
    Grid,
    Launcher,
    address,
    dependent_launches,
    interpreted,
    multiprocessors,
    shared_memory,
)

from ..errors import AttentionError
from ..kv_cache import PagedKVCache
from .attention_kernels import attend_kernel
from .batch import AttentionBatch
from .call import AttentionCall, Traits
from .modes import Mode
from .tiling import TiledBatch, Tiling, tile_batch

_LOG2_E = math.log2(math.e)
# Shortest vector of requests: one warp holds it. With prompts it is longer, so that prompts alone and those
# beside a round have one variant, up to 64 requests together.
_REQUESTS, _REQUESTS_WITH_PROMPTS = 32, 64
_LARGE_TILES = 227 << 10  # bytes of shared memory of a program, on Hopper, where tiles were measured


@dataclass(frozen=True, eq=False)
class Config:
    """What selects a variant of the kernel; the same object for equal ones, found by identity.

    Attributes:
        constants: the kernel's constexprs but the last two.
        slots: dtype of the slot mapping.
    """

    launcher: Launcher
    constants: tuple[Any, ...]
    slots: torch.dtype


@dataclass(frozen=True, eq=False)
class State:
    """A batch as the kernel takes it.

    Attributes:
        args: the arguments that belong to the batch.
        layers: per layer K and V cache, as arguments.
        tensors: `args` holds the addresses of these.
        metadata: those that the kernel reads before it waits, where nothing writes them.
    """

    config: Config
    grid: Grid
    args: tuple[Any, ...]
    layers: tuple[tuple[Any, Any], ...]
    tensors: tuple[Tensor, ...]
    metadata: tuple[Tensor, ...]


_config = lru_cache(maxsize=1024)(Config)


def prepare(batch: AttentionBatch, call: AttentionCall) -> State:
    """Choose variant and grid from shapes and bounds, and find the workspace."""
    for name in ("block_table", "seq_lens", "qo_indptr", "slot_mapping"):
        _check_dense(name, getattr(batch, name))
    traits, mask, device = call.traits, batch.tree_mask, batch.seq_lens.device
    span = batch.max_seq_len
    if traits.window is not None:
        span = min(span, traits.window + (batch.max_query_len if mask is None else mask.shape[2]))
    tiled = tile_batch(
        traits, batch.num_requests, batch.num_tokens, batch.max_query_len, span, multiprocessors(device),
        large=batch.query_len is not None and shared_memory(device) >= _LARGE_TILES,
        apart=batch.kv_cache.page_pitch != batch.kv_cache.page_size,
    )  # fmt: skip
    tile = tiled.tiling.tile
    launcher = _launcher(tile.warps, tile.set_aside, dependent_launches(device))
    config = _config(launcher, _constants(batch, traits, tiled.tiling), batch.slot_mapping.dtype)
    drawn = batch.seq_lens if mask is None else mask.view(torch.uint8)
    mask_sizes = (0, 0, 0, 0) if mask is None else (*mask.stride(), mask.shape[2])
    metadata = batch.block_table, batch.seq_lens, batch.qo_indptr, batch.slot_mapping
    tensors = (*metadata, drawn, *_workspace(batch.kv_cache, tiled))
    integers = (
        batch.num_requests, batch.num_tokens, batch.block_table.stride(0), *mask_sizes, tiled.target,
        tiled.min_tiles,
    )  # fmt: skip
    args = (*map(address, tensors), *integers)
    return State(config, (traits.kv_heads, tiled.items, 1), args, _layers(batch.kv_cache), tensors, metadata)


def attend(batch: AttentionBatch, state: State, call: AttentionCall) -> None:
    """One launch: K and V of the batch's tokens into the cache, attention into `call.out`."""
    entry = call.memo.get(state.config)
    if entry is None:
        entry = call.memo[state.config] = _entry(batch, state, call)
    enqueue, args = entry
    early = int(may_read_early(state.metadata))
    enqueue(state.grid, (early,) + state.args + state.layers[call.layer] + args)


def compile_ahead(batch: AttentionBatch, state: State, call: AttentionCall) -> None:
    """Have the variant for calls like this one compiled in another thread."""
    args, constants, _ = _arguments(batch, state, call)
    state.config.launcher.ahead(args, *constants)


def _entry(batch: AttentionBatch, state: State, call: AttentionCall) -> tuple[Enqueue, tuple[Any, ...]]:
    """The variant for a call, and the call's part of the arguments."""
    args, constants, own = _arguments(batch, state, call)
    return state.config.launcher.variant(args, *constants), (*map(address, own), *constants)


def _arguments(
    batch: AttentionBatch, state: State, call: AttentionCall
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """All before the kernel's constexprs, the constexprs, and which of the former are the call's."""
    tensors = (call.q, call.k, call.v, call.out)
    for name, tensor in zip(("q", "k", "v", "out"), tensors, strict=True):
        _check_dense(name, tensor)
    # The stride of a dimension of size 1 is never used, and may be anything.
    strides = [tensor.stride(d) if tensor.shape[d] > 1 else 0 for tensor in tensors for d in (0, 1)]
    unit = 16 // call.q.element_size()
    if any(stride % unit for stride in strides):
        unit = 1
    scale, softcap = call.scale * _LOG2_E, 0.0
    if call.softcap is not None:
        scale, softcap = call.scale / call.softcap, call.softcap * _LOG2_E
    strides = [stride // unit for stride in strides]
    own: tuple[Any, ...] = (*tensors, *strides, scale, softcap, call.window or 0)
    constants = (*state.config.constants, unit, state.config.launcher.dependent)
    integers, kv_cache = state.args[len(state.tensors) :], batch.kv_cache
    cached = kv_cache.k[call.layer], kv_cache.v[call.layer]
    return (0, *state.tensors, *integers, *cached, *own), constants, own


def _constants(batch: AttentionBatch, traits: Traits, tiling: Tiling) -> tuple[Any, ...]:
    head_dim, group, power_of_2 = traits.head_dim, traits.group, triton.next_power_of_2
    shortest = _REQUESTS_WITH_PROMPTS if batch.query_len is None else _REQUESTS
    return (
        head_dim, power_of_2(head_dim), traits.kv_heads, group, power_of_2(group), batch.kv_cache.page_size,
        batch.kv_cache.page_pitch, max(power_of_2(batch.num_requests), shortest), tiling.block_m,
        tiling.tile.block_n, tiling.rows, tiling.parts, tiling.split, tiling.unmasked,
        batch.query_len is None, batch.tree_mask is not None,
        "ieee" if traits.dtype == torch.float32 else "tf32", tiling.tile.stages, traits.window is not None,
        traits.softcap is not None,
    )  # fmt: skip


@cache
def _launcher(warps: int, set_aside: int, dependent: bool) -> Launcher:
    return Launcher(attend_kernel, set_aside, num_warps=warps, launch_pdl=dependent)


def _layers(kv_cache: PagedKVCache) -> tuple[tuple[Any, Any], ...]:
    layers = kv_cache.memo.get("layers")
    if layers is None:
        layers = tuple((address(k), address(v)) for k, v in zip(kv_cache.k, kv_cache.v, strict=True))
        kv_cache.memo["layers"] = layers
    return layers


def _workspace(kv_cache: PagedKVCache, tiled: TiledBatch) -> tuple[Tensor, Tensor]:
    """Partial results and counters; see split_kernels.py, Note [Last arriver]."""
    device, stream = kv_cache.device, 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # memory of that graph alone
            partials = torch.empty(tiled.partials, dtype=torch.float32, device=device)
            return partials, torch.zeros(tiled.counters, dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device).cuda_stream
    partials = kv_cache.scratch(("partials", stream), tiled.partials, torch.float32)
    return partials, kv_cache.scratch(("counters", stream), tiled.counters, torch.int32)


def _check_dense(name: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise AttentionError.strided(name, tensor.stride(-1))


MODE = Mode(
    attend,
    prepare,
    compile_ahead,
    devices={"cuda", "cpu"} if interpreted() else {"cuda"},
    dtypes={torch.float16, torch.bfloat16, torch.float32},
    head_dims=range(16, 257, 8),
    page_sizes={2**i for i in range(12)},
    max_group=128,
    tree_mask=True,
    window=True,
    softcap=True,
    pages_apart=True,
    capturable=True,
)
