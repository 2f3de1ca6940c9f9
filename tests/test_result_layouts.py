"""Results lie in memory as the uncompiled model's do, whatever bucket answered the call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_segment_layouts import HEADS, TO_HEADS
from torch import Tensor
from toys import WIDTH, assert_same, compiled, ops, rows, through_torch

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def model(layout: str) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return TO_HEADS[layout](ops.mix(x * 2).view(-1, HEADS, WIDTH // HEADS))

    return forward


@pytest.mark.parametrize("entry", [compiled, through_torch], ids=["pg.compile", "torch.compile"])
@pytest.mark.parametrize("layout", TO_HEADS)
def test_strides_do_not_depend_on_the_bucket(entry: Callable, layout: str, device: torch.device) -> None:
    eager = model(layout)
    fast = entry(eager)
    fast(rows(3, device))
    fast(rows(5, device))  # plain torch.compile traces the first size alone
    with pg.counters.expect(fallbacks=0):
        for count in (8, 7, 5, 4, 3, 2, 7):
            x = rows(count, device)
            found, wanted = fast(x), eager(x)
            assert_same(found, wanted)
            assert found.stride() == wanted.stride(), count


@pytest.mark.parametrize("layout", TO_HEADS)
def test_frozen_calls_return_the_same_strides(layout: str, device: torch.device) -> None:
    eager = model(layout)
    fast = compiled(eager)
    frozen = pg.freeze(fast, rows(8, device))
    for count in (8, 7, 3, 3):
        x = rows(count, device)
        for _ in range(2):
            assert frozen(x).stride() == eager(x).stride()


def test_strides_of_a_bucket_are_no_second_size_behind_a_graph_break(device: torch.device) -> None:
    """Dynamo takes a stride that varies in another way than the sizes do for one more size."""

    def broken(x: Tensor) -> Tensor:
        y = ops.mix(x * 2)[None].contiguous() * 2
        torch._dynamo.graph_break()
        return ops.mix(y[0]) + y[0]

    fast = torch.compile(broken, backend="piecewise", options={"compiler": "eager", "max_tokens": 16})
    with pg.counters.expect(**{"fallbacks:second_dynamic_dimension": 0}):
        for count in (5, 6, 7, 9, 11, 5, 6, 7, 9, 11):
            x = rows(count, device)
            assert_same(fast(x), broken(x))


def test_a_view_of_a_result_is_guarded_alike_by_calls_with_and_without_graphs(device: torch.device) -> None:
    """Dynamo guards what a tensor is a view of, and a replay returns no views."""

    def broken(x: Tensor) -> Tensor:
        y = (ops.mix(x) * 2)[:, 1:].unsqueeze(0)
        torch._dynamo.graph_break()
        return ops.mix(y[0]) + 1

    fast, counts = through_torch(broken), (5, 6, 20, 5, 6, 7, 3, 2)
    frames, forms = 2, 2  # of its first size alone, and of all sizes
    with pg.counters.expect(traces=frames * forms):
        for count in counts:
            x = rows(count, device)
            assert_same(fast(x), broken(x))
