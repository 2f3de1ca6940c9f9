"""Segments of linears as the code for all sizes has them, and the tensors that they take."""

from __future__ import annotations

import operator

import torch
from linear_operands import operands
from torch.fx import Graph, GraphModule
from torch.nn import functional

from piecewise_graph.compiler.choosing_linears import choosing_linears


def linears_of_one_input(
    rows: list[int], columns: int, bias: bool, dtype: torch.dtype, gated: bool
) -> tuple[GraphModule, list[torch.Tensor]]:
    """Linears of one input as the code for all sizes has them, and what they take beside it."""
    x = operands(3, 1, columns, dtype)[0]
    weights, biases = zip(*(operands(1, n, columns, dtype, seed=n)[1:] for n in rows), strict=True)
    tensors = [*weights, *(biases if bias else ())]
    graph = Graph()
    nodes = [graph.placeholder(f"a{index}") for index in range(1 + len(tensors))]
    for node, value in zip(nodes, [x, *tensors], strict=True):
        node.meta["example_value"] = value
    given = nodes[1 + len(rows) :] or [None] * len(rows)
    made = []
    for weight, its_bias in zip(nodes[1 : 1 + len(rows)], given, strict=True):
        made.append(graph.call_function(functional.linear, (nodes[0], weight, its_bias)))
        made[-1].meta["example_value"] = functional.linear(x, weight.meta["example_value"])
    if gated:
        silu = graph.call_function(functional.silu, (made[0],))
        product = graph.call_function(operator.mul, (silu, made[1]))
        product.meta["example_value"] = made[0].meta["example_value"]
        made = [product]
    graph.output(tuple(made))
    return choosing_linears(GraphModule({}, graph)), tensors


def linears_after_a_norm(
    after: list[int], columns: int, rows: int, bias: bool, dtype: torch.dtype, gated: bool
) -> tuple[GraphModule, list[torch.Tensor]]:
    """A linear, a norm and linears as code for all sizes has them, and what they take beside two inputs."""
    x, weight, first = operands(3, rows, columns, dtype)
    weights, biases = zip(*(operands(1, n, rows, dtype, seed=n)[1:] for n in after), strict=True)
    given = (first, *biases) if bias else ()
    tensors = [weight, first.clone(), *weights, *given]
    graph = Graph()
    nodes = [graph.placeholder(f"a{index}") for index in range(2 + len(tensors))]
    for node, value in zip(nodes, [x, operands(3, 1, rows, dtype)[0], *tensors], strict=True):
        node.meta["example_value"] = value
    last = 4 + len(after)
    first_bias, *others = nodes[last:] or [None] * (1 + len(after))
    args = (nodes[0], nodes[2], first_bias, nodes[1], nodes[3], 1e-5, nodes[4:last], others, gated)
    call = graph.call_function(torch.ops.piecewise.linear_norm_linears.default, args)
    results = [graph.call_function(operator.getitem, (call, index)) for index in (0, 1)]
    results[1].meta["example_value"] = operands(3, 1, after[0], dtype)[0]
    graph.output(tuple(results))
    return GraphModule({}, graph), tensors
