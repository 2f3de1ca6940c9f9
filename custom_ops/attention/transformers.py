"""The op in transformers' registries: any causal LM on paged KV with `attn_implementation="piecewise"`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ..errors import AttentionError
from .implementations import NAMES
from .ops import attention

# What some models pass to their attention beside q, k and v, and what it means.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
}


def register(name: str, implementation: str) -> None:
    """Make `attn_implementation=name` mean `piecewise::attention` with `implementation`."""
    if implementation not in ("auto", *NAMES):
        raise AttentionError.unknown(implementation, ("auto", *NAMES))
    if "flash" in name or "|" in name:
        raise AttentionError.reserved_name(name)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        return paged_attention(
            module, query, key, value, attention_mask, dropout, scaling, implementation, **kwargs
        )

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, no_mask)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    implementation: str,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function over the paged cache.

    Args:
        query: `[1, heads, num_tokens, head_dim]`, all requests of the batch in one row.
        key, value: `[1, kv_heads, num_tokens, head_dim]`.

    Returns:
        `[1, num_tokens, heads, head_dim]`, and None for the weights.

    Raises:
        AttentionError: the model wants something that the op does not do.
    """
    fault = _fault(module, query, attention_mask, dropout, kwargs)
    if fault is not None:
        raise AttentionError.unsupported_model(fault)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = attention(
        q,
        k,
        v,
        layer=module.layer_idx,  # type: ignore[arg-type]
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        implementation=implementation,
    )
    return out[None], None


def no_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> None:
    """transformers' mask function: lengths and trees come from the forward context, not from a mask."""
    if attention_mask is not None:
        raise AttentionError.unsupported_model("a padding mask (attention_mask); lengths are the batch's")


def _fault(
    module: nn.Module, query: Tensor, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    if query.shape[0] != 1:
        return "a batch of several rows; requests stand one after another in one row, [1, num_tokens]"
    if attention_mask is not None:
        return "a mask of its own"
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        return "attention that is not causal"
    if getattr(module, "layer_idx", None) is None:
        return "a layer without a number (layer_idx)"
    if dropout and module.training:
        return "dropout; call model.eval()"
    config = getattr(module, "config", None)
    if getattr(config, "attention_chunk_size", None) is not None:
        return "attention in chunks"
    asked = (what for name, what in _UNSUPPORTED.items() if kwargs.get(name) is not None)
    return next(asked, None)
