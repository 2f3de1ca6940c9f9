"""Which linears of a segment get the op that chooses its kernel at each call. Fake tensors play the GPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from piecewise_graph.compiler.choosing_linears import choosing_linears

OP = torch.ops.piecewise.linears.default


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_matrices_on_a_gpu_are_chosen_for(dtype: torch.dtype) -> None:
    graph = Graph()
    x, weight, bias = map(graph.placeholder, ("x", "weight", "bias"))
    called = graph.call_function(functional.linear, (x, weight), {"bias": bias})
    plain = graph.call_function(functional.linear, (called, weight))
    graph.output((called, plain))
    gm = GraphModule({}, graph)
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            for node in gm.graph.nodes:
                shape = (16,) if node is bias else (16, 16)
                node.meta["example_value"] = torch.empty(shape, dtype=dtype, device=device)
        made = choosing_linears(gm)
        ops = [
            (node.target, node.args, node.kwargs) for node in made.graph.nodes if node.op == "call_function"
        ]
        if device == "cpu" or dtype == torch.float32:
            assert made is gm
            continue
        calls = [str(args) for target, args, _ in ops if target is OP]
        assert calls == ["(x, (weight,), (bias,))", "(getitem, (weight,), (None,))"]
        assert all(not kwargs for _, _, kwargs in ops) and called.target is functional.linear


@pytest.mark.parametrize("between", ["", "write"])
def test_linears_of_one_input_are_one_call(between: str) -> None:
    graph = Graph()
    x, q, k, v, bias = map(graph.placeholder, ("x", "q", "k", "v", "bias"))
    for node, shape in zip((x, q, k, v, bias), ((4, 16), (16, 16), (8, 16), (8, 16), (8,)), strict=True):
        node.meta["example_value"] = _empty(*shape)
    first = graph.call_function(functional.linear, (x, q))
    scaled = graph.call_function(torch.mul, (k, 2))  # a weight that is computed, after the first linear
    scaled.meta["example_value"] = _empty(8, 16)
    if between == "write":
        graph.call_method("add_", (x, 1))
    others = [(k, None), (scaled, None), (v, bias)]
    linears = [first, *(graph.call_function(functional.linear, (x, w, b)) for w, b in others)]
    graph.output(tuple(linears))
    made = choosing_linears(GraphModule({}, graph))
    calls = [str(node.args) for node in made.graph.nodes if node.target is OP]
    together = (
        ["(x, (q, k), (None, None))"] if between != "write" else ["(x, (q,), (None,))", "(x, (k,), (None,))"]
    )
    assert calls == [*together, "(x, (mul,), (None,))", "(x, (v,), (bias,))"]
    made.graph.lint()


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


OPERANDS: dict[str, dict[str, Callable[[], Tensor]]] = {
    "wrapper": {"weight": lambda: TwoTensor(_empty(16, 16), _empty(16, 16))},
    "another dtype": {"bias": lambda: _empty(16, dtype=torch.float32)},
    "vector": {"weight": lambda: _empty(16)},
    "number": {"bias": _empty},
}
AROUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "autocast": (torch.amp.autocast_mode._enter_autocast, ("cuda", torch.float16, True, False)),
    "vmap": (torch._functorch.predispatch._vmap_increment_nesting, (3, "error")),
    "higher order": (torch.ops.higher_order.cond, (True, None, None, ())),
}


@pytest.mark.parametrize("odd", [*OPERANDS, *AROUND, "tuned", ""])
def test_other_linears_are_left_alone(odd: str) -> None:
    graph = Graph()
    operands = [graph.placeholder(name) for name in ("x", "weight", "bias")]
    values = {"x": _empty(16, 16), "weight": _empty(16, 16), "bias": _empty(16)}
    values |= {name: make() for name, make in OPERANDS.get(odd, {}).items()}
    for node in operands:
        node.meta["example_value"] = values[node.name]
    if odd in AROUND:
        graph.call_function(*AROUND[odd])
    graph.output((graph.call_function(functional.linear, tuple(operands)),))
    gm = GraphModule({}, graph)
    with config.patch(max_autotune=odd == "tuned"):
        assert (choosing_linears(gm) is gm) == bool(odd)
