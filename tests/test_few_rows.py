"""Which linears of a segment get the op that chooses its kernel at each call. Fake tensors play the GPU's."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from piecewise_graph.compiler.few_rows import choosing_linears


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
                node.meta["example_value"] = torch.empty(16, 16, dtype=dtype, device=device)
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


@pytest.mark.parametrize("odd", ["wrapper", "float32 bias", "autocast", "vector"])
def test_other_linears_are_left_alone(odd: str) -> None:
    graph = Graph()
    x, weight, bias = map(graph.placeholder, ("x", "weight", "bias"))
    if odd == "autocast":
        graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cuda", torch.float16, True, False))
    graph.output((graph.call_function(functional.linear, (x, weight, bias)),))
    gm = GraphModule({}, graph)
    with FakeTensorMode():
        for node in gm.graph.nodes:
            node.meta["example_value"] = torch.empty(16, 16, dtype=torch.bfloat16, device="cuda")
        if odd == "wrapper":
            parts = (torch.empty(16, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            weight.meta["example_value"] = TwoTensor(*parts)
        elif odd == "float32 bias":
            bias.meta["example_value"] = torch.empty(16, device="cuda")
        elif odd == "vector":
            weight.meta["example_value"] = torch.empty(16, dtype=torch.bfloat16, device="cuda")
    assert choosing_linears(gm) is gm
