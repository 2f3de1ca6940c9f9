"""Code for all sizes whose linears choose their kernel at each call.

Inductor leaves a linear of a varying number of rows to cuBLAS, which is slow where there are few. The op
`piecewise::linears` looks at the rows it gets. When a bucket is captured, what it chose is part of the graph.
Linears of one input are one call of the op.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.kernels.linear import DTYPES
from piecewise_graph.splitter.merge_linears import linear_operands, parallel_linears
from piecewise_graph.splitter.segment_builder import copied


def choosing_linears(gm: GraphModule) -> GraphModule:
    """A copy of a segment with the op in place of its linears on a GPU; `gm` where none may be replaced."""
    linears = [node for node in gm.graph.nodes if _may_choose(linear_operands(node))]
    if not linears or _torch.inductor_tunes_products() or any(map(_is_about_others, gm.graph.nodes)):
        return gm
    graph, copies = copied(gm)
    for group in _grouped(gm, linears):
        _replace(graph, [copies[node] for node in group])
    return GraphModule(gm, graph)


def _grouped(gm: GraphModule, linears: list[Node]) -> list[list[Node]]:
    """Linears that one call may compute where the first of them stands. Each is in one group."""
    values = {node: _torch.example_value(node) for node in gm.graph.nodes if node.op == "placeholder"}
    given = {node: value for node, value in values.items() if isinstance(value, Tensor)}
    chosen = set(linears)
    groups = [[n for n in group.linears if n in chosen] for group in parallel_linears(gm, given)]
    parallel = {node for group in groups for node in group}
    return [group for group in groups if group] + [[node] for node in linears if node not in parallel]


def _replace(graph: Graph, linears: list[Node]) -> None:
    operands = [linear_operands(node) for node in linears]
    xs, weights, biases = zip(*operands, strict=True)
    with graph.inserting_before(linears[0]):
        made = graph.call_function(torch.ops.piecewise.linears.default, (xs[0], weights, biases))
        for index, linear in enumerate(linears):
            result = graph.call_function(operator.getitem, (made, index))
            result.meta = dict(linear.meta)
            linear.replace_all_uses_with(result)
    for linear in linears:
        graph.erase_node(linear)


def _is_about_others(node: Node) -> bool:
    """It changes what ops around it do (autocast, vmap), or may launch kernels that do not wait for ours."""
    changes = node.target is _torch.autocast_functions()[0] or _torch.transform_depth(node.target) != 0
    return changes or _torch.is_higher_order(node.target)


def _may_choose(operands: tuple[Any, Any, Any]) -> bool:
    """Plain tensors of dtypes that the kernels take. A wrapper (a quantised weight) has its own linear."""
    values = [_torch.example_value(operand) for operand in operands if isinstance(operand, Node)]
    if len(values) < 2 or not all(isinstance(v, Tensor) and not _torch.is_wrapper(v) for v in values):
        return False
    x, weight, *bias = values
    alike = all(value.dtype == x.dtype and kernels_serve(value) for value in values)
    return alike and x.dtype in DTYPES and weight.dim() == 2 and all(b.dim() == 1 for b in bias)
