"""The tiny models that other tests use: what is built, and what is said not to be."""

from __future__ import annotations

import pytest
import torch
from tiny_models import ALL_NAMES, NAMES, build, call, random_ids, rows


def test_nearly_every_language_model_of_transformers_is_built() -> None:
    assert len(ALL_NAMES) - len(NAMES) < 12 and len(NAMES) > 180


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("name", ["llama", "gemma4_text", "deepseek_v3", "mamba2", "bert-masked"])
def test_a_model_is_small_and_the_same_at_every_call(name: str) -> None:
    ids = random_ids(9)
    first, second = build(name), build(name)
    assert sum(weight.numel() for weight in first.parameters()) < 3_000_000
    answer = rows(first(**call(name, ids)))
    assert answer.shape[:2] == (1, 9) and answer.isfinite().all()
    assert torch.equal(answer, rows(second(**call(name, ids))))
