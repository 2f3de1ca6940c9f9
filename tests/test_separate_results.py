"""What the trace has copied is a copy in the compiled code too: an op that writes one of two shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from toys import assert_same, compiled, ops, rows
from traced import trace

import piecewise_graph as pg
from piecewise_graph.compiler.separate_results import separated

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("no_grad")

PAIRS: dict[str, Callable[[Tensor], Pair]] = {
    "twice": lambda y: (y.clone(), y.clone()),
    "in another shape": lambda y: (y.clone().view(-1, 2, 4), y.clone()),
    "a leading part": lambda y: ((z := torch.stack([y, y + 1]))[1].clone(), z.clone()),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_an_op_writes_one_of_two_copies(pair: Callable[[Tensor], Pair], device: torch.device) -> None:
    def model(x: Tensor) -> Pair:
        one, other = pair(x * 2)
        ops.halve(one)
        return one + 1, other + 1

    fast = compiled(model, compiler="inductor", token_dim={"x": 0})
    with pg.counters.expect(fallbacks=0):
        for count in (4, 3, 4, 1, 1):
            x = rows(count, device)
            for found, wanted in zip(fast(x), model(x), strict=True):
                assert_same(found, wanted)


def test_views_of_a_copy_stay_its_views_in_another_dtype(device: torch.device) -> None:
    def model(x: Tensor) -> Pair:
        y = x * 2
        one, other = y.clone(), y.clone()
        bits = other.view(torch.int32)
        ops.halve(one)
        ops.halve(other)
        return one + 1, bits.view(torch.float32) + 1

    fast = compiled(model, compiler="inductor")
    for count in (4, 3, 4):
        x = rows(count, device)
        for found, wanted in zip(fast(x), model(x), strict=True):
            assert_same(found, wanted)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 2), min_size=2, max_size=5), st.lists(st.integers(0, 2), min_size=3, max_size=3)
)
def test_results_share_memory_where_those_of_the_graph_do(owners: list[int], memory: list[int]) -> None:
    """Whichever the compiled code has in one memory: results that are views of one tensor stay that."""

    def graph(x: Tensor) -> tuple[Tensor, ...]:
        made = x * 1, x * 1, x * 1
        return tuple(made[owner][index:] for index, owner in enumerate(owners))

    def merged(x: Tensor) -> list[Tensor]:
        made = x * 1, x * 1, x * 1
        return [made[memory[owner]][index:] for index, owner in enumerate(owners)]

    torch._dynamo.reset()
    x = rows(6, torch.device("cpu"))
    found = separated(merged, trace(graph, x).gm)(x)
    for index, result in enumerate(found):
        assert_same(result, x[index:])
    places = [result.untyped_storage().data_ptr() for result in found]
    assert [[one == other for one in places] for other in places] == [
        [one == other for one in owners] for other in owners
    ]
