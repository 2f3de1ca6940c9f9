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

from piecewise_graph.compiler.one_row_linears import choosing_linears


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
        names = [tuple(getattr(arg, "name", None) for arg in args) for _, args, _ in ops]
        assert names == [("x", "weight", "bias"), (called.name, "weight", None)]
        assert {target for target, _, _ in ops} == {torch.ops.piecewise.linear.default}
        assert all(not kwargs for _, _, kwargs in ops) and called.target is functional.linear


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
