"""Code for all sizes whose linears choose their kernel at each call.

Inductor leaves a linear of a varying number of rows to cuBLAS, which is slow where rows are few. The op
`piecewise::linear` looks at the rows it gets. When a bucket is captured, what it chose is part of the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.kernels.linear import DTYPES
from piecewise_graph.splitter.merge_linears import linear_operands


def choosing_linears(gm: GraphModule) -> GraphModule:
    """A copy of a segment with the op in place of its linears on a GPU; `gm` where it has none.

    Under autocast they stay, as it casts what they get.
    """
    casts, _ = _torch.autocast_functions()
    linears = [node for node in gm.graph.nodes if _may_choose(linear_operands(node))]
    if not linears or any(node.target is casts for node in gm.graph.nodes):
        return gm
    graph, copies = Graph(), dict[Node, Any]()
    graph.output(graph.graph_copy(gm.graph, copies))
    for node in linears:
        copies[node].target = torch.ops.piecewise.linear.default
        copies[node].args, copies[node].kwargs = tuple(map(copies.get, linear_operands(node))), {}
    return GraphModule(gm, graph)


def _may_choose(operands: tuple[Any, Any, Any]) -> bool:
    """Plain tensors of dtypes that the kernels take. A wrapper (a quantised weight) has its own linear."""
    values = [_torch.example_value(operand) for operand in operands if isinstance(operand, Node)]
    plain = all(isinstance(value, Tensor) and not _torch.is_wrapper(value) for value in values)
    if len(values) < 2 or not plain or values[1].dim() != 2:
        return False
    return values[0].dtype in DTYPES and all(v.dtype == values[0].dtype and kernels_serve(v) for v in values)
