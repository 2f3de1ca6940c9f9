"""Compiled models and frozen callables that are called inside of somebody else's torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import Blocks, assert_same, compiled, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
TOKENS = (4, 4, 3, 8, 1, 4)


def freeze(fast: Any, device: torch.device) -> Any:
    return pg.freeze(fast, rows(4, device))


@pytest.mark.parametrize("entry", [lambda fast, device: fast, freeze], ids=["pg.compile", "pg.freeze"])
def test_calls_are_replayed_between_the_traces_of_the_outer_function(
    entry: Callable[[Any, torch.device], Any], device: torch.device
) -> None:
    model = Blocks().to(device)
    inner = entry(compiled(model), device)
    for tokens in TOKENS:
        inner(rows(tokens, device))

    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return inner(x * 2) + 1

    with pg.counters.expect(replays=len(TOKENS), traces=0, fallbacks=0):
        for tokens in TOKENS:
            x = rows(tokens, device)
            assert_same(step(x), model(x * 2) + 1)


def test_a_model_is_traced_by_its_first_call_inside_of_another_trace(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    step = torch.compile(lambda x: fast(x) * 2, backend="eager")
    for tokens in TOKENS:
        x = rows(tokens, device)
        assert_same(step(x), model(x) * 2)


def test_a_trace_that_may_not_break_says_whose_call_it_met(device: torch.device) -> None:
    fast = compiled(Blocks().to(device))
    step = torch.compile(lambda x: fast(x) * 2, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="piecewise_graph: a call of a compiled model"):
        step(rows(3, device))
