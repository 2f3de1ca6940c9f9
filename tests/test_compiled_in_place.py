"""What `module.compile` and a compiled call made is found by all that looks at a compiled model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import Blocks, assert_same, rows

import piecewise_graph as pg
from piecewise_graph.errors import NotCompiledError

pytestmark = pytest.mark.usefixtures("no_grad")

COMPILE: dict[str, Any] = {
    "backend": "piecewise",
    "options": {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8},
}


def in_place(model: nn.Module) -> Any:
    """As vLLM does."""
    model.compile(dynamic=True, **COMPILE)
    return model


def its_call(model: nn.Module) -> Any:
    """As transformers' generate does."""
    return torch.compile(model.__call__, dynamic=True, **COMPILE)


def wrapped(model: nn.Module) -> Any:
    return torch.compile(model, dynamic=True, **COMPILE)


each_way = pytest.mark.parametrize("way", [in_place, its_call, wrapped])
Way = Callable[[nn.Module], Any]


@each_way
def test_its_report_is_found(way: Way, device: torch.device) -> None:
    model = Blocks(2).to(device)
    fast = way(model)
    for n in (5, 7, 5):
        fast(rows(n, device))
    (trace,) = pg.explain(fast).traces
    assert [(bucket.tokens, bucket.replays) for bucket in trace.buckets] == [(8, 2)]


@each_way
def test_its_sizes_are_captured_beforehand(way: Way, device: torch.device) -> None:
    model = Blocks(2).to(device)
    fast, eager = way(model), Blocks(2).to(device)
    eager.load_state_dict(model.state_dict())
    report = pg.capture(fast, lambda n: rows(n, device), sizes=[4, 8], progress=False)
    assert [bucket.tokens for bucket in report.captured] == [8, 4]
    with pg.counters.expect(replays=2, captures=0):
        for n in (3, 8):
            x = rows(n, device)
            assert_same(fast(x), eager(x))


@each_way
def test_it_can_be_bisected_planned_and_frozen(way: Way, device: torch.device) -> None:
    model = Blocks(2).to(device)
    fast, eager = way(model), Blocks(2).to(device)
    eager.load_state_dict(model.state_dict())
    x = rows(5, device)
    fast(x)
    assert pg.bisect(fast, x).departure is None
    assert pg.plan(fast, [8]).buckets
    frozen = pg.freeze(fast, x)
    for _ in range(2):
        x = rows(5, device)
        assert_same(frozen(x), eager(x))


def test_a_part_of_a_model_that_is_compiled_in_place(device: torch.device) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Blocks(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * 2

    model = Whole().to(device)
    in_place(model.inner)
    model(rows(5, device)), model(rows(7, device))
    assert pg.explain(model.inner).traces


def test_a_module_that_was_never_compiled_is_refused(device: torch.device) -> None:
    model = Blocks(2).to(device)
    wrapped(model)(rows(5, device))
    with pytest.raises(NotCompiledError, match="no piecewise trace"):
        pg.explain(model)
