"""What `_torch` says of graph breaks, on the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import pytest
import torch
import traced
from torch import Tensor
from torch.fx import GraphModule
from traced import Small, Traced, dynamic, trace

from piecewise_graph import _torch

pytestmark = pytest.mark.usefixtures("no_grad")


def breaks(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def doubled(x: Tensor) -> Tensor:
    return x * 2


@partial(torch._dynamo.disable, recursive=False)
def skipped(x: Tensor) -> Tensor:
    return doubled(x)


@pytest.mark.parametrize(
    "model, parts",
    [
        (lambda x: x * 2, [False]),
        (Small(), [False]),
        (breaks, [False, True]),
        (lambda x: breaks(x) + 1, [True, True, True]),
        (lambda x: skipped(x) + 1, [True, True]),
    ],
    ids=["function", "module", "broken", "broken inside", "inside of a skipped one"],
)
def test_a_backend_knows_that_it_gets_a_part(model: Callable[..., Any], parts: list[bool]) -> None:
    found: list[bool] = []
    trace(model, torch.ones(3, 8), look=lambda gm: found.append(_torch.traces_a_part(traced.__file__)))
    assert found == parts


def test_what_cannot_be_traced_whole_raises_before_it_runs() -> None:
    ran: list[int] = []

    @torch.compiler.disable
    def note() -> None:
        ran.append(1)

    def model(x: Tensor) -> Tensor:
        note()
        return x + 1

    fast = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError), _torch.no_graph_breaks():
        fast(torch.ones(3))
    assert not ran
    fast(torch.ones(3))
    assert ran == [1]


def test_a_backend_gets_the_code_that_dynamo_makes_of_its_frame() -> None:
    made: list[CodeType] = []

    def look(gm: GraphModule) -> None:
        _torch.await_code(made.append)

    for _ in range(2):
        trace(doubled, torch.ones(3), look=look)
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))  # nobody waits for this one's
    assert len(made) == 2
    assert all("__compiled_fn" in " ".join(code.co_names) for code in made)


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (lambda x: x * x.stride(0), False),
        (lambda x: x * x.t().contiguous().stride(0), True),
        (lambda x: x.t().is_contiguous() * x, False),
        (lambda x: (x.t() + 1).contiguous().is_contiguous() * x, True),
        (doubled, False),
    ],
    ids=["a number", "a size", "numbers of a view", "sizes of a result", "nothing"],
)
def test_a_backend_knows_whether_the_forward_asked_for_strides_that_are_symbols(
    model: Callable[..., Any], asked: bool
) -> None:
    _torch.note_layouts_asked()
    found: list[bool] = []
    trace(model, dynamic(5, 8), look=lambda gm: found.append(_torch.asks_for_strides()))
    assert found == [asked]


@pytest.mark.parametrize(
    ("model", "asked"), [(lambda x: x * x.storage_offset(), True), (doubled, False)], ids=["it", "nothing"]
)
def test_a_backend_knows_whether_the_forward_asked_for_an_offset_that_varies(
    model: Callable[..., Any], asked: bool
) -> None:
    _torch.note_layouts_asked()
    seen = Traced(lambda gm: _torch.asks_for_offsets())
    compiled = torch.compile(model, backend=seen, dynamic=True)
    for start in (2, 3):
        compiled(torch.zeros(9, 8)[start : start + 5])
    assert seen.seen[-1] == asked


def test_strides_that_follow_from_sizes_are_told() -> None:
    def look(gm: GraphModule) -> dict[str, bool]:
        values = {node.name: _torch.example_value(node) for node in gm.graph.nodes if node.op != "output"}
        return {name: _torch.has_symbolic_strides(value) for name, value in values.items()}

    (told,) = trace(lambda x: x.t().contiguous() * 2, dynamic(5, 8), look=look).seen
    assert list(told.values())[-3:] == [False, True, True]


def test_nobody_awaits_code_outside_of_a_trace() -> None:
    _torch.await_code(lambda code: pytest.fail("there is none"))
    torch.compile(doubled, backend="eager")(torch.ones(3))
