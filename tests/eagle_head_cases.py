"""Draft heads from checkpoints against the reference of eagle_heads.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from eagle_heads import (
    Head,
    Reference,
    make_target,
)
from safetensors.torch import load_file
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.eagle.head.draft import DraftModel

ROWS = 11
TARGET = make_target()

AUX = "eagle_aux_hidden_state_layer_ids"


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


def sharded(folder: Path, save: Callable[..., None], suffix: str, index: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"part-{i % 2}{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        save({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / index).write_text(json.dumps({"weight_map": files}))
