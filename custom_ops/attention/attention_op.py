"""Schema, fake and dispatch of `piecewise::attention`. It needs torch only; kernels live elsewhere.

The op is defined through `torch.library.Library`. The Python wrapper of `torch.library.custom_op` would cost
several times the dispatch of a plain op on every call. The steady path does not even pay that: a tape calls
what `bind` returned.

The op also writes K and V into the cache of the forward context. Its schema does not say so, because the
cache is not among its arguments. No other op of a graph touches the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.context import get_forward_context

from ..errors import AttentionError
from .batch import AttentionBatch
from .call import AttentionCall, traits_of
from .implementations import expect_call, serve
from .packed import attend_packed

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, int layer, float scale, "
    'int? window=None, float? softcap=None, str implementation="auto") -> ()'
)


def bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
    *,
    num_tokens: int | None = None,
) -> Callable[[], None]:
    """The op with its arguments fixed. Each call reads the batch of the forward context.

    Args:
        num_tokens: how many of the rows are live; None = all.
    """
    call = AttentionCall(q, k, v, out, layer, scale, window, softcap, implementation, num_tokens)

    def run() -> None:  # for each layer of each step: one function call less counts
        context = get_forward_context()
        fields = context.fields
        captured = context.full_graph or fields.get("in_graph", False)
        batch = fields.get("attention")
        if batch is not None:
            serve(batch, call, captured)
        elif (cu_seqlens := fields.get("cu_seqlens")) is not None:
            attend_packed(call, cu_seqlens, captured)
        elif (trial := fields.get("attention_trial")) is not None:  # of served_models.py
            trial.append(call)
            out.zero_()
        else:
            raise AttentionError.no_batch()

    return run


def compile_call_ahead(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> None:
    """Have compiled, in other threads, what the op will launch for the forward context's batch and others.

    The others are those given to `compile_ahead`. A call that cannot be served raises when it is made, not
    here. Nothing is compiled for calls whose heads or window vary.

    Args:
        q, k, v, out: may be fake tensors.
    """
    context = get_forward_context()
    batch, captured = context.fields.get("attention"), context.full_graph or context.fields.get("in_graph")
    if not isinstance(batch, AttentionBatch) or not q.dim() == k.dim() == 3:
        return
    fixed = (*q.shape[1:], *k.shape[1:], window or 0, softcap or 0.0)
    if all(isinstance(value, int | float) for value in fixed):
        expect_call(batch, traits_of(q, k, window, softcap, implementation), bool(captured))


def _attention(*args: Any) -> None:
    bind(*args)()


_library.impl("attention", _attention, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::attention", lib=_library)
def _(*args: Any) -> None:
    """It returns nothing, and `out` has its layout already."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Causal (or tree) attention of a batch over a paged KV cache, to be called from a model's forward.

    The result is allocated here, so that a captured graph allocates it and the op writes into it. K and V are
    written to the cache first.

    Args:
        q: `[num_tokens, heads, head_dim]`, the rows of the batch's requests one after another.
        k, v: `[num_tokens, kv_heads, head_dim]`, heads a multiple of kv_heads.
        layer: which layer of the cache.
        scale: factor of the scores, None = head_dim ** -0.5.
        window: a token sees itself and `window - 1` tokens before it; None = all.
        softcap: bound of the scores, `softcap * tanh(score / softcap)`; None = unbounded.
        implementation: "torch", "triton", "flashinfer", "flash_attn", or "auto": the fastest that can.

    Returns:
        `[num_tokens, heads, head_dim]`, dtype and device of `q`.

    The batch comes from the forward context: `pg.forward_context(attention=AttentionBatch(...))`. Instead,
    `pg.forward_context(cu_seqlens=...)`, int32 `[sequences + 1]` from 0 to num_tokens, means packed sequences
    that have no cache. A caller that captures the forward into a graph of its own adds `in_graph=True`; then
    implementations that cannot be captured are not chosen.

    Raises:
        AttentionError: neither is there, or the implementation cannot do what is asked.
    """
    out = torch.empty_like(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    torch.ops.piecewise.attention(q, k, v, out, layer, scale, window, softcap, implementation)
    return out
