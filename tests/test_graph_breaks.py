"""Frames behind a graph break: graphs of sizes alone, graphs on another device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from internals import state, traces
from torch import Tensor, nn
from toys import BOTH, WIDTH, assert_same, compiled, ops, rows, through_torch

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


class Sizes(nn.Module):
    """The second frame gets a number and no tensor; the third only computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        y, count = ops.mix(self.linear(x)), x.shape[0]
        torch._dynamo.graph_break()
        positions = torch.arange(count + 1, device=y.device)
        torch._dynamo.graph_break()
        twice = count * 2
        torch._dynamo.graph_break()
        return y, positions, twice


@BOTH
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_graph_of_sizes_alone_runs(entry: Callable, compiler: str, device: torch.device) -> None:
    model = Sizes().to(device)
    fast = entry(model, compiler=compiler)
    with pg.counters.expect(failed_captures=0):
        for count in (3, 4, 7, 8, 9, 2, 3, 7):
            x = rows(count, device)
            assert_same(fast(x), model(x))


def asks(x: Tensor) -> tuple[Tensor, bool, bool]:
    return ops.mix(x) * 2, x.shape[0] > 5, x.shape[0] % 3 == 0


@pytest.mark.parametrize("entry", [compiled, through_torch], ids=["pg.compile", "torch.compile"])
def test_an_answer_about_sizes_is_returned_with_the_results(entry: Callable, device: torch.device) -> None:
    """Whether the sequence is long, say: Dynamo leaves the answer to the graph."""
    fast = entry(asks)
    fast(rows(3, device))
    fast(rows(5, device))
    with pg.counters.expect(fallbacks=0):
        for count in (3, 4, 6, 7, 8, 5, 6):
            x = rows(count, device)
            found, *answers = fast(x)
            wanted, *right = asks(x)
            assert_same(found, wanted)
            assert answers == right and all(type(answer) is bool for answer in answers)


class Parts(nn.Module):
    """The second linear stays on its device whatever the first one's is."""

    def __init__(self, first: torch.device, second: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, device=first)
        self.second = nn.Linear(WIDTH, WIDTH, device=second)

    def forward(self, x: Tensor) -> Tensor:
        y = ops.mix(self.first(x)).to(self.second.weight.device)
        torch._dynamo.graph_break()
        return ops.mix(self.second(y))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["its own pool", "a given pool"])
@pytest.mark.parametrize("first", ["cuda", "cpu"])
def test_a_part_on_the_cpu_has_a_pool_of_its_own(first: str, given: bool) -> None:
    second = "cpu" if first == "cuda" else "cuda"
    model = Parts(torch.device(first), torch.device(second))
    pool = pg.GraphPool() if given else None
    fast = compiled(model, pool=pool)
    for count in (3, 3, 7, 4, 8):
        x = rows(count, torch.device(first))
        assert_same(fast(x), model(x))
    assert {one.device for one in state(fast).pools if one.device} >= {torch.device("cpu")}


def test_traces_on_two_devices_capture_in_two_pools(device: torch.device) -> None:
    model = Parts(device, device)
    fast = compiled(model)
    fast(rows(3, device))
    shared, here = state(fast), traces(fast)[0].program.device
    assert {trace.pool for trace in traces(fast)} == {shared.pool_for(here)} == {shared.pool}
    other = shared.pool_for(torch.device("meta"))
    assert other is not shared.pool and other is shared.pool_for(torch.device("meta"))
    assert shared.pools == (shared.pool, other)


def test_a_given_pool_of_another_device_is_left_alone_by_parts_on_the_cpu() -> None:
    pool = pg.GraphPool()
    pool.join(torch.device("meta"), Owner())
    model = Parts(torch.device("cpu"), torch.device("cpu"))
    fast = compiled(model, pool=pool)
    with pg.counters.expect(replays=2, fallbacks=0):
        for _ in range(2):
            x = rows(3, torch.device("cpu"))
            assert_same(fast(x), model(x))
    assert pool.device == torch.device("meta") and pool.bytes() == 0
    assert pg.explain(fast).pool_bytes > 0


class Owner:
    """Whoever captured into a pool first."""

    def drop_graphs(self) -> None:
        """It has none."""


def test_sizes_behind_a_break_are_guarded_by_dynamo(device: torch.device) -> None:
    """How many rows come after the break depends on values: none, one or more."""

    def model(x: Tensor) -> Tensor:
        kept = (x * 2)[x[:, 0] > 0]
        torch._dynamo.graph_break()
        return x + (kept * 3).sum(0)

    fast = compiled(model)
    for positive in (3, 2, 0, 5, 1, 1, 0, 4):
        x = rows(5, device).abs()
        x[positive:] *= -1
        assert_same(fast(x), model(x))


def test_one_token_after_others_behind_a_break(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + y.shape[0] if y.shape[0] > 1 else y

    fast = compiled(model)
    for count in (8, 1, 2, 7, 1, 3, 1):
        x = rows(count, device)
        assert_same(fast(x), model(x))


def with_a_result(x: Tensor) -> Tensor:
    y = ops.mix(x) + 1
    torch._dynamo.graph_break()
    return y * 2 + x


def with_a_view(x: Tensor) -> Tensor:
    y = x[None]
    torch._dynamo.graph_break()
    return (y * 2 + x)[0]


def with_more_rows(x: Tensor) -> Tensor:
    y = torch.cat([x, x * 3])
    torch._dynamo.graph_break()
    return ops.mix(y)[: x.shape[0]] + x


def with_two_results(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    z = ops.mix(y)
    torch._dynamo.graph_break()
    return y + z + x


def with_a_sum(x: Tensor) -> Tensor:
    y = x.sum(0)
    torch._dynamo.graph_break()
    return y + x


@pytest.mark.parametrize("model", [with_a_result, with_a_view, with_more_rows, with_two_results, with_a_sum])
def test_an_argument_meets_results_behind_a_break(model: Callable, device: torch.device) -> None:
    """Dynamo would fix the sizes of results, and of the argument with them."""
    fast = compiled(model)
    for count in (6, 9, 3, 6, 1, 12, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("model, frames", [(with_a_result, 2), (with_two_results, 3)])
def test_one_trace_per_part_serves_all_sizes(model: Callable, frames: int, device: torch.device) -> None:
    fast, counts = compiled(model, capture_sizes=[4, 16], max_tokens=16), (6, 9, 3, 6, 12, 3)
    sizes = 2  # of which the first calls are captured
    expected = {"traces": frames, "tapes": frames * sizes, "replays": frames * (len(counts) - sizes)}
    with pg.counters.expect(**expected, fallbacks=0):
        for count in counts:
            fast(rows(count, device))


def view_of_a_result(x: Tensor) -> Tensor:
    y = ops.mix(x) + 1
    later = y[:, 1:]
    torch._dynamo.graph_break()
    later.mul_(2)
    return y * 1


def view_of_an_argument(x: Tensor) -> Tensor:
    later, y = x[:, 1:], ops.mix(x) + 1
    torch._dynamo.graph_break()
    later.mul_(2)
    return y + x


BY_TORCH = partial(torch.compile, backend="piecewise", options={"compiler": "eager"})


@pytest.mark.parametrize("compile", [compiled, BY_TORCH], ids=["pg.compile", "torch.compile"])
@pytest.mark.parametrize(("model", "blocked"), [(view_of_a_result, True), (view_of_an_argument, False)])
def test_views_are_written_behind_a_break(
    model: Callable, blocked: bool, compile: Callable, device: torch.device
) -> None:
    fast = compile(model)
    before = pg.counters.snapshot().get("fallbacks:returns_a_view", 0)
    for count in (3, 3, 5, 3, 1, 8, 3):
        x = rows(count, device)
        mine, theirs = x.clone(), x.clone()
        assert_same(fast(mine), model(theirs))
        assert_same(mine, theirs)
    assert (pg.counters.snapshot().get("fallbacks:returns_a_view", 0) > before) == blocked


@BOTH
def test_static_outputs_last_until_the_forward_ends(entry: Callable, device: torch.device) -> None:
    """The traces behind a break replay in the memory of the trace before it."""

    def model(x: Tensor) -> Tensor:
        first = ops.mix(x) + 1
        torch._dynamo.graph_break()
        second = ops.mix(first * 2) * 3
        torch._dynamo.graph_break()
        return ops.mix(second - 1) + first + second

    fast = entry(model, compiler="eager", outputs="static")
    for count in (3, 3, 5, 3, 8, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


def double(x: Tensor) -> Tensor:
    return ops.mix(x) * 2 + 1


@BOTH
def test_static_outputs_of_functions_that_the_forward_calls(entry: Callable, device: torch.device) -> None:
    """Dynamo does not trace a frame with a break in a loop, and traces the functions that it calls."""

    def model(x: Tensor) -> Tensor:
        found = []
        for _ in range(3):
            x = double(x)
            found.append(x)
            torch._dynamo.graph_break()
        return torch.stack(found)

    fast = entry(model, compiler="eager", outputs="static")
    for count in (3, 3, 5, 3, 8, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


def cells_behind_a_break(x: Tensor) -> Tensor:
    """Comprehensions read locals through cells, one of which is set behind the break."""
    factor = x.shape[1]
    parts = [x * factor for _ in range(2)]
    torch._dynamo.graph_break()
    factor = factor + 1
    return parts[0] + sum(part * factor for part in parts)


def test_locals_of_comprehensions_behind_a_break(device: torch.device) -> None:
    fast = torch.compile(cells_behind_a_break, backend="piecewise")
    for n in (5, 7, 5):
        x = rows(n, device)
        torch.testing.assert_close(fast(x), cells_behind_a_break(x))


def test_a_function_without_weights_is_explained_by_what_is_behind_its_breaks(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x * 2

    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "capture_sizes": [4]})
    for _ in range(3):
        fast(torch.ones(4, WIDTH, device=device))
    assert sum(bucket.replays for trace in pg.explain(fast).traces for bucket in trace.buckets) == 2
