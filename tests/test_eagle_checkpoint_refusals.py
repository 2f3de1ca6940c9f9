"""Draft checkpoints that are refused, and the error of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head_cases import AUX, TARGET, sharded
from eagle_heads import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    LAYERS,
    LEAN,
    original,
    speculators,
    write,
)
from safetensors.torch import save_file

from piecewise_graph.eagle.errors import EagleError
from piecewise_graph.eagle.head.checkpoints import load_draft

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")


@pytest.fixture
def target() -> torch.nn.Module:
    return TARGET


@pytest.mark.parametrize("path", [None, 5])
def test_what_is_no_path_is_refused(path: Any, target: torch.nn.Module) -> None:
    with pytest.raises(EagleError, match=f"{path} holds no draft head: it is no path"):
        load_draft(path, target)


# --- Refusals. ----------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def say(**fields: Any) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.update(fields)


def forget(name: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.pop(name)


REFUSED = {
    "missing": (
        EAGLE3,
        drop("midlayer.mlp.up_proj.weight"),
        r"no tensor midlayer\.mlp\.up_proj\.weight, of shape \(40, 32\)",
    ),
    "half of it missing": (EAGLE3, lambda c, t: [t.pop(n) for n in list(t) if "mlp" in n], r"nor 2 more"),
    "no fc": (EAGLE3, drop("fc.weight"), r"no tensor fc\.weight, of shape \(32, 96\)"),
    "one bias missing": (
        replace(EAGLE3, qkv_bias=True),
        drop("midlayer.self_attn.v_proj.bias"),
        r"no tensor midlayer\.self_attn\.v_proj\.bias, of shape \(16,\)",
    ),
    "bias absent from config and tensors": (
        EAGLE1,
        drop("fc.bias"),
        r'(?s)no tensor fc\.bias, of shape \(32,\).*says so in config\.json, as "bias": false',
    ),
    "bias that config denies": (EAGLE1, say(bias=False), r"does not account for: fc\.bias"),
    "unknown tensor": (
        EAGLE3,
        put("midlayer.mlp.experts.gate_proj.weight", 2, 2),
        r"does not account for: midlayer\.mlp\.experts\.gate_proj\.weight",
    ),
    "input_layernorm of EAGLE-1": (
        EAGLE1,
        put("layers.0.input_layernorm.weight", HIDDEN),
        r"does not account for: layers\.0\.input_layernorm\.weight",
    ),
    "shape": (
        EAGLE3,
        put("midlayer.self_attn.k_proj.weight", 16, 32),
        r"midlayer\.self_attn\.k_proj\.weight has shape \(16, 32\), not \(16, 64\)",
    ),
    "features": (
        EAGLE3,
        say(**{AUX: [1, 2]}),
        r"fc\.weight has shape \(32, 96\), not \(32, 64\)",
    ),
    "vocabulary": (EAGLE3, say(vocab_size=50), r"a target with a vocabulary of 50, this one has 48"),
    "hidden size": (
        EAGLE3,
        say(target_hidden_size=64),
        r"a target with a hidden size of 64, this one has 32",
    ),
    "embedding of another width": (
        replace(LEAN, hidden=48, heads=6),
        lambda c, t: None,
        r"no tensor embed_tokens\.weight, of shape \(48, 48\)",
    ),
    "no d2t": (EAGLE3, drop("d2t"), r"no tensor d2t, of shape \(30,\)"),
    "short d2t": (
        EAGLE3,
        lambda c, t: t.update(d2t=t["d2t"][:9]),
        r"d2t has shape \(9,\), not \(30,\)",
    ),
    "d2t of ids": (
        EAGLE3,
        lambda c, t: t.update(d2t=t["d2t"] + torch.arange(30)),
        r"it maps draft token \d+ to target token \d+, of 48",
    ),
    "d2t that repeats a token": (
        EAGLE3,
        lambda c, t: t["d2t"].__setitem__(7, t["d2t"][6] - 1),
        r"it maps draft tokens 6 and 7 to the same target token, \d+",
    ),
    "d2t of floats": (
        EAGLE3,
        lambda c, t: t.update(d2t=t["d2t"].float()),
        r"torch\.float32 of shape \(30,\)",
    ),
    "feature layer above the target": (
        EAGLE3,
        say(**{AUX: [1, 2, LAYERS]}),
        rf"{AUX} names layer 8, but the target has 8 layers",
    ),
    "feature layer above the target, SGLang's": (
        EAGLE3,
        say(eagle_config={AUX: [1, 2, LAYERS - 1]}),
        rf"(?s)eagle_config\.{AUX} names layer 7, but the target has 8.*goes from -1 to 6",
    ),
    "feature layers that are none": (EAGLE3, say(**{AUX: "all"}), rf"{AUX} is 'all', not a list of layers"),
    "last hidden state": (
        EAGLE3,
        say(eagle_config={"use_aux_hidden_state": False}),
        r"kind that is not supported: EAGLE-3 on the last hidden state",
    ),
    "another speculator": (
        EAGLE3,
        say(speculators_model_type="dflash"),
        r"not supported: speculators_model_type 'dflash'",
    ),
    "half a window": (
        replace(EAGLE1, layers=2),
        say(layer_types=["sliding_attention", "full_attention"], sliding_window=4),
        r"some of its layers have a sliding window",
    ),
    "no hidden size": (EAGLE3, forget("hidden_size"), r"describes no draft head: it has no hidden_size"),
    "nested config": (EAGLE3, say(transformer_layer_config=3), r"transformer_layer_config is not an object"),
    "eagle_config": (EAGLE3, say(eagle_config=[1]), r"eagle_config is not an object"),
    "bad value": (EAGLE3, say(intermediate_size="wide"), r"(?s)describes no draft head: .*intermediate_size"),
    "heads": (EAGLE3, say(num_key_value_heads=3), r"DraftConfig\(num_key_value_heads=3\) cannot work"),
    "draft vocabulary": (EAGLE3, say(draft_vocab_size=99), r"DraftConfig\(draft_vocab_size=99\)"),
    "kind of RoPE": (
        EAGLE3,
        say(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        r"(?s)DraftConfig\(rope_parameters=.*'dynamic'",
    ),
    "half of RoPE": (EAGLE3, say(partial_rotary_factor=0.5), r"DraftConfig\(rope_parameters=.*0\.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_checkpoint_is_refused(name: str, tmp_path: Path, target: torch.nn.Module) -> None:
    head, damage, message = REFUSED[name]
    config, tensors = original(head, head.weights())
    damage(config, tensors)
    with pytest.raises(EagleError, match=message):
        load_draft(write(tmp_path, config, tensors), target)


def test_refusals_speak_the_checkpoints_language(tmp_path: Path, target: torch.nn.Module) -> None:
    config, tensors = speculators(EAGLE1, EAGLE1.weights())
    del tensors["transformer.mlp.up_proj.weight"]
    with pytest.raises(EagleError, match=r"no tensor transformer\.mlp\.up_proj\.weight"):
        load_draft(write(tmp_path, config, tensors), target)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def to_bin(folder: Path, content: Any) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def lose_a_shard(folder: Path) -> None:
    sharded(folder, save_file, ".safetensors", "model.safetensors.index.json")
    (folder / "part-1.safetensors").unlink()


def empty_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part-0.safetensors")
    (folder / "model.safetensors.index.json").write_text("{}")


DAMAGED = {
    "no config": (lambda f: (f / "config.json").unlink(), r"there is no config\.json"),
    "half a config": (lambda f: cut(f / "config.json"), r"config\.json cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]"), r"it is not a JSON object"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"there are no weights in it"),
    "half a file": (lambda f: cut(f / "model.safetensors"), r"model\.safetensors cannot be read"),
    "no shard": (lose_a_shard, r"lists part-1\.safetensors, which is missing"),
    "empty index": (empty_index, r"it has no weight_map"),
    "half a bin": (lambda f: cut(to_bin(f, {"a": torch.ones(99)})), r"pytorch_model\.bin cannot be read"),
    "code in a bin": (lambda f: to_bin(f, {"a": Path("x")}), r"pytorch_model\.bin cannot be read"),
    "no tensors in a bin": (lambda f: to_bin(f, {"a": 3}), r"it is not a dictionary of tensors"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_refused(name: str, tmp_path: Path, target: torch.nn.Module) -> None:
    damage, message = DAMAGED[name]
    folder = write(tmp_path, *original(LEAN, LEAN.weights()))
    damage(folder)
    with pytest.raises(EagleError, match=message):
        load_draft(folder, target)


def test_a_target_without_lm_head_is_refused(tmp_path: Path, target: torch.nn.Module) -> None:
    folder = write(tmp_path, *original(EAGLE1, EAGLE1.weights()))
    with pytest.raises(EagleError, match="LlamaModel has no embedding and lm_head"):
        load_draft(folder, target.model)
