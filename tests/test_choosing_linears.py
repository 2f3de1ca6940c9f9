"""Which linears of a segment get the op that chooses its kernel at each call. Fake tensors play the GPU's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
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


def _product(graph: Graph, gate: Node, up: Node, swapped: bool = False) -> Node:
    silu = graph.call_function(functional.silu, (gate,), {"inplace": False})
    return graph.call_function(operator.mul, (up, silu) if swapped else (silu, up))


def _swiglu_graph(case: str) -> GraphModule:
    graph = Graph()
    x, first, second, b = map(graph.placeholder, ("x", "first", "second", "b"))
    rows = {"other rows": 1}.get(case, 16 if "halves" in case or "chunk" in case else 8)
    for node, shape in zip((x, first, second, b), ((4, 6), (rows, 6), (8, 6), (rows,)), strict=True):
        node.meta["example_value"] = _empty(*shape)
    bias = b if "halves" in case or "chunk" in case or case == "bias" else None
    gate = graph.call_function(functional.linear, (x, first, bias))
    others: list[Node] = []
    if "halves" in case:
        middle = 8 if case == "halves" else 7
        parts = (..., slice(None, middle)), (..., slice(middle, 14 if middle == 7 else None))
        gate, up = (graph.call_function(operator.getitem, (gate, part)) for part in parts)
    elif "chunk" in case:
        count = 4 if case == "four chunks" else 2
        dim = 0 if case == "chunks of rows" else -1
        if case == "torch.chunk":
            chunks = graph.call_function(torch.chunk, (gate, count, dim))
        else:
            chunks = graph.call_method("chunk", (gate, count), {"dim": dim})
        gate, up = (graph.call_function(operator.getitem, (chunks, index)) for index in (0, 1))
        others = [gate] if case == "chunk read elsewhere" else []
    else:
        up = graph.call_function(functional.linear, (x, second, bias))
        others = [gate] if case == "read elsewhere" else []
    graph.output((_product(graph, gate, up, swapped=case == "swapped"), *others))
    return GraphModule({}, graph)


GATED = ["plain", "swapped", "bias", "halves", "chunks", "torch.chunk"]
CHUNKS = ["four chunks", "chunks of rows", "chunk read elsewhere"]


@pytest.mark.parametrize("case", [*GATED, *CHUNKS, "read elsewhere", "odd halves", "other rows"])
def test_a_gated_product_is_one_call(case: str) -> None:
    gm = _swiglu_graph(case)
    made = choosing_linears(gm)
    targets = [node.target for node in made.graph.nodes if node.op == "call_function"]
    assert (torch.ops.piecewise.swiglu.default in targets) == (case in GATED)
    assert (functional.silu in targets) == (case not in GATED)
    assert functional.linear not in targets
    made.graph.lint()
    shapes = [node.meta["example_value"].shape for node in gm.graph.nodes if node.op == "placeholder"]
    given = [torch.randn(shape) for shape in shapes]
    for found, expected in zip(made(*given), gm(*given), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("args", "given", "is_left_out"),
    [
        ((), {"training": False}, True),
        ((), {"p": 0.5, "training": False, "inplace": True}, True),
        ((0.5, False, False), {}, True),  # of nn.Dropout
        ((0.0, True), {}, False),
        ((), {"p": 0.0}, False),
    ],
)
@pytest.mark.parametrize("reader", ["", "linear", "dropout"])
def test_a_dropout_in_eval_mode_is_left_out(
    args: tuple[Any, ...], given: dict[str, Any], is_left_out: bool, reader: str
) -> None:
    """Unless the linear is read by others too: then a result of it and one of the dropout share memory."""
    graph = Graph()
    x, weight = map(graph.placeholder, ("x", "weight"))
    for node, shape in ((x, (4, 8)), (weight, (8, 8))):
        node.meta["example_value"] = _empty(*shape)
    linear = graph.call_function(functional.linear, (x, weight))
    dropped = graph.call_function(functional.dropout, (linear, *args), given)
    others = {"linear": [linear], "dropout": [dropped]}.get(reader, [])
    graph.output((graph.call_function(operator.add, (dropped, x)), *others))
    gm = GraphModule({}, graph)
    made = choosing_linears(gm)
    made.graph.lint()
    left = any(node.target is functional.dropout for node in made.graph.nodes)
    assert left != (is_left_out and reader != "linear")
    values = torch.randn(4, 8), torch.randn(8, 8)
    torch.testing.assert_close(made(*values), gm(*values))


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


OPERANDS: dict[str, dict[str, Callable[[], Tensor]]] = {
    "wrapper": {"weight": lambda: TwoTensor(_empty(16, 16), _empty(16, 16))},
    "another dtype": {"bias": lambda: _empty(16, dtype=torch.float32)},
    "vector": {"weight": lambda: _empty(16)},
    "number": {"bias": _empty},
    "one element": {"bias": lambda: _empty(1)},
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
