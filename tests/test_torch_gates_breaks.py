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
        (lambda x: x * x.stride(0), {"stride"}),
        (lambda x: (x * 2).t().is_contiguous() * x, {"is_contiguous"}),
        (lambda x: x * x.storage_offset() + x.stride(1), {"storage_offset", "stride"}),
        (doubled, set()),
    ],
    ids=["stride", "contiguity of a result", "two", "nothing"],
)
def test_a_backend_knows_what_a_forward_asked_about_layouts(
    model: Callable[..., Any], asked: set[str]
) -> None:
    _torch.note_layout_questions()
    traced = Traced(lambda gm: _torch.layout_questions())
    torch.compile(model, backend=traced, dynamic=True)(torch.zeros(9, 8)[4:])
    assert traced.seen == [asked]


def test_what_is_behind_a_break_is_told() -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    assert trace(model, torch.ones(3, 8), look=lambda gm: _torch.is_behind_a_break()).seen == [False, True]
    assert not _torch.is_behind_a_break()


def test_strides_that_follow_from_sizes_are_told() -> None:
    def look(gm: GraphModule) -> dict[str, bool]:
        values = {node.name: _torch.example_value(node) for node in gm.graph.nodes if node.op != "output"}
        return {name: _torch.has_symbolic_strides(value) for name, value in values.items()}

    (told,) = trace(lambda x: x.t().contiguous() * 2, dynamic(5, 8), look=look).seen
    assert list(told.values())[-3:] == [False, True, True]


def test_nobody_awaits_code_outside_of_a_trace() -> None:
    _torch.await_code(lambda code: pytest.fail("there is none"))
    torch.compile(doubled, backend="eager")(torch.ones(3))


def test_restarts_are_control_flow_and_other_errors_are_not() -> None:
    from torch._dynamo import exc

    assert issubclass(exc.RestartAnalysis, exc.TorchDynamoException)
    errors = [exc.TensorifyScalarRestartAnalysis(restart_reason="r"), RuntimeError("r")]

    def asked(_: GraphModule | None = None) -> list[bool]:
        return [*map(_torch.is_dynamo_control_flow, errors)]

    assert trace(lambda x: x * 2, torch.ones(2), look=asked).seen == [[True, False]]
    assert asked() == [False, False], "between traces there is nothing to restart"


def test_code_behind_a_break_is_of_its_function() -> None:
    seen = trace(breaks, torch.ones(3), look=lambda gm: _torch.current_root_code()).seen
    assert seen[0] is not seen[1]
    assert [_torch.function_code(code) for code in seen] == [breaks.__code__] * 2
    assert _torch.function_code(None) is None


def test_layouts_are_read_without_a_guard() -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x[:, :4] * 1, x.t(), x[:, :4], x.expand(2, *x.shape), x[:1]

    def look(gm: GraphModule) -> list[tuple[bool, bool, bool]]:
        env = _torch.shape_env_of(gm)
        before = len(_torch.shape_guards(env))
        found = [
            (_torch.has_symbolic_sizes(value), _torch.is_row_major(value), _torch.overlaps_itself(value))
            for value in _torch.returned_values(gm)
        ]
        assert len(_torch.shape_guards(env)) == before
        return found

    (seen,) = trace(model, dynamic(5, 8), look=look).seen
    assert seen == [
        (True, True, False),
        (True, True, False),
        (True, False, False),
        (True, False, False),
        (True, False, True),
        (False, True, False),
    ]
    assert not _torch.has_symbolic_sizes(5)
    assert _torch.is_foreign(torch.ops.piecewise.linears.default)
    assert not _torch.is_foreign(torch.ops.aten.add.Tensor)
