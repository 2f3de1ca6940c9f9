"""Draft heads from checkpoints: three layouts against a plain torch reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_head_cases import ROWS, TARGET, check, outputs
from eagle_heads import (
    EAGLE1,
    EAGLE3,
    LAYOUTS,
    LEAN,
    VOCABULARY,
    Head,
    make_target,
    speculators,
    write,
)
from hypothesis import given, settings, strategies as st

from piecewise_graph.eagle.head.checkpoints import load_draft

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")


@pytest.fixture
def target() -> torch.nn.Module:
    return TARGET


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
