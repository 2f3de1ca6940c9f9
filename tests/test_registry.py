"""A sample of transformers' registry under plain torch.compile: every call is right, and graphs serve it.

`python -m benchmarks.bench_registry` does this for every model.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from benchmarks.bench_registry import Variant, is_served, model_row, summary, with_experts
from benchmarks.registry_sides import Sides, Verdict

# A window that ends the range of a trace, experts, a mask that is cut out, a residual that dropout returns,
# an encoder, a scan over chunks.
SAMPLE = ["gemma3", "mixtral", "bloom", "gptj", "bert-masked", "xlnet"]


@pytest.mark.parametrize("name", SAMPLE)
def test_every_call_of_the_last_round_is_a_replay(name: str, device: torch.device) -> None:
    row = model_row(Variant(name), "eager", str(device), seconds=300)
    assert "error" not in row, row
    assert row["wrong"] == [] and row["fallbacks"] == {} and row["replayed"] == row["calls"] == 11
    assert is_served(row)


def test_models_without_experts_are_left_out_where_experts_are_asked_for() -> None:
    assert with_experts(["bert-masked", "mixtral", "no such model"]) == ["mixtral", "no such model"]


class OtherWhenCompiled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(128, 4))

    def forward(self, input_ids: Tensor, **_: object) -> dict[str, Tensor]:
        rows = self.table[input_ids]
        return {"logits": rows + 1 if torch.compiler.is_compiling() else rows}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_difference_that_plain_torch_compile_makes_too_is_told_apart(dtype: torch.dtype) -> None:
    exact = OtherWhenCompiled()
    model = deepcopy(exact).to(dtype)
    compiled = torch.compile(model, backend="eager", dynamic=False)
    assert Sides("llama", exact, model, model).verdict(5) is Verdict.RIGHT
    assert Sides("llama", exact, model, compiled).verdict(5) is Verdict.AS_COMPILED
    wrong = OtherWhenCompiled().to(dtype)
    assert Sides("llama", exact, model, wrong).verdict(5) is Verdict.WRONG


def test_a_model_that_raises_or_runs_without_graphs_is_told() -> None:
    unbuilt = model_row(Variant("no such model"), "eager", "cpu", seconds=300)
    assert unbuilt["unusable"].startswith("KeyError")
    row = model_row(Variant("bert-masked"), "no such compiler", "cpu", seconds=300)
    assert "no such compiler" in row["error"]
    left = {"wrong": [], "calls": 11, "replayed": 9, "fallbacks": {"derived_size": 2}, "graphs": 3}
    unseen = left | {"fallbacks": {}}
    alone = {"unusable": "IndexError: its own"}
    found = summary(
        [row, alone, left, left | {"replayed": 11, "fallbacks": {}}, left | {"wrong": [5]}, unseen]
    )
    assert (found["models"], found["served"], found["wrong"], found["errors"]) == (5, 1, 1, 1)
    assert found["unusable"] == 1
    assert found["not_served_by_reason"] == {"derived_size": 2, "BackendCompilerFailed": 1, "no graph": 1}
