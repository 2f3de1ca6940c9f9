"""Attention in graphs that an engine captures by itself, over its own KV cache and metadata."""

from __future__ import annotations

import torch
from torch import Tensor

from piecewise_graph.kernels.early_reads import unwritten

from .batch import AttentionBatch
from .call import AttentionCall
from .implementations import compile_call, serve


def attend_in_graph(
    batch: AttentionBatch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> None:
    """One attention call, as of `piecewise::attention`, of a graph that the caller captures.

    It may be called outside of the capture too. Keep `batch` as long as the graph: it holds the memory that
    the kernels work in. What lies in its tensors may change between replays, and only there. No request may
    have pages for old tokens that another one writes in the same batch, as a cached prefix could be.

    Args:
        q: `[rows, heads, head_dim]`, a row per slot of the batch.
        k, v: `[rows, kv_heads, head_dim]`, written to the batch's slots.
        out: as `q`; rows that belong to no request keep what they hold, or become zeros.
        layer, scale, window, softcap, implementation: as of `attention`.

    Raises:
        AttentionError: the call is not of this batch, or the implementation cannot serve it.
    """
    call = AttentionCall(q, k, v, out, layer, scale, window, softcap, implementation)
    with unwritten(batch.unwritten_in_forward()):
        serve(batch, call, captured=True)


def expect_graph_calls(
    batch: AttentionBatch,
    heads: int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> None:
    """Have compiled, in other threads, what `attend_in_graph` will launch for `batch`.

    Args:
        heads: of queries; all else as there.

    Raises:
        AttentionError: the implementation cannot serve such calls.
    """
    cache = batch.kv_cache
    q, k = (
        torch.empty(1, count, cache.head_dim, dtype=cache.dtype, device=cache.device)
        for count in (heads, cache.kv_heads)
    )
    call = AttentionCall(q, k, k, q, 0, 1.0, window, softcap, implementation)
    compile_call(call, batch, captured=True)
