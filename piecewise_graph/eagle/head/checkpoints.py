"""Draft heads from and to checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import EagleError
from .checkpoint_files import read_json, read_tensors
from .checkpoint_layouts import AUX_LAYERS, MIDLAYER, Names, draft_config, names_of, to_ours, to_theirs
from .draft import DraftModel
from .draft_config import EAGLE3_FLAGS, LLAMA_FIELDS, DraftConfig
from .sharding import shard_like


def load_draft(
    path: str | Path,
    target_model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    shard: bool = True,
) -> DraftModel:
    """The draft head in a local folder, for `target_model`.

    Reads config.json with model.safetensors, shards and their index, or pytorch_model.bin, as EAGLE, SGLang
    (SpecForge, Model Optimizer) and vLLM's speculators write them; Notes [Layouts] and [Feature layers] in
    `checkpoint_layouts.py` say how they differ. A head without an embedding shares the target's. EAGLE-1
    always shares the target's lm_head, EAGLE-3 only if it has none.

    Args:
        target_model: a causal LM of transformers, with embedding and lm_head.
        dtype, device: of the head's own weights; None = the target's. The checkpoint's dtype does not matter.
        shard: beside a tensor-parallel target, a rank keeps its part of the layers; False = all of them.
            Left whole too: where KV heads or the MLP's columns do not divide evenly, on a mesh of several
            dimensions, under FSDP, and on another device than the target's. `save_draft` of a head that is
            cut must be called by all ranks.

    Raises:
        EagleError: a file is missing or damaged; a tensor is missing, unknown or of the wrong shape; the head
            is for another vocabulary, hidden size or depth than the target's.
    """
    if not isinstance(path, (str, PathLike)):
        raise EagleError.no_checkpoint(repr(path), "it is no path")
    folder = Path(path)
    raw = read_json(folder / "config.json")
    stored = read_tensors(folder)
    names = names_of(raw, stored)
    tensors = {ours: t for name, t in stored.items() if (ours := to_ours(name, names)) is not None}
    embedding, head = _target_modules(target_model)
    config = draft_config(folder, raw, names, tensors, target_model.config.get_text_config())  # type: ignore[union-attr, operator]
    shared = _share(config, raw, tensors, embedding, head)
    d2t = _d2t(folder, config, tensors)
    with torch.device("meta"):  # all weights are loaded: nothing to initialise
        model = DraftModel(config, d2t=d2t, **shared)
    _check(folder, names, model, tensors)
    weight: Tensor = embedding.weight  # type: ignore[assignment]
    dtype, device = dtype or weight.dtype, device or weight.device
    own = {  # copies: tensors may be maps of the file, which may be overwritten
        name: t.to(device, dtype if t.is_floating_point() else t.dtype, copy=True)
        for name, t in tensors.items()
    }
    model.load_state_dict(own, strict=False, assign=True)  # shared modules have their weights
    model.rotary.to(device)
    if shard:
        shard_like(target_model, model)
    return model.eval()


def _target_modules(target: nn.Module) -> tuple[nn.Module, nn.Module]:
    embedding = getattr(target, "get_input_embeddings", lambda: None)()
    head = getattr(target, "get_output_embeddings", lambda: None)()
    if embedding is None or head is None:
        raise EagleError.no_head(type(target).__name__)
    return embedding, head


def _share(
    config: DraftConfig,
    raw: Mapping[str, Any],
    tensors: dict[str, Tensor],
    embedding: nn.Module,
    head: nn.Module,
) -> dict[str, Any]:
    """Modules of the target that the head shares; drops an lm_head that EAGLE-1 does not use."""
    shared: dict[str, Any] = {}
    same_width = config.hidden_size == config.target_hidden_size
    if "embed_tokens.weight" not in tensors and same_width:
        shared["embed_tokens"] = embedding
    if config.kind == "eagle1":
        tensors.pop("lm_head.weight", None)
        shared["lm_head"] = head
    elif "lm_head.weight" not in tensors and config.draft_vocab_size == config.vocab_size:
        if raw.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        elif same_width:
            shared["lm_head"] = head
    return shared


def _d2t(folder: Path, config: DraftConfig, tensors: dict[str, Tensor]) -> Tensor | None:
    if config.kind == "eagle1":
        return None
    found = tensors.get("d2t")
    if found is None:
        if config.draft_vocab_size != config.vocab_size:
            raise EagleError.missing_tensor(folder, "d2t", (config.draft_vocab_size,), 0)
        return None
    if found.shape != (config.draft_vocab_size,):
        raise EagleError.wrong_tensor_shape(folder, "d2t", found.shape, (config.draft_vocab_size,))
    if not found.is_floating_point():
        tensors["d2t"] = found.long()
    return tensors["d2t"]


def _check(folder: Path, names: Names, model: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are missing, unknown or of a wrong shape; shared modules have none."""
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name.partition(".")[0] not in model.shared
    }
    for name, shape in expected.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise EagleError.wrong_tensor_shape(folder, to_theirs(name, names), tensors[name].shape, shape)
    missing = [name for name in expected if name not in tensors]
    if missing:
        first = missing[0]
        raise EagleError.missing_tensor(folder, to_theirs(first, names), expected[first], len(missing) - 1)
    unknown = sorted(to_theirs(name, names) for name in tensors if name not in expected)
    if unknown:
        raise EagleError.unexpected_tensors(folder, unknown)


def save_draft(model: DraftModel, path: str | Path) -> None:
    """Write a head as config.json and model.safetensors, under EAGLE's original names.

    Modules that it shares with a target are left out. EAGLE and SGLang read these names; only `load_draft`
    reads the flags of vLLM's heads, such as `norm_before_fc`. A head that is cut over ranks is saved whole:
    all of them call, each with a folder of its own.

    Args:
        path: a folder, created if it does not exist; files of these names in it are replaced.

    Raises:
        EagleError: an EAGLE-1 head with an lm_head that is not shared.
    """
    from safetensors.torch import save_file

    config = model.config
    if config.kind == "eagle1" and "lm_head" not in model.shared:
        raise EagleError.own_lm_head()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    names = MIDLAYER if config.kind == "eagle3" else ()
    tensors = {
        to_theirs(name, names): _whole(tensor).cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in model.state_dict().items()
        if name.partition(".")[0] not in model.shared
    }
    if model.d2t is not None:
        ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(_original_config(model), indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _whole(value: Any) -> Tensor:
    """Of all ranks."""
    tensor: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach()


def _original_config(model: DraftModel) -> dict[str, Any]:
    config = model.config
    scaling = {key: value for key, value in config.rope_parameters.items() if key != "rope_theta"}
    written: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if config.kind == "eagle3" else "LlamaForCausalLMEagle"],
        "model_type": "llama",
        **{name: getattr(config, name) for name in (*LLAMA_FIELDS, "num_key_value_heads", "head_dim")},
        "num_hidden_layers": config.num_layers,
        # The names that transformers before version 5 knows, and 5 translates.
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type") == "default" else scaling,
        "bias": config.fc_bias,
        "attention_bias": config.attention_bias,
        "qkv_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(model.fc.weight.dtype).removeprefix("torch."),
    }
    if config.sliding_window is not None:
        written["sliding_window"] = config.sliding_window
        written["layer_types"] = ["sliding_attention"] * config.num_layers
    if config.kind == "eagle1":
        return written | {"layernorms": config.layernorms}
    if config.hidden_size != config.target_hidden_size:
        written["target_hidden_size"] = config.target_hidden_size
    layers = config.feature_layers or ()
    return written | {
        "draft_vocab_size": config.draft_vocab_size,
        **{name: getattr(config, name) for name in EAGLE3_FLAGS},
        # Each stack reads its own of the two: Note [Feature layers].
        AUX_LAYERS: list(layers),
        "eagle_config": {AUX_LAYERS: [layer - 1 for layer in layers], "use_aux_hidden_state": True},
    }
