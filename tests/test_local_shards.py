"""Sharded weights and activations (DTensor) become local ones, with the collectives that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import values
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import piecewise_graph as pg

IDS = 42  # rows of a table, for 2 and 3 ranks


class Vocabulary(nn.Module):
    """Embedding and head of one table, as a causal LM has them."""

    def __init__(self, table: Tensor, mesh: DeviceMesh, dim: int) -> None:
        super().__init__()
        self.mesh = mesh
        self.table = nn.Parameter(distribute_tensor(table, mesh, [Shard(dim)]), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        whole = [Replicate()]
        x = nn.functional.embedding(DTensor.from_local(ids, self.mesh, whole, run_check=False), self.table)
        x = x.redistribute(placements=whole)
        y = nn.functional.linear(x, self.table)
        return y.redistribute(placements=whole).to_local().tanh()


class Moved(nn.Module):
    """Activations that go from one placement to another."""

    def __init__(self, mesh: DeviceMesh, placements: list[Any]) -> None:
        super().__init__()
        self.mesh, self.placements = mesh, placements

    def forward(self, x: Tensor) -> Tensor:
        y = DTensor.from_local(x * 2, self.mesh, [self.placements[0]], run_check=False)
        for placement in self.placements[1:]:
            y = y.redistribute(placements=[placement])
        part = y.to_local()
        part.add_(1)  # memory of its own
        return part + x.sum(-1, keepdim=True)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def _sequential(bias: bool) -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=bias), nn.ReLU(), nn.Linear(12, 8, bias=bias))
    return parallelize_module(model, _mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}), "input"


def _vocabulary(dim: int, rows: int) -> tuple[nn.Module, str]:
    table = torch.randn(rows, 12, generator=torch.Generator().manual_seed(0))
    return Vocabulary(table, _mesh(), dim), "ids"


def _moved(*placements: Any) -> tuple[nn.Module, str]:
    return Moved(_mesh(), list(placements)), "x"


def _sequence_parallel() -> tuple[nn.Module, str]:
    torch.manual_seed(0)
    plan = {"0": SequenceParallel(sequence_dim=0, use_local_output=True)}
    return parallelize_module(nn.Sequential(nn.LayerNorm(8), nn.ReLU()), _mesh(), plan), "input"


def _served(make: Callable[..., tuple[nn.Module, str]], args: tuple[Any, ...], compiler: str) -> Any:
    """Counters of calls whose answers are those of the model as it is."""
    model, name = make(*args)
    compiled = pg.compile(
        model, token_dim={name: 0}, capture_sizes=[4, 8], max_tokens=8, compiler=compiler, rank_timeout=30.0
    )
    for tokens in (7, 4, 8, 5, 3, 1):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randint(0, IDS - 5, (tokens,), generator=generator)
        given = x if name == "ids" else torch.randn(tokens, 8, generator=generator)
        torch.testing.assert_close(compiled(given), model(given))
    found = {name: count for name, count in pg.counters.snapshot().items() if count}
    pg.counters.clear()
    return found


REPLICATED, COLUMNS, SUM = Replicate(), Shard(1), Partial()
CASES = {
    "linears": (_sequential, (False,)),
    "biases": (_sequential, (True,)),
    "table by rows": (_vocabulary, (0, IDS)),
    "table by columns": (_vocabulary, (1, IDS)),
    "summed": (_moved, (SUM, REPLICATED)),
    "gathered": (_moved, (COLUMNS, REPLICATED)),
    "cut": (_moved, (REPLICATED, COLUMNS)),
    "cut and gathered": (_moved, (REPLICATED, COLUMNS, REPLICATED)),
    "as it was": (_moved, (COLUMNS, COLUMNS)),
}


WITHOUT_RULES = {
    "summed and cut": (_moved, (SUM, COLUMNS)),  # a reduce-scatter
    "sequence": (_sequence_parallel, ()),
    "uneven table": (_vocabulary, (0, IDS - 5)),  # parts of other sizes: Dynamo traces each token count
}


def _all_served(cases: dict[str, Any]) -> dict[str, Any]:
    return {case: _served(*given, "eager") for case, given in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_tensors_are_local_ones_in_graphs(ranks: int) -> None:
    for answers in values(ranks, _all_served, CASES):
        for case, found in answers.items():
            assert found["tapes"] == 2 and found["replays"] == 4, (case, found)
            assert "fallbacks" not in found and "unpadded_segments" not in found, (case, found)


def test_what_has_no_rule_answers_as_the_model_does() -> None:
    values(2, _all_served, WITHOUT_RULES)


@pytest.mark.slow
def test_inductor_compiles_collectives_into_segments() -> None:
    for found in values(2, _served, *CASES["table by rows"], "inductor"):
        assert found["tapes"] == 2 and found["replays"] == 4 and "fallbacks" not in found, found
