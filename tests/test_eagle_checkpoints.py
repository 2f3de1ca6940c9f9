"""Draft heads from checkpoints: three layouts against a plain torch reference, every trap, every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    LAYERS,
    LAYOUTS,
    LEAN,
    VOCABULARY,
    Head,
    Reference,
    make_target,
    original,
    sglang,
    speculators,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.eagle.errors import EagleError
from piecewise_graph.eagle.head.checkpoints import load_draft, save_draft
from piecewise_graph.eagle.head.draft import DraftModel
from piecewise_graph.eagle.head.draft_config import DraftConfig, default_feature_layers

pytestmark = pytest.mark.usefixtures("no_grad")
ROWS = 11
TARGET = make_target()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These matrices are tiny: on a busy machine, threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def target() -> torch.nn.Module:
    return TARGET


def packed(rows: int) -> Any:
    """One sequence without a cache."""
    return pg.forward_context(cu_seqlens=torch.tensor([0, rows], dtype=torch.int32))


def inputs(draft: DraftModel, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(0, draft.config.vocab_size, (ROWS,))
    return ids, torch.arange(3, 3 + ROWS), torch.randn(ROWS, draft.feature_size)


def two_steps(draft: Any, ids: Tensor, positions: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden states and logits of the first step, logits of the step that takes those hidden states)."""
    hidden = draft.forward(ids, positions, draft.project(features))
    return hidden, draft.logits(hidden), draft.logits(draft.forward(ids.flip(0), positions + 1, hidden))


def outputs(draft: DraftModel) -> tuple[Tensor, Tensor, Tensor]:
    with packed(ROWS):
        return two_steps(draft, *inputs(draft))


def check(draft: DraftModel, head: Head, weights: dict[str, Tensor], target: torch.nn.Module) -> None:
    expected = two_steps(Reference(head, weights, target), *inputs(draft))
    for got, wanted in zip(outputs(draft), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-5)


HEADS = {
    "eagle1": EAGLE1,
    "eagle1 without bias": replace(EAGLE1, fc_bias=False),
    "eagle1 with Qwen2's biases": replace(EAGLE1, qkv_bias=True),
    "eagle1 without embedding": replace(EAGLE1, own_embedding=False),
    "eagle1 with a theta of its own": replace(EAGLE1, theta=77.0),
    "eagle3": EAGLE3,
    "eagle3 without embedding": LEAN,
    "eagle3 of the whole vocabulary": replace(EAGLE3, draft_vocabulary=VOCABULARY),
    "eagle3 with a theta of its own": replace(EAGLE3, theta=77.0),
    "eagle3 with norm_before_residual": replace(EAGLE3, norm_before_residual=True),
    "eagle3 with norm_before_fc": replace(EAGLE3, norm_before_fc=True),
    "eagle3 with fc_norm and norm_output": replace(EAGLE3, fc_norm=True, norm_output=True),
    "eagle3 with all biases": replace(EAGLE3, fc_bias=False, qkv_bias=True, o_bias=True, mlp_bias=True),
    "eagle3 with Qwen3's norms": replace(EAGLE3, qk_norm=True),
    "eagle3 in a window": replace(EAGLE3, window=4),
    "eagle3 wider than its target": replace(EAGLE3, hidden=48, heads=6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", HEADS)
def test_a_head_computes_what_its_definition_says(
    name: str, layout: str, tmp_path: Path, target: torch.nn.Module
) -> None:
    weights = HEADS[name].weights()
    draft = load_draft(write(tmp_path, *LAYOUTS[layout](HEADS[name], weights)), target)
    check(draft, HEADS[name], weights, target)


@st.composite
def random_heads(draw: st.DrawFn) -> Head:
    kv_heads, groups, flag = draw(st.integers(1, 3)), draw(st.integers(1, 3)), st.booleans()
    flags = ("own_embedding", "fc_bias", "qkv_bias", "o_bias", "mlp_bias", "qk_norm")
    fields: dict[str, Any] = {name: draw(flag) for name in flags} | {
        "kv_heads": kv_heads,
        "heads": kv_heads * groups,
        "head_dim": 2 * draw(st.integers(1, 6)),
        "intermediate": draw(st.integers(1, 9)),
        "theta": draw(st.sampled_from([10.0, 10000.0, 5e5])),
        "window": draw(st.none() | st.integers(1, ROWS)),
    }
    if not draw(flag):
        return Head(eagle3=False, **fields | {"kv_heads": 2, "heads": 4})
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields |= {name: draw(flag) for name in flags} | {"fc_bias": False}
    if fields["own_embedding"]:
        fields["hidden"] = fields["heads"] * draw(st.integers(1, 5))
    else:
        fields |= {"kv_heads": 2, "heads": 4}
    return Head(eagle3=True, draft_vocabulary=draw(st.integers(1, VOCABULARY)), **fields)


@settings(max_examples=30)
@given(head=random_heads(), layout=st.sampled_from(sorted(LAYOUTS)), seed=st.integers(0, 9))
def test_random_heads_compute_what_their_definition_says(
    head: Head, layout: str, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weights = head.weights(seed)
    folder = write(tmp_path_factory.mktemp("head"), *LAYOUTS[layout](head, weights))
    check(load_draft(folder, TARGET), head, weights, TARGET)


@pytest.mark.parametrize(("family", "head"), [("qwen2", {"qkv_bias": True}), ("qwen3", {"qk_norm": True})])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("base", [EAGLE1, LEAN])
def test_heads_of_qwen_targets(
    base: Head, layout: str, family: str, head: dict[str, bool], tmp_path: Path
) -> None:
    shape, target = replace(base, **head), make_target(family)
    weights = shape.weights()
    draft = load_draft(write(tmp_path, *LAYOUTS[layout](shape, weights, family)), target)
    check(draft, shape, weights, target)


@pytest.mark.parametrize("layout", ["original", "sglang"])
def test_eagle1_heads_may_have_more_layers(layout: str, tmp_path: Path, target: torch.nn.Module) -> None:
    """From the second on they normalise their input. (speculators' have one.)"""
    head = replace(EAGLE1, layers=2)
    weights = head.weights()
    check(load_draft(write(tmp_path, *LAYOUTS[layout](head, weights)), target), head, weights, target)


def test_eagle3_heads_may_have_more_layers(tmp_path: Path, target: torch.nn.Module) -> None:
    head = replace(EAGLE3, layers=3)
    weights = head.weights()
    check(load_draft(write(tmp_path, *speculators(head, weights)), target), head, weights, target)


def test_speculators_layernorms(tmp_path: Path, target: torch.nn.Module) -> None:
    head = replace(EAGLE1, layernorms=True)
    weights = head.weights()
    check(load_draft(write(tmp_path, *speculators(head, weights)), target), head, weights, target)


@pytest.mark.parametrize("name", HEADS)
def test_layouts_agree_bit_for_bit(name: str, tmp_path: Path, target: torch.nn.Module) -> None:
    head, weights = HEADS[name], HEADS[name].weights()
    drafts = [
        load_draft(write(tmp_path / key, *made(head, weights)), target) for key, made in LAYOUTS.items()
    ]
    assert drafts[0].config == drafts[1].config == drafts[2].config
    first, *others = (outputs(draft) for draft in drafts)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


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


def sharded(folder: Path, save: Callable[..., None], suffix: str, index: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"part-{i % 2}{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        save({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / index).write_text(json.dumps({"weight_map": files}))


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


# --- Refusals. ----------------------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.pop(name)


def put(name: str, *shape: int) -> Callable[[dict, dict], None]:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def say(**fields: Any) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.update(fields)


def forget(name: str) -> Callable[[dict, dict], None]:
    return lambda config, tensors: config.pop(name)


AUX = "eagle_aux_hidden_state_layer_ids"
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


# --- New heads, and their way to disk and back. -------------------------------------------------------------


@st.composite
def configs(draw: st.DrawFn) -> DraftConfig:
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, flag = kv_heads * groups, st.booleans()
    eagle3 = draw(flag)
    hidden = heads * draw(st.integers(2, 4)) if eagle3 else HIDDEN
    fields: dict[str, Any] = {
        "kind": "eagle3" if eagle3 else "eagle1",
        "hidden_size": hidden,
        "intermediate_size": draw(st.integers(1, 20)),
        "num_attention_heads": heads if eagle3 else 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 2 * draw(st.integers(1, 5)),
        "num_layers": draw(st.integers(1, 2)),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw(st.floats(10, 1e6))},
        "sliding_window": draw(st.none() | st.integers(1, 9)),
        "rms_norm_eps": 1e-5,
        **{name: draw(flag) for name in ("fc_bias", "attention_bias", "output_bias", "mlp_bias", "qk_norm")},
    }
    if not eagle3:
        return DraftConfig.for_target(TARGET.config, **fields, layernorms=draw(flag))
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    layers = draw(st.sets(st.integers(0, LAYERS - 1), min_size=1))
    fields |= {name: draw(flag) for name in flags} | {"feature_layers": tuple(sorted(layers))}
    return DraftConfig.for_target(TARGET.config, **fields, draft_vocab_size=draw(st.integers(1, VOCABULARY)))


@settings(max_examples=25)
@given(config=configs(), seed=st.integers(0, 9))
def test_a_saved_head_comes_back(
    config: DraftConfig, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    torch.manual_seed(seed)
    ids = torch.randperm(VOCABULARY)[: config.draft_vocab_size]
    d2t = ids - torch.arange(len(ids)) if config.kind == "eagle3" else None
    head = None if config.kind == "eagle3" else TARGET.get_output_embeddings()
    draft = DraftModel(config, lm_head=head, d2t=d2t).eval()
    for weight in draft.parameters():
        if weight.dim() == 1:
            weight.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("head")
    save_draft(draft, folder / "new")
    again = load_draft(folder / "new", TARGET)
    assert again.config == config
    assert_equal(draft.state_dict(), again.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(outputs(draft), outputs(again), strict=True))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(a), dict(b), rtol=0, atol=0)


def test_shared_modules_are_not_saved(tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(LEAN, LEAN.weights())), target)
    save_draft(draft, tmp_path / "again")
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == LEAN.weights().keys()
    assert load_draft(tmp_path / "again", target).embed_tokens is target.get_input_embeddings()


def test_a_head_may_be_saved_over_itself(tmp_path: Path, target: torch.nn.Module) -> None:
    weights = EAGLE3.weights()
    folder = write(tmp_path, *original(EAGLE3, weights))
    draft = load_draft(folder, target)
    save_draft(draft, folder)
    (folder / "model.safetensors").write_bytes(b"")
    check(draft, EAGLE3, weights, target)


def test_both_conventions_of_feature_layers_are_written(tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(LEAN, LEAN.weights())), target)
    save_draft(draft, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config[AUX] == [2, 4, 5] and config["eagle_config"][AUX] == [1, 3, 4]


def test_an_lm_head_that_would_be_lost_is_refused(tmp_path: Path, target: torch.nn.Module) -> None:
    with pytest.raises(EagleError, match="no lm_head of its own"):
        save_draft(DraftModel(DraftConfig.for_target(target.config, "eagle1")), tmp_path)


NEW = {
    "kind": ({"kind": "medusa"}, {}, r"kind='medusa'"),
    "features of EAGLE-1": ({"kind": "eagle1", "feature_layers": (1,)}, {}, r"feature_layers=\(1,\)"),
    "no features of EAGLE-3": ({"feature_layers": None}, {}, r"feature_layers=None"),
    "features in another order": ({"feature_layers": (3, 1)}, {}, r"feature_layers=\(3, 1\)"),
    "no mapping": ({"draft_vocab_size": 9}, {}, r"the draft has 9 tokens and the target 48"),
    "embedding": ({}, {"embed_tokens": torch.nn.Embedding(7, 32)}, r"shape \(7, 32\), .* needs \(48, 32\)"),
}


@pytest.mark.parametrize("name", NEW)
def test_a_head_that_cannot_be_is_refused(name: str, target: torch.nn.Module) -> None:
    changes, modules, message = NEW[name]
    with pytest.raises(EagleError, match=message):
        DraftModel(DraftConfig.for_target(target.config, **changes), **modules)


# --- In the library. ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [EAGLE1, replace(EAGLE3, layers=2)], ids=["eagle1", "eagle3"])
def test_a_head_keeps_a_cache_of_its_own(head: Head, tmp_path: Path, target: torch.nn.Module) -> None:
    """Token by token on pages gives what one packed sequence gives."""
    draft = load_draft(write(tmp_path, *speculators(head, head.weights())), target)
    ids, positions, features = inputs(draft)
    config = draft.config
    cache = PagedKVCache(
        num_layers=config.num_layers,
        num_pages=8,
        page_size=4,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    table = RequestTable.for_cache(cache, max_requests=1, max_seq_len=16)
    slot, hidden, rows = table.open(), draft.project(features), []
    for i in range(ROWS):
        table.reserve({slot: i + 1})
        batch, _ = make_batch(cache, table, slots=[slot], query_lens=[1], seq_lens=[i + 1])
        with pg.forward_context(attention=batch):
            rows.append(draft(ids[i : i + 1], positions[i : i + 1], hidden[i : i + 1]))
    torch.testing.assert_close(torch.cat(rows), outputs(draft)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [EAGLE1, replace(EAGLE3, qk_norm=True)], ids=["eagle1", "eagle3"])
def test_a_head_is_one_graph_for_all_token_counts(
    head: Head, tmp_path: Path, target: torch.nn.Module
) -> None:
    draft = load_draft(write(tmp_path, *original(head, head.weights())), target)
    ids, positions, features = inputs(draft)
    hidden = draft.project(features)
    compiled = torch.compile(draft, fullgraph=True, dynamic=True, backend="eager")
    for rows in (5, 2, 9):
        with packed(rows), torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            torch.testing.assert_close(
                compiled(ids[:rows], positions[:rows], hidden[:rows]),
                draft(ids[:rows], positions[:rows], hidden[:rows]),
            )


def test_training_may_bring_its_own_attention(tmp_path: Path, target: torch.nn.Module) -> None:
    draft = load_draft(write(tmp_path, *original(EAGLE3, EAGLE3.weights())), target)
    expected = outputs(draft)[0]
    for layer in draft.layers:
        layer.self_attn.attend = partial(dense, calls := [])
    ids, positions, features = inputs(draft)
    with torch.enable_grad():
        hidden = draft(ids, positions, draft.project(features))
        hidden.sum().backward()
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)
    assert calls == [0] and draft.fc.weight.grad is not None


def dense(
    calls: list[int], q: Tensor, k: Tensor, v: Tensor, *, layer: int, scale: float, window: int | None
) -> Tensor:
    calls.append(layer)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
