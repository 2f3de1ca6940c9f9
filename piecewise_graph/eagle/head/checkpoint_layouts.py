"""Three layouts of draft heads, read into one: tensor names, and config.json to DraftConfig.

Note [Layouts]
*Original*, by SafeAILab's EAGLE, and *SGLang*, by SpecForge and NVIDIA's Model Optimizer: the head's own
Llama config at the top level. EAGLE-3 keeps its first layer as `midlayer`; EAGLE-1 has `layers.0` without
`input_layernorm`. Where `bias` (of `fc`) is absent, EAGLE-1 has one, as in EAGLE's `ea_model.py`.
*speculators*, by vLLM's project: `speculators_model_type`, and the Llama config in
`transformer_layer_config`. EAGLE-3 keeps its layers as `layers`; EAGLE-1 its one as `transformer`, and `fc`
as `fusion_fc`. Where `norm_before_residual` is absent it is true, as in vLLM's `speculators/algos.py`; in the
other layouts it is false.

Note [Feature layers]
`eagle_aux_hidden_state_layer_ids` has two meanings, told apart by where it stands.
- In `eagle_config`, where SpecForge and Model Optimizer write it and SGLang reads it, i is the *output* of
  layer i: SGLang's `set_eagle3_layers_to_capture` adds 1 ("it takes the output of the (i-1)th layer").
- At the top level, where speculators writes it and vLLM reads it, i is the *input* of layer i: vLLM's models
  append `hidden_states + residual` before they call layer i.
Without the field both take the inputs of layers 2, n // 2 and n - 3, which SpecForge writes as 1, n // 2 - 1,
n - 4. Ours are inputs. All stacks collect features on the way up, so their order is that of the layers.

Biases of q, k, v, o and of the MLP, and Qwen3's norms of q and k, exist if their tensors do: config.json is
often copied from the target in these fields. If one layer has them, all layers must.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import EagleError
from .draft_config import EAGLE3_FLAGS, DraftConfig, Kind, default_feature_layers, llama_fields

Names = tuple[tuple[str, str], ...]  # prefix in the checkpoint, prefix of ours

MIDLAYER: Names = (("midlayer.", "layers.0."),)
SPECULATORS_EAGLE: Names = (
    ("fusion_fc.", "fc."),
    ("transformer.", "layers.0."),
    ("pre_lm_head_layernorm.", "norm."),
)
AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
# Other families give other defaults to what config.json leaves out; layers of all these are Llama's here.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def names_of(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Names:
    """Prefixes by which this checkpoint's names differ from ours."""
    if raw.get("speculators_model_type") == "eagle":
        return SPECULATORS_EAGLE
    return MIDLAYER if any("midlayer." in name for name in tensors) else ()


def to_ours(name: str, names: Names) -> str | None:
    """Our name of a checkpoint's tensor; None = it is not used."""
    name = name.removeprefix("model.")
    if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
        return None
    return next((ours + name[len(theirs) :] for theirs, ours in names if name.startswith(theirs)), name)


def to_theirs(name: str, names: Names) -> str:
    """The checkpoint's name of a tensor of ours."""
    return next((theirs + name[len(ours) :] for theirs, ours in names if name.startswith(ours)), name)


def draft_config(
    folder: Path, raw: Mapping[str, Any], names: Names, tensors: Mapping[str, Tensor], target: Any
) -> DraftConfig:
    """The head's config, from its config.json and its tensors under our names.

    Args:
        folder: for messages.
        names: of `names_of`.
        target: the target model's text config.

    Raises:
        EagleError: config.json is incomplete or contradicts itself, the tensors or the target.
    """
    layer = raw.get("transformer_layer_config", raw)
    kind = _kind(folder, raw, names, tensors)
    shape = _parsed(folder, layer)
    fields = llama_fields(shape) | _optional_parts(tensors)
    # Not shape.num_hidden_layers: its default is that of a whole Llama, a head has one layer by default.
    fields["num_layers"] = layer.get("num_hidden_layers") or 1
    fields["rope_parameters"] = dict(shape.rope_parameters)
    fields["sliding_window"] = _sliding_window(folder, shape)
    fields["target_hidden_size"] = raw.get("target_hidden_size") or shape.hidden_size
    for what, head, own in (
        ("a hidden size of", fields["target_hidden_size"], target.hidden_size),
        ("a vocabulary of", shape.vocab_size, target.vocab_size),
    ):
        if head != own:
            raise EagleError.other_target(folder, what, head, own)
    if kind == "eagle3":
        fields |= _eagle3_fields(folder, raw, target.num_hidden_layers)
        fields["draft_vocab_size"] = (
            raw.get("draft_vocab_size") or layer.get("draft_vocab_size") or shape.vocab_size
        )
    else:
        speculators = "speculators_model_type" in raw
        fields["fc_bias"] = bool(raw.get("fusion_bias", False) if speculators else raw.get("bias", True))
        fields["layernorms"] = bool(raw.get("layernorms", False))
    try:
        return DraftConfig(kind=kind, **fields)
    except EagleError as error:
        raise EagleError.bad_checkpoint_config(folder, error.what.rstrip(".")) from error


def _kind(folder: Path, raw: Mapping[str, Any], names: Names, tensors: Mapping[str, Tensor]) -> Kind:
    speculators = raw.get("speculators_model_type")
    if speculators not in (None, "eagle", "eagle3"):
        raise EagleError.unsupported_head(folder, f"speculators_model_type {speculators!r}")
    # Tensors that only EAGLE-3 has decide, and not the architecture in config.json.
    marked = names == MIDLAYER or "layers.0.hidden_norm.weight" in tensors
    return "eagle3" if speculators == "eagle3" or marked else "eagle1"


def _parsed(folder: Path, layer: Any) -> Any:
    """transformers' own reading of the head's Llama config: old and new names of RoPE, and defaults."""
    from transformers import CONFIG_MAPPING

    if not isinstance(layer, Mapping):
        raise EagleError.bad_checkpoint_config(folder, "transformer_layer_config is not an object")
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if layer.get(name) is None]
    if missing:
        raise EagleError.bad_checkpoint_config(folder, f"it has no {', '.join(missing)}")
    family = layer.get("model_type")
    config_class = CONFIG_MAPPING[family if family in _FAMILIES else "llama"]
    try:
        return config_class.from_dict(deepcopy(dict(layer)))
    except Exception as error:  # transformers raises many unrelated classes for bad values
        raise EagleError.bad_checkpoint_config(folder, " ".join(str(error).split()).rstrip(".")) from error


def _sliding_window(folder: Path, shape: Any) -> int | None:
    """The window, if `layer_types` says that the layers have one; `sliding_window` alone does not count."""
    default = ["sliding_attention"] if shape.model_type == "mistral" else []
    types = set(getattr(shape, "layer_types", None) or default)
    if "sliding_attention" not in types:
        return None
    if len(types) > 1:
        raise EagleError.unsupported_head(folder, "some of its layers have a sliding window, some have not")
    return shape.sliding_window


def _optional_parts(tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    parts = {
        "attention_bias": "self_attn.q_proj.bias",
        "output_bias": "self_attn.o_proj.bias",
        "mlp_bias": "mlp.gate_proj.bias",
        "qk_norm": "self_attn.q_norm.weight",
    }
    return {field: f"layers.0.{name}" in tensors for field, name in parts.items()}


def _eagle3_fields(folder: Path, raw: Mapping[str, Any], layers: int) -> dict[str, Any]:
    eagle = raw.get("eagle_config") or {}
    if not isinstance(eagle, Mapping):
        raise EagleError.bad_checkpoint_config(folder, "eagle_config is not an object")
    if eagle.get("use_aux_hidden_state") is False:
        raise EagleError.unsupported_head(folder, "EAGLE-3 on the last hidden state (use_aux_hidden_state)")
    defaults = dict.fromkeys(EAGLE3_FLAGS, False)
    defaults["norm_before_residual"] = "speculators_model_type" in raw
    fields: dict[str, Any] = {}
    for name, default in defaults.items():
        given = raw.get(name, eagle.get(name))
        fields[name] = default if given is None else bool(given)
    fields["fc_bias"] = bool(raw.get("bias", False))
    fields["feature_layers"] = _feature_layers(folder, raw, eagle, layers)
    return fields


def _feature_layers(
    folder: Path, raw: Mapping[str, Any], eagle: Mapping[str, Any], layers: int
) -> tuple[int, ...]:
    """See Note [Feature layers]."""
    field, ids, shift = f"eagle_config.{AUX_LAYERS}", eagle.get(AUX_LAYERS), 1
    if not ids:
        field, ids, shift = AUX_LAYERS, raw.get(AUX_LAYERS), 0
    if not ids:
        return default_feature_layers(layers)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise EagleError.bad_checkpoint_config(folder, f"{field} is {ids!r}, not a list of layers")
    for i in ids:
        if not 0 <= i + shift < layers:
            raise EagleError.wrong_feature_layer(folder, field, i, layers, -shift, layers - 1 - shift)
    return tuple(sorted({i + shift for i in ids}))
