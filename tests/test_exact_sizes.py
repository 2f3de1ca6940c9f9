"""Graphs of single combinations of sizes, for traces without buckets: a batch and a length that both vary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from toys import WIDTH, assert_same, fallbacks, ops

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
OPTIONS = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, "batch_sizes": ()}


class Encoder(nn.Module):
    """Attention over the tokens of each request of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.before(x)[:, None]
        return self.after(scaled_dot_product_attention(q, q, q)[:, 0]) + x


def batch(size: tuple[int, int], device: torch.device) -> Tensor:
    return torch.randn(*size, WIDTH, device=device)


def encoder(device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()  # else Dynamo knows which sizes of this code's argument vary
    model = Encoder().to(device)
    return model, torch.compile(model, backend="piecewise", dynamic=True, options={**OPTIONS, **options})


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_combination_that_returns_has_graphs(compiler: str, device: torch.device) -> None:
    model, fast = encoder(device, compiler=compiler)
    pairs = [(2, 3), (3, 5), (2, 5)]
    for expected in (
        {"traces": 1, "tapes": 0, "fallbacks:second_dynamic_dimension": len(pairs)},
        {"traces": 0, "tapes": len(pairs), "captures": len(pairs), "fallbacks": 0},
        {"tapes": 0, "replays": len(pairs), "fallbacks": 0},
    ):
        with pg.counters.expect(**expected):
            for pair in pairs:
                x = batch(pair, device)
                assert_same(fast(x), model(x))
    reports = pg.explain(fast).traces
    assert [report.sizes.count("=") for report in reports[1:]] == [2] * len(pairs)


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=3, max_size=8))
def test_any_batch_and_length_in_any_order(pairs: list[tuple[int, int]]) -> None:
    model, fast = encoder(torch.device("cpu"))
    with torch.no_grad():
        for pair in (*pairs, *reversed(pairs), *pairs):
            x = batch(pair, torch.device("cpu"))
            assert_same(fast(x), model(x))


def test_the_latest_combinations_are_kept(device: torch.device) -> None:
    model, fast = encoder(device, max_tokens=64)
    pairs = [(2, length) for length in range(2, 37)]
    for pair in (*pairs, *pairs):
        fast(batch(pair, device))
    with pg.counters.expect(replays=32, fallbacks=0):
        for pair in reversed(pairs[-32:]):
            x = batch(pair, device)
            assert_same(fast(x), model(x))
    with pg.counters.expect(replays=0, tapes=1):
        fast(batch(pairs[0], device))


def test_a_replaced_weight_and_a_reset_are_noticed(device: torch.device) -> None:
    model, fast = encoder(device)
    x = batch((2, 3), device)
    for _ in range(3):
        fast(x)
    model.before.bias = nn.Parameter(torch.randn(WIDTH, device=device))
    for _ in range(3):
        assert_same(fast(x), model(x))
    with pg.counters.expect(replays=1):
        fast(x)
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1):
        for _ in range(2):
            assert_same(fast(x), model(x))


def test_a_number_that_no_tensor_has_as_a_size(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x) * y.shape[0]

    fast = torch.compile(model, backend="piecewise", options=OPTIONS)
    x = torch.randn(4, WIDTH, device=device)
    for count in (5, 6, 7, 6, 7, 6, 7):
        y = torch.zeros(count, device=device)
        assert_same(fast(x, y), model(x, y))
    assert fallbacks(fast) == {"number_varies": 2}


def test_without_graphs_it_stays_compiled(device: torch.device) -> None:
    model, fast = encoder(device, cuda_graphs="off")
    with pg.counters.expect(tapes=0, **{"fallbacks:second_dynamic_dimension": 3}):
        for _ in range(3):
            x = batch((2, 3), device)
            assert_same(fast(x), model(x))


def test_equal_layers_of_one_forward_are_no_combination_that_returns(device: torch.device) -> None:
    """They share a trace of Dynamo, where the forward breaks between them."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                torch._dynamo.graph_break()
            return x

    model = Layers().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=True, options=OPTIONS)
    sizes = [(2, 3), (3, 5), (4, 7), (5, 8)]
    with pg.counters.expect(captures=0):
        for size in sizes:
            x = batch(size, device)
            assert_same(fast(x), model(x))
    with pg.counters.expect(captures=3, fallbacks=0):
        fast(batch(sizes[-1], device))
