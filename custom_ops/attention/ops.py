"""Schema, fake and dispatch of `piecewise::attention`. Needs torch only; kernels live elsewhere.

Defined through `torch.library.Library` and not through `torch.library.custom_op`, whose Python wrapper
costs several times the dispatch of a plain op on every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import packed_causal_attention

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float scale) -> ()")
_library.impl("attention", packed_causal_attention, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::attention", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, scale: float) -> None:
    """It returns nothing, and `out` has its layout already."""


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention over the tokens of one batch, to be called from a model's forward.

    The result is allocated here, so that a captured graph allocates it and the op writes into it.

    Args:
        q: `[num_tokens, heads, head_dim]`.
        k, v: `[num_tokens, kv_heads, head_dim]`, heads a multiple of kv_heads.
        scale: factor of the scores, None = head_dim ** -0.5.

    Returns:
        `[num_tokens, heads, head_dim]`, dtype and device of `q`.

    Sequences of the batch are packed one after another; where they begin is read from the forward context:
    `pg.forward_context(cu_seqlens=...)`, int32 `[sequences + 1]`, from 0 to num_tokens. Without it, the
    batch is one sequence.
    """
    out = torch.empty_like(q)
    torch.ops.piecewise.attention(q, k, v, out, q.shape[-1] ** -0.5 if scale is None else scale)
    return out
