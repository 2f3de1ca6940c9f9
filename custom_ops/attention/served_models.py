"""Which models of transformers our attention serves: those in which tokens meet in its calls alone.

Note [What a trial shows]
One eager forward over three tokens, in which the op computes nothing and lists its calls. The embedding of
the token in the middle is NaN, and NaN passes through whatever is computed of it. So another token whose
logits are NaN has met this one outside of the op: in a convolution, a recurrence, or an attention of the
model's own. That is not tried where weights are quantised: a scale that all rows share would be NaN for all.
What a configuration does not tell of such a model, or of a tensor-parallel one, is not found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from piecewise_graph.context import forward_context, get_forward_context

from ..errors import AttentionError
from ..kv_cache import kv_sizes
from ..rope_limit import rope_limit
from .batch import AttentionBatch
from .call import AttentionCall

# What configurations call the kinds of their layers, and the kinds that attend and do nothing else. A window
# is a part of the call; chunks are refused where the mask is made.
_KINDS = ("layer_types", "layers_block_type", "block_types")
_SERVED = ("attention", "chunked_attention", "full_attention", "sliding_attention")
# model_type of those in transformers that call attention more than once per layer.
_REPEATING = frozenset({"diffllama", "hrm_text"})
_Result = TypeVar("_Result")
_PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def check_layers(config: Any) -> None:
    """Refuse layers that do something else than attend, once. Dynamo traces this.

    Raises:
        AttentionError: there are such layers.
    """
    for name in _KINDS:
        kinds = getattr(config, name, None)
        for kind in kinds if isinstance(kinds, (list, tuple)) else ():
            if kind not in _SERVED:
                raise AttentionError.other_layers(type(config).__name__, kind)
    if getattr(config, "model_type", None) in _REPEATING:
        raise AttentionError.attends_again(type(config).__name__)


def check_forward(config: Any) -> None:
    """Refuse, where a forward begins, what shows there. Dynamo traces this.

    Raises:
        AttentionError: the model, or the batch of the forward context, cannot be served.
    """
    check_layers(config)
    batch = None if torch.compiler.is_compiling() else get_forward_context().get("attention")
    if isinstance(batch, AttentionBatch):
        check_positions(rope_limit(config), max(batch.host_seq_lens or (), default=0))


def check_positions(limit: int | None, tokens: int) -> None:
    """Refuse a request that changes the RoPE of others.

    Args:
        limit: of `rope_limit`.

    Raises:
        AttentionError: it does.
    """
    if limit is not None and tokens > limit:
        raise AttentionError.rope_of_the_longest(tokens, limit)


def check_kind(model: Any) -> None:
    """Refuse what is no model of transformers, or what a compiler made of one.

    Attributes of the latter are the model's own: parts put into a copy of it would replace the model's.

    Raises:
        AttentionError: it is something else.
    """
    parts = ("config", "device", "get_decoder", "get_input_embeddings", "get_output_embeddings")
    is_compiled = not isinstance(model, nn.Module) or hasattr(model, "_orig_mod")  # of torch.compile
    if is_compiled or not all(hasattr(model, part) for part in parts):
        raise AttentionError.no_causal_lm(type(model).__name__)


def check_model(model: Any) -> None:
    """Refuse a causal LM in which tokens meet outside of our attention, or more often than once per layer.

    Refuse also a model whose keys have other heads than its configuration says: caches are made by that.

    It runs one or two eager forwards over three tokens, see Note [What a trial shows]. A tensor-parallel
    model is not run: see `is_sharded`.

    Raises:
        AttentionError: it is such a model.
        CacheError: the configuration names no sizes of heads.
    """
    name = type(model).__name__
    check_layers(model.config.get_text_config())
    if getattr(model, "_is_stateful", False):
        raise AttentionError.mixes_tokens(name)
    if is_sharded(model):
        return
    calls, rows = _trial(model, spoil=_is_plain(model))
    if not calls:
        raise AttentionError.own_attention(name)
    layers = [call.layer for call in calls]
    repeated = [layer for layer in layers if layers.count(layer) > 1]
    if repeated:
        raise AttentionError.attends_again(f"layer {repeated[0]} of {name}")
    if _has_nan(rows) and not _has_nan(_trial(model, spoil=False)[1]):
        raise AttentionError.mixes_tokens(name)
    sizes = kv_sizes(model.config.get_text_config())
    for call in calls:
        if tuple(call.k.shape[1:]) != sizes:
            raise AttentionError.other_heads(name, tuple(call.k.shape[1:]), sizes)


def _has_nan(rows: Tensor | None) -> bool:
    """In a token that was not made NaN; weights that nothing was loaded into may be NaN themselves."""
    return rows is not None and bool(rows[:, [0, 2]].isnan().any())


def is_sharded(model: nn.Module) -> bool:
    """Whether it is tensor parallel: our op cannot run eagerly on a part of a KV head, as a rank may have."""
    return any(hasattr(weight, "to_local") for weight in model.parameters())


@torch.no_grad()
def trial(
    run: Callable[[Tensor, Tensor], _Result], device: torch.device
) -> tuple[list[AttentionCall], _Result]:
    """(the calls of the op, what `run` returns) of one forward in which the op computes nothing.

    Args:
        run: with the ids and the positions of three tokens, `[1, 3]`.
    """
    calls: list[AttentionCall] = []
    ids = torch.arange(3, device=device)[None]
    with forward_context(attention_trial=calls):
        return calls, run(ids, ids.clone())


def whole_forward(model: Any) -> Callable[[Tensor, Tensor], Any]:
    """The model as what `trial` runs."""
    return lambda ids, positions: model(input_ids=ids, position_ids=positions, use_cache=False)


def _trial(model: Any, *, spoil: bool) -> tuple[list[AttentionCall], Tensor | None]:
    """(the calls of the op in one forward, the logits `[1, 3, vocabulary]`)."""
    hook = _embeddings(model).register_forward_hook(_spoil) if spoil else None
    try:
        calls, found = trial(whole_forward(model), model.device)
    finally:
        if hook is not None:
            hook.remove()
    return calls, getattr(found, "logits", None)


def _spoil(_: nn.Module, __: Any, found: Any) -> Any:
    """A forward hook of embeddings: the token in the middle becomes NaN."""
    if type(found) is not Tensor or found.shape[:2] != (1, 3):
        return found
    spoiled = found.clone()
    spoiled[:, 1] = float("nan")
    return spoiled


def _embeddings(model: Any) -> nn.Module:
    try:
        found: nn.Module = model.get_input_embeddings()
    except NotImplementedError:  # of some models with a text model inside
        found = nn.Identity()  # never called
    return found


def _is_plain(model: nn.Module) -> bool:
    return all(
        type(weight) is nn.Parameter and weight.dtype in _PLAIN and not weight.is_meta
        for weight in model.parameters()
    )
