"""Implementations by name: what each can do, and which one serves a call."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import AttentionError
from .batch import AttentionBatch
from .call import AttentionCall

NAMES = ("triton", "flash_attn", "flashinfer", "torch")
_MODULES = {
    "triton": ".triton_attention",
    "flash_attn": ".flash_attention",
    "flashinfer": ".flashinfer_attention",
    "torch": ".torch_attention",
}
# Rows of one request from which on flash-attn's tiles pay (benchmarks/results/bench_attention.json: prefill
# of 512 rows 16 us against 18 of ours, of 4096 rows 258 against 413; decode and verify are ours).
_MANY_ROWS = 256


@dataclass(frozen=True)
class Mode:
    """One way in which an implementation serves batches.

    Attributes:
        devices, dtypes: what it runs on; None = any.
        head_dims, page_sizes: those it has kernels for; None = any.
        max_group: most query heads per KV head; None = any.
        tree_mask, window, softcap: it can do these.
        uniform: it needs the same number of rows from every request.
        max_query_len: most rows of one request; None = any.
        capturable: all of `attend` runs on the device and may be part of a graph.
        host_lengths: `prepare` needs the lengths on the host.
        limits: `(call, batch) -> reason or None`, whatever else it cannot do.
        prepare: `(batch, call) -> state`, once per batch, outside of graphs.
        attend: `(batch, state, call)`, writes `call.out`, and K and V into the cache.
    """

    prepare: Callable[[AttentionBatch, AttentionCall], Any]
    attend: Callable[[AttentionBatch, Any, AttentionCall], None]
    devices: frozenset[str] | None = None
    dtypes: frozenset[torch.dtype] | None = None
    head_dims: frozenset[int] | None = None
    page_sizes: frozenset[int] | None = None
    max_group: int | None = None
    max_query_len: int | None = None
    tree_mask: bool = False
    window: bool = False
    softcap: bool = False
    uniform: bool = False
    capturable: bool = False
    host_lengths: bool = False
    limits: Callable[[AttentionCall, AttentionBatch], str | None] | None = None

    def lacks(self, call: AttentionCall, batch: AttentionBatch, captured: bool) -> str | None:
        """What the call asks for and this mode cannot do; None when it can."""
        return next(self._lacking(call, batch, captured), None)

    def _lacking(self, call: AttentionCall, batch: AttentionBatch, captured: bool) -> Iterator[str]:
        traits, page_size = call.traits, batch.kv_cache.page_size
        if self.devices is not None and traits.device not in self.devices:
            yield f"it does not run on device type {traits.device!r}"
        if self.dtypes is not None and traits.dtype not in self.dtypes:
            yield f"it has no kernels for {traits.dtype}"
        if self.head_dims is not None and traits.head_dim not in self.head_dims:
            yield f"it has no kernels for head_dim {traits.head_dim}"
        if self.page_sizes is not None and page_size not in self.page_sizes:
            yield f"it does not read pages of {page_size} tokens"
        if self.max_group is not None and traits.heads // traits.kv_heads > self.max_group:
            yield f"it serves at most {self.max_group} query heads per KV head"
        if batch.tree_mask is not None and not self.tree_mask:
            yield "it has no tree mask"
        if traits.window is not None and not self.window:
            yield "it has no sliding window"
        if traits.softcap is not None and not self.softcap:
            yield "it has no soft cap"
        if self.uniform and batch.query_len is None:
            yield "it needs the same number of rows from every request (query_len)"
        if self.max_query_len is not None and batch.max_query_len > self.max_query_len:
            yield f"it serves at most {self.max_query_len} rows per request"
        if captured and not self.capturable:
            yield "it cannot be part of a full graph"
        if self.host_lengths and (batch.host_seq_lens is None or batch.host_query_lens is None):
            yield "it plans on the host and the batch has no host_query_lens and host_seq_lens"
        limit = None if self.limits is None else self.limits(call, batch)
        if limit is not None:
            yield limit


@dataclass(frozen=True)
class Implementation:
    """A name and its modes, the preferred one first.

    Attributes:
        missing: why it cannot be used on this machine, or None.
    """

    name: str
    modes: tuple[Mode, ...]
    missing: str | None = None


def choose(call: AttentionCall, batch: AttentionBatch, captured: bool) -> Mode:
    """The mode that serves `call`.

    Raises:
        AttentionError: the implementation asked for is unknown, missing or incapable; it names one that can.
    """
    _check_call(call, batch)
    name = call.implementation
    if name != "auto" and name not in NAMES:
        raise AttentionError.unknown(name, ("auto", *NAMES))
    # One after another: an implementation that is not needed is not imported either.
    for candidate in fastest_first(batch) if name == "auto" else (name,):
        for mode in load(candidate).modes:
            if mode.lacks(call, batch, captured) is None:
                return mode
    implementation = load("torch" if name == "auto" else name)
    able = able_implementations(call, batch, captured)
    if implementation.missing is not None:
        raise AttentionError.not_installed(name, implementation.missing, able)
    raise AttentionError.incapable(name, _fault(implementation, call, batch, captured) or "", able)


def fastest_first(batch: AttentionBatch) -> tuple[str, ...]:
    """Every name, in the order in which `auto` tries them for this kind of batch."""
    return ("flash_attn", "triton", "flashinfer", "torch") if batch.max_query_len >= _MANY_ROWS else NAMES


def able_implementations(call: AttentionCall, batch: AttentionBatch, captured: bool) -> tuple[str, ...]:
    """Names of the implementations that can serve `call` here, fastest first."""
    return tuple(
        name
        for name in fastest_first(batch)
        if load(name).missing is None
        and any(mode.lacks(call, batch, captured) is None for mode in load(name).modes)
    )


@cache
def load(name: str) -> Implementation:
    """Import an implementation; a package that is not installed is a reason, not an error."""
    try:
        module = importlib.import_module(_MODULES[name], __package__)
    except ImportError as error:
        return Implementation(name, (), f"{error}")
    return module.IMPLEMENTATION


def _fault(
    implementation: Implementation, call: AttentionCall, batch: AttentionBatch, captured: bool
) -> str | None:
    """What the mode that comes nearest lacks."""
    faults = [list(mode._lacking(call, batch, captured)) for mode in implementation.modes]
    fewest = sorted(faults, key=lambda lacks: (len(lacks), lacks))
    return "; ".join(fewest[0]) if fewest else None


def _check_call(call: AttentionCall, batch: AttentionBatch) -> None:
    cache = batch.kv_cache
    if (call.traits.kv_heads, call.traits.head_dim) != (cache.kv_heads, cache.head_dim):
        found = f"{call.traits.kv_heads} KV heads of {call.traits.head_dim}"
        what = f"the model has {found}, its KV cache {cache.kv_heads} of {cache.head_dim}"
        raise AttentionError.bad_batch(what, "build the cache with PagedKVCache.for_model(model.config, ...)")
    if call.k.dtype != cache.dtype:
        what = f"the model computes {call.k.dtype}, its KV cache holds {cache.dtype}"
        raise AttentionError.bad_batch(what, f"build the cache with dtype={call.k.dtype}")
    window, mask = call.window, batch.tree_mask
    if mask is not None and window is not None and window < mask.shape[2]:
        what = f"a sliding window of {window} tokens and a tree mask of {mask.shape[2]}"
        raise AttentionError.bad_batch(what, "keep draft trees smaller than the window")
