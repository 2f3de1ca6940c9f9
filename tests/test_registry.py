"""A sample of transformers' registry under plain torch.compile: every call is right, and graphs serve it.

`python -m benchmarks.bench_registry` does this for every model.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_registry import Variant, is_served, model_row, summary

# A window that ends the range of a trace, experts, a mask that is cut out, a residual that dropout returns,
# an encoder, a scan over chunks.
SAMPLE = ["gemma3", "mixtral", "bloom", "gptj", "bert-masked", "xlnet"]


@pytest.mark.parametrize("name", SAMPLE)
def test_every_call_of_the_last_round_is_a_replay(name: str, device: torch.device) -> None:
    row = model_row(Variant(name), "eager", str(device), seconds=300)
    assert row is not None and "error" not in row, row
    assert row["wrong"] == [] and row["fallbacks"] == {} and row["replayed"] == row["calls"] == 11
    assert is_served(row)


def test_models_without_experts_are_left_out_where_experts_are_asked_for() -> None:
    assert model_row(Variant("bert-masked", experts="batched_mm"), "eager", "cpu", seconds=300) is None


def test_a_model_that_raises_or_runs_without_graphs_is_told() -> None:
    unbuilt = model_row(Variant("no such model"), "eager", "cpu", seconds=300)
    assert unbuilt is not None and unbuilt["unusable"].startswith("KeyError")
    row = model_row(Variant("bert-masked"), "no such compiler", "cpu", seconds=300)
    assert row is not None and "no such compiler" in row["error"]
    left = {"wrong": [], "calls": 11, "replayed": 9, "fallbacks": {"derived_size": 2}, "graphs": 3}
    unseen = left | {"fallbacks": {}}
    alone = {"unusable": "IndexError: its own"}
    found = summary(
        [row, alone, left, left | {"replayed": 11, "fallbacks": {}}, left | {"wrong": [5]}, unseen]
    )
    assert (found["models"], found["served"], found["wrong"], found["errors"]) == (5, 1, 1, 1)
    assert found["unusable"] == 1
    assert found["not_served_by_reason"] == {"derived_size": 2, "BackendCompilerFailed": 1, "no graph": 1}
