"""The op in transformers' registries: any causal LM on paged KV with `attn_implementation="piecewise"`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function

from ..errors import AttentionError
from .attention_op import attention
from .implementations import check_name
from .served_models import check_forward

# What some models pass to their attention beside q, k and v, and what it means.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
}
# model_type of those in transformers that ask its registry for a mask, but not for their attention. With our
# name they would get no mask, and attend to everything.
_SELF_ATTENDING = frozenset(
    {
        "big_bird", "bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "megatron-bert",
        "mpt", "mvp", "rembert", "roformer", "trocr", "xglm",
    }
)  # fmt: skip
# model_type of those whose layers all have `config.sliding_window` in their mask, unknown to their attention.
_WINDOW_IN_MASK = frozenset({"phimoe"})
# The code of what `and_masks` returns, whatever it joins.
_JOINED = and_masks(causal_mask_function).__code__

_ours: set[str] = set()  # names that `register_attention` put into transformers' registries


def register_attention(name: str = "piecewise", implementation: str = "auto") -> None:
    """Register the paged attention op with transformers, under `attn_implementation=name`.

    Such a model takes the tokens of all requests in one row: `input_ids` and `position_ids` of shape `[1,
    num_tokens]`, and `use_cache=False`. Always pass the last two. Without them transformers counts positions
    from 0 and keeps a cache of its own. `pg.forward_context(attention=batch)` says which request each token
    belongs to and where its K and V lie; `piecewise_graph.custom_ops.attention.make_batch` makes one.

    Args:
        name: what models will ask for.
        implementation: "torch", "triton", "flashinfer", "flash_attn", or "auto": the fastest that can serve
            a call.

    Raises:
        AttentionError: no implementation has that name.
        ImportError: transformers is not installed (`pip install piecewise-graph[transformers]`).
    """
    check_name(implementation)
    taken = {*AttentionInterface().valid_keys(), *AttentionMaskInterface().valid_keys(), "eager"} - _ours
    if "flash" in name or "|" in name or name in taken:
        raise AttentionError.reserved_name(name)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """From `[1, heads, num_tokens, head_dim]` to `[1, num_tokens, heads, head_dim]`, and no weights."""
        feature = _unsupported(module, query, key, attention_mask, kwargs)
        if feature is not None:
            raise AttentionError.unsupported_model(feature)
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        out = attention(
            q,
            k,
            v,
            layer=module.layer_idx,  # type: ignore[arg-type]
            scale=kwargs.get("scaling"),
            window=_window(module, kwargs),
            softcap=kwargs.get("softcap"),
            implementation=implementation,
        )
        return out[None], None

    _ours.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, no_mask)


def is_ours(name: str | None) -> bool:
    """Whether `attn_implementation=name` means our op."""
    return name in _ours


def no_mask(
    *args: Any,
    attention_mask: Tensor | None = None,
    mask_function: Any = causal_mask_function,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> None:
    """transformers' mask function: lengths and trees come from the forward context, not from a mask.

    Dynamo traces this, and follows no closures of functions made in the trace. So masks are told apart by
    what transformers passes with them.

    Args:
        mask_function: transformers' causal one, or that joined with a window or packed sequences by
            `and_masks`; blocks that see each other are joined by `or_masks`.
        local_size: of a window, or of a chunk.
        use_vmap: the model has joined a function of its own (`or_mask_function`, `and_mask_function`).

    Raises:
        AttentionError: the mask would say more than the batch does.
    """
    if getattr(config, "model_type", None) in _SELF_ATTENDING:
        raise AttentionError.own_attention(type(config).__name__)
    check_forward(config)
    if attention_mask is not None:
        raise AttentionError.unsupported_model("a padding mask (attention_mask); lengths are the batch's")
    # Only transformers' bidirectional masks may be skipped as such.
    if "allow_is_bidirectional_skip" in kwargs:
        raise AttentionError.unsupported_model("attention that is not causal")
    if use_vmap:
        raise AttentionError.unsupported_model("a mask of its own (or_mask_function, and_mask_function)")
    if mask_function is not causal_mask_function and mask_function.__code__ is not _JOINED:
        raise AttentionError.unsupported_model("tokens that see later ones (such as block_sequence_ids)")
    if local_size is not None and local_size != getattr(config, "sliding_window", local_size):
        raise AttentionError.unsupported_model("attention in chunks")


def _unsupported(
    module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> str | None:
    """What the model asks of its attention that the op does not do; None = nothing."""
    config = getattr(module, "config", None)
    if query.shape[0] != 1:
        return "a batch of several rows; requests stand one after another in one row, [1, num_tokens]"
    if key.shape[2] != query.shape[2]:
        return "a KV cache of its own (pass use_cache=False)"
    if attention_mask is not None:
        return "a mask of its own"
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        return "attention that is not causal"
    if getattr(module, "layer_idx", None) is None:
        return "a layer without a number (layer_idx)"
    if kwargs.get("dropout") and module.training:
        return "dropout; call model.eval()"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "attention in chunks"
    if _window(module, kwargs) is None and _is_windowed(module, config):
        return "a sliding window in its mask only, and not in the call of its attention"
    asked = (feature for name, feature in _UNSUPPORTED.items() if kwargs.get(name) is not None)
    return next(asked, None)


def _window(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """The window of a layer: what its attention is told, or of `_WINDOW_IN_MASK` the configuration's."""
    config = getattr(module, "config", None)
    if getattr(config, "model_type", None) in _WINDOW_IN_MASK:
        return config.sliding_window  # type: ignore[union-attr]
    return kwargs.get("sliding_window")


def _is_windowed(module: nn.Module, config: Any) -> bool:
    """Whether the masks give this layer a window. Asked of models that do not pass it to their attention."""
    if getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True):
        return False
    types = getattr(config, "layer_types", None)
    return types is None or types[module.layer_idx] != "full_attention"
