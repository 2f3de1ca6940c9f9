"""What the library takes from torch about tensors that are made of other tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, symbolic_trace
from torch.testing._internal.two_tensor import TwoTensor
from traced import trace

from piecewise_graph import _torch


@dataclass
class Settings:
    sizes: list[int]


def test_a_wrapper_is_taken_apart_and_put_together(device: torch.device) -> None:
    a, b = torch.ones(2, 3, device=device), torch.zeros(2, 3, device=device)
    nested = TwoTensor(TwoTensor(a, b), TwoTensor(b, a))
    assert _torch.is_wrapper(nested) and not _torch.is_wrapper(a) and not _torch.is_wrapper(3)
    layout = _torch.WrapperLayout.of(nested)
    ways = [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    assert list(layout.names_of_parts()) == ways
    parts = list(layout.take_apart(nested))
    assert [id(part) for part in parts] == [id(part) for part in (a, b, b, a)]
    again: Any = _torch.put_together(layout, *parts)
    assert isinstance(again, TwoTensor) and again.b.a is b and again.shape == nested.shape
    assert layout == _torch.WrapperLayout.of(TwoTensor(TwoTensor(b, b), TwoTensor(b, b)))
    assert layout != _torch.WrapperLayout.of(TwoTensor(a, b))


def test_arguments_of_a_trace_tell_their_parts() -> None:
    """Dynamo's fake wrapper holds fake parts, whose sources are attributes of the wrapper's."""
    seen: list[tuple[bool, str, bool]] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        for node in gm.graph.find_nodes(op="placeholder"):
            value = _torch.example_value(node)
            if _torch.is_wrapper(value):
                part = torch.fx.Graph().placeholder("part")
                part.meta = _torch.meta_of_part(node, ("b",), _torch.inner_tensors(value)[1])
                source, of_module = _torch.placeholder_source(part)
                seen.append((_torch.has_constant_sizes(value), source, of_module))
        return gm.forward

    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 3), torch.ones(2, 3)), requires_grad=False)
    torch.compile(model, backend=backend)(torch.ones(4, 3))
    ((constant, source, of_module),) = seen
    assert constant and of_module and source.endswith("_parameters['weight'].b")


def test_symbolic_sizes_are_told() -> None:
    seen: list[bool] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        values = map(_torch.example_value, gm.graph.find_nodes(op="placeholder"))
        seen.extend(_torch.has_constant_sizes(value) for value in values if isinstance(value, Tensor))
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(4, 3))
    with FakeTensorMode():
        seen.append(_torch.has_constant_sizes(TwoTensor(torch.ones(2), torch.ones(2))))
    assert seen == [False, True]


class Loud(TwoTensor):
    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Loud:
        return Loud(inner["a"], inner["b"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "loud" if func is torch.relu else super().__torch_function__(func, types, args, kwargs or {})


def test_functions_of_wrappers_are_run_where_they_were_switched_off() -> None:
    layout = _torch.WrapperLayout.of(Loud(torch.ones(2), torch.ones(2)))
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = graph.call_function(_torch.put_together, (graph.get_attr("layout"), x, y))
    graph.output(graph.call_function(torch.relu, (made,)))
    gm = GraphModule({"layout": layout}, graph)
    plain = symbolic_trace(nn.ReLU())
    given = torch.ones(2), torch.ones(2)
    with torch._C.DisableTorchFunctionSubclass():
        assert isinstance(gm(*given), TwoTensor)
        assert _torch.uncompiled(gm)(*given) == "loud"
        with _torch.functions_of_wrappers(gm):
            assert gm(*given) == "loud"
        with _torch.functions_of_wrappers(plain):
            assert isinstance(torch.relu(Loud(*given)), TwoTensor)
    assert _torch.uncompiled(plain)(torch.tensor([-1.0])).item() == 0.0


def test_another_form_of_a_graph_ends_where_it_does() -> None:
    def breaks(x: Tensor) -> Tensor:
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    def look(gm: GraphModule) -> tuple[bool, bool]:
        bare = GraphModule(gm, gm.graph)
        return _torch.returns_intermediates(bare), _torch.returns_intermediates(_torch.ending_like(gm, bare))

    assert trace(breaks, torch.ones(3), look=look).seen[0] == (False, True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True), (1, 1.0), (0.0, -0.0), (0j, complex(0.0, -0.0)), ([1], [True]), ((1,), [1]),
        ({"a": 1}, {"a": 1.0}), ({(1,)}, {(True,)}), ({0.0}, {-0.0}),
        (torch.finfo, torch.iinfo),
    ],
)  # fmt: skip
def test_exactly_tells_apart_what_is_equal_to_python(one: Any, other: Any) -> None:
    assert _torch.exactly(one) != _torch.exactly(other)
    assert _torch.exactly(one) == _torch.exactly(copy.deepcopy(one))


def test_exactly_is_of_now() -> None:
    settings = Settings(sizes=[1, 2])
    before = _torch.exactly(settings)
    assert before == _torch.exactly(Settings(sizes=[1, 2]))
    settings.sizes.append(3)
    assert before != _torch.exactly(settings)
