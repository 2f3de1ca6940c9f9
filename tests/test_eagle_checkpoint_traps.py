"""Traps of draft checkpoints: RoPE, feature layers, shared modules, d2t, prefixes, dtypes and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head_cases import TARGET, check, sharded
from eagle_heads import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    LAYERS,
    LEAN,
    VOCABULARY,
    Head,
    make_target,
    original,
    sglang,
    speculators,
    write,
)
from safetensors.torch import load_file, save_file

from piecewise_graph.eagle.head.checkpoints import load_draft
from piecewise_graph.eagle.head.draft import DraftModel
from piecewise_graph.eagle.head.draft_config import default_feature_layers

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")


@pytest.fixture
def target() -> torch.nn.Module:
    return TARGET


# --- Traps. -------------------------------------------------------------------------------------------------


def theta_of(draft: DraftModel) -> float:
    """rope_theta, from the frequencies that the head really uses: theta ** (-2 i / head_dim)."""
    return float(draft.rotary.inv_freq[1] ** (-draft.config.head_dim / 2))


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({}, 10000.0),
        ({"rope_theta": 77.0}, 77.0),
        ({"rope_theta": 77.0, "rope_scaling": {"type": "linear", "factor": 1.0}}, 77.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}, 77.0),
    ],
)
def test_rope_theta_is_the_heads_own(
    fields: dict[str, Any], theta: float, tmp_path: Path, target: torch.nn.Module
) -> None:
    config, tensors = original(LEAN, LEAN.weights())
    config = {key: value for key, value in config.items() if not key.startswith("rope")} | fields
    assert theta_of(load_draft(write(tmp_path, config, tensors), target)) == pytest.approx(theta, rel=1e-4)


def test_scaled_rope_is_transformers_own(tmp_path: Path, target: torch.nn.Module) -> None:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
    scaling |= {"rope_type": "llama3", "original_max_position_embeddings": 16}
    config, tensors = original(LEAN, LEAN.weights())
    draft = load_draft(write(tmp_path, config | {"rope_scaling": scaling}, tensors), target)
    plain = load_draft(write(tmp_path / "plain", config, tensors), target)
    ratio = plain.rotary.inv_freq / draft.rotary.inv_freq
    assert ratio[-1] == pytest.approx(8.0) and ratio[0] < 2


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, default_feature_layers(LAYERS)),
        # SGLang's: outputs of layers.
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}}, (0, 1, 2)),
        # vLLM's: inputs.
        ({"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}, (0, 3, 7)),
        # In the order in which a target's forward comes to them.
        ({"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}, (1, 3, 5)),
    ],
)
def test_feature_layers_are_inputs_of_target_layers(
    fields: dict[str, Any], layers: tuple[int, ...], tmp_path: Path, target: torch.nn.Module
) -> None:
    config, tensors = original(LEAN, LEAN.weights())
    draft = load_draft(write(tmp_path, config | fields, tensors), target)
    assert draft.config.feature_layers == layers
    assert draft.feature_size == 3 * HIDDEN


def test_default_feature_layers_are_the_same_ones_in_every_layout() -> None:
    """SpecForge writes 1, n // 2 - 1, n - 4, outputs; vLLM counts inputs: 2, n // 2, n - 3."""
    outputs_of = sglang(EAGLE3, {})[0]["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    inputs_of = speculators(EAGLE3, {})[0]["eagle_aux_hidden_state_layer_ids"]
    assert tuple(i + 1 for i in outputs_of) == tuple(inputs_of) == default_feature_layers(LAYERS)


@pytest.mark.parametrize(("layers", "features"), [(1, (0,)), (4, (1, 2)), (6, (2, 3)), (7, (2, 3, 4))])
def test_shallow_targets_have_fewer_features(layers: int, features: tuple[int, ...]) -> None:
    assert default_feature_layers(layers) == features


def test_as_many_features_as_layers_are_named(tmp_path: Path, target: torch.nn.Module) -> None:
    head = replace(LEAN, features=2)
    config, tensors = speculators(head, head.weights())
    config["eagle_aux_hidden_state_layer_ids"] = [1, 6]
    draft = load_draft(write(tmp_path, config, tensors), target)
    assert draft.feature_size == 2 * HIDDEN
    check(draft, head, tensors | head.weights(), target)


@pytest.mark.parametrize("head", [replace(EAGLE1, own_embedding=False), LEAN], ids=["eagle1", "eagle3"])
def test_what_a_checkpoint_lacks_is_the_targets(head: Head, tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(head, head.weights())), target)
    assert draft.embed_tokens is target.get_input_embeddings()
    assert (draft.lm_head is target.get_output_embeddings()) is (not head.eagle3)


def test_eagle1_uses_the_targets_lm_head_even_if_the_checkpoint_has_one(
    tmp_path: Path, target: torch.nn.Module
) -> None:
    config, tensors = original(EAGLE1, EAGLE1.weights())
    tensors["lm_head.weight"] = torch.zeros(VOCABULARY, HIDDEN)
    draft = load_draft(write(tmp_path, config, tensors), target)
    assert draft.lm_head is target.get_output_embeddings()


def test_eagle3_without_lm_head(tmp_path: Path, target: torch.nn.Module) -> None:
    """The target's, or, if config.json ties them, the head's own embedding."""
    head = replace(EAGLE3, draft_vocabulary=VOCABULARY)
    config, tensors = original(head, head.weights())
    del tensors["lm_head.weight"]
    draft = load_draft(write(tmp_path, config, tensors), target)
    assert draft.lm_head is target.get_output_embeddings() and draft.d2t is None
    tied = load_draft(write(tmp_path, config | {"tie_word_embeddings": True}, tensors), target)
    assert torch.equal(tied.lm_head.weight, tensors["embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_d2t_holds_offsets(dtype: torch.dtype, tmp_path: Path, target: torch.nn.Module) -> None:
    config, tensors = original(EAGLE3, EAGLE3.weights())
    ids = tensors["t2d"].nonzero()[:, 0]
    tensors["d2t"] = tensors["d2t"].to(dtype)
    draft = load_draft(write(tmp_path, config, tensors), target)
    every = torch.arange(EAGLE3.draft_vocabulary)
    assert draft.d2t is not None and draft.d2t.dtype == torch.int64
    assert torch.equal(draft.to_target(every), ids)
    assert torch.equal(draft.to_target(every.view(5, 6)), ids.view(5, 6))
    assert draft.to_target(every.int()).dtype == torch.int32


def test_without_d2t_ids_are_the_targets(tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(EAGLE1, EAGLE1.weights())), target)
    ids = torch.tensor([3, 1])
    assert draft.d2t is None and torch.equal(draft.to_target(ids), ids)


def test_prefixes_and_tensors_of_no_use(tmp_path: Path, target: torch.nn.Module) -> None:
    config, tensors = original(EAGLE3, EAGLE3.weights())
    stored = {f"model.{name}": tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    stored["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    stored |= {name: tensors[name] for name in ("d2t", "t2d")}
    check(load_draft(write(tmp_path, config, stored), target), EAGLE3, tensors, target)


def test_dtype_is_the_targets_or_as_asked_and_frequencies_stay_exact(tmp_path: Path) -> None:
    folder = write(tmp_path, *original(EAGLE3, EAGLE3.weights()))
    target = make_target().to(torch.bfloat16)
    for asked, dtype in ((None, torch.bfloat16), (torch.float16, torch.float16)):
        draft = load_draft(folder, target, dtype=asked)
        assert {p.dtype for p in draft.parameters()} == {dtype}
        assert draft.rotary.inv_freq.dtype == torch.float32
        assert draft.d2t is not None and draft.d2t.dtype == torch.int64


def test_everything_goes_to_the_device_that_was_asked_for(tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(EAGLE3, EAGLE3.weights())), target, device="meta")
    assert {t.device.type for t in (*draft.parameters(), *draft.buffers())} == {"meta"}


# --- Files. -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["shards", "one bin", "bin shards", "other name"])
def test_weights_may_come_in_several_files(form: str, tmp_path: Path, target: torch.nn.Module) -> None:
    weights = EAGLE3.weights()
    folder = write(tmp_path, *original(EAGLE3, weights))
    whole = folder / "model.safetensors"
    if form == "shards":
        sharded(folder, save_file, ".safetensors", "model.safetensors.index.json")
    elif form == "bin shards":
        sharded(folder, torch.save, ".bin", "pytorch_model.bin.index.json")
    elif form == "one bin":
        torch.save(load_file(whole), folder / "pytorch_model.bin")
        whole.unlink()
    else:
        whole.rename(folder / "draft.safetensors")
    check(load_draft(str(folder), target), EAGLE3, weights, target)
