"""New draft heads, their way to disk and back, and their use in the library."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head_cases import AUX, ROWS, TARGET, check, inputs, outputs, packed
from eagle_heads import (
    EAGLE1,
    EAGLE3,
    HIDDEN,
    LAYERS,
    LEAN,
    VOCABULARY,
    Head,
    original,
    speculators,
    write,
)
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.eagle.errors import EagleError
from piecewise_graph.eagle.head.checkpoints import load_draft, save_draft
from piecewise_graph.eagle.head.draft import DraftModel
from piecewise_graph.eagle.head.draft_config import DraftConfig

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")


@pytest.fixture
def target() -> torch.nn.Module:
    return TARGET


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
