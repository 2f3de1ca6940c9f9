"""Floats that Dynamo leaves open (`dynamic=True`, a float that changed) are constants in graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from toys import WIDTH, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
OPTIONS = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8}


class Model(nn.Module):
    """Floats of many kinds: an embedding's norm, an eps, a scale, an attribute that the caller changes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, WIDTH), nn.LayerNorm(WIDTH, eps=0.25)
        self.scale, self.gain = 0.3, 1.5

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.embed(ids) * self.gain)[None]
        return h[0] + scaled_dot_product_attention(h, h, h, is_causal=True, scale=self.scale)[0]


def same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def by_torch_compile(model: Any, compiler: str = "eager", **options: Any) -> Any:
    torch._dynamo.reset()  # else Dynamo knows what varied between tests
    return torch.compile(model, backend="piecewise", options=OPTIONS | {"compiler": compiler}, **options)


def some_ids(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, 16, (count,), device=device)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_models_of_dynamic_sizes_have_graphs(compiler: str, device: torch.device) -> None:
    model = Model().to(device)
    fast = by_torch_compile(model, compiler, dynamic=True)
    with pg.counters.expect(traces=1, tapes=2, replays=5, fallbacks=0):
        for count in (3, 5, 2, 4, 7, 8, 6):
            ids = some_ids(count, device)
            same(fast(ids), model(ids))
    _, _, conditions = pg.explain(fast).traces[0].sizes.partition("where ")
    assert all(
        each.endswith("<= 2147483647") for each in conditions.split(", ") if each
    )  # of Inductor, on GPUs


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_float_that_changes_is_checked(dynamic: bool | None, device: torch.device) -> None:
    """Each of its first values has graphs of its own. Then what computes with it runs between graphs."""
    model = Model().to(device)
    fast = by_torch_compile(model, dynamic=dynamic)
    gains = [1.5, 2.0, 2.5, 3.0]
    for gain in (*gains, *reversed(gains), *gains):
        model.gain = gain
        ids = some_ids(4, device)
        same(fast(ids), model(ids))
    with pg.counters.expect(replays=len(gains), traces=0, fallbacks=0):
        for gain in gains:
            model.gain = gain
            fast(some_ids(4, device))
    for gain in (5.0, 6.0, 7.0, 8.0):
        model.gain = gain
        ids = some_ids(4, device)
        same(fast(ids), model(ids))
    with pg.counters.expect(traces=0, replays=1, unpadded_segments=1, fallbacks=0):
        model.gain = 9.0
        ids = some_ids(4, device)
        same(fast(ids), model(ids))


def test_an_argument_that_is_a_float(device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor, factor: float) -> Tensor:
        return linear(x).relu() * factor

    fast = by_torch_compile(model, dynamic=True)
    for _ in range(2):
        for factor in (0.5, -0.5):
            x = rows(4, device)
            same(fast(x, factor), model(x, factor))
    with pg.counters.expect(replays=2, fallbacks=0):
        for factor in (0.5, -0.5):
            x = rows(4, device)
            same(fast(x, factor), model(x, factor))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) * self.factor
        return found


def test_many_models_of_a_class_have_floats_of_their_own(device: torch.device) -> None:
    models = [Scaled(0.1 * number).to(device) for number in range(1, 8)]
    all_fast = [torch.compile(m, backend="piecewise", options=OPTIONS, dynamic=True) for m in models]
    for _ in range(2):
        for model, fast in zip(models, all_fast, strict=True):
            x = rows(4, device)
            same(fast(x), model(x))
    with pg.counters.expect(replays=len(models), unpadded_segments=0, fallbacks=0):
        for fast in all_fast:
            fast(rows(4, device))


BY_FLOATS: dict[str, Callable[[int, float], int]] = {
    "int": lambda n, factor: int(n * factor),
    "round": lambda n, factor: round(n * factor),
    "ceil": lambda n, factor: math.ceil(n * factor),
    "divided": lambda n, factor: int(n // (factor * 8)),
    "literal": lambda n, factor: int(n * 0.5),
}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("size", BY_FLOATS)
def test_a_size_that_is_computed_by_floats_runs_compiled(
    size: str, compiler: str, device: torch.device
) -> None:
    """A segment would have to compute it. A factor of 1 is an integer, which Dynamo leaves open too."""
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor, factor: float) -> Tensor:
        found: Tensor = linear(x)[: BY_FLOATS[size](x.shape[0], factor)] * 2
        return found

    fast = by_torch_compile(model, compiler, dynamic=True)
    for factor in (0.5, 1, 0.25):
        for count in (8, 4, 6):
            x = rows(count, device)
            same(fast(x, factor), model(x, factor))
    assert pg.counters.snapshot()["fallbacks:a_symbolic_float_crosses_a_cut"] > 0


def test_a_splitting_op_takes_a_size_that_is_computed_by_floats(device: torch.device) -> None:
    """Outside of segments it is a number of the call."""
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        h = linear(x)[None]
        found: Tensor = scaled_dot_product_attention(h, h, h, scale=int(x.shape[0] * 0.5))[0]
        return linear(found)

    fast = by_torch_compile(model, dynamic=True)
    counts = (4, 8, 6)
    for count in (*counts, *counts):
        x = rows(count, device)
        same(fast(x), model(x))
    with pg.counters.expect(replays=len(counts), fallbacks=0):
        for count in counts:
            x = rows(count, device)
            same(fast(x), model(x))


def test_one_model_says_nothing_of_the_floats_of_the_next(device: torch.device) -> None:
    """torch knows the floats of a trace by the names of their symbols, which traces share."""
    by_torch_compile(Model().to(device), dynamic=True)(some_ids(4, device))
    seen: list[Any] = []

    def look(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(inputs)
        return gm.forward

    def tripled(x: Tensor, factor: float) -> Tensor:
        return x * factor

    torch.compile(tripled, backend=look, dynamic=True)(rows(4, device), 3.0)
    assert any(isinstance(value, Tensor) and value.dtype == torch.float64 for value in seen)


def test_a_float_that_changes_from_call_to_call_beside_sizes_that_do() -> None:
    """The code for a size is compiled in the middle of a call, where Dynamo has no trace to begin anew."""

    def scaled(x: Tensor, scale: float) -> Tensor:
        return x @ torch.ones(WIDTH, WIDTH) * scale

    fast = by_torch_compile(scaled, "aot_eager", dynamic=True)
    for call in range(14):
        x, scale = rows(call % 5 + 2, torch.device("cpu")), (0.5, 1.5, 2.0, 0.0, 3.25, 4.5)[call % 6]
        same(fast(x, scale), scaled(x, scale))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_float_that_was_read_back_is_open_behind_the_break(
    compiler: str, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: Tensor) -> Tensor:
        return x * x[0, 0].item()

    fast = by_torch_compile(model, compiler)
    for count in (4, 4, 4, 5, 5, 5, 6, 6):
        x = rows(count, device)
        same(fast(x), model(x))
    assert "Backend compiler" not in caplog.text
