"""A sum over ranks, the residual that it is added to, and the RMS norm of both become one op.

In a tensor-parallel model of a Llama's kind they follow each other twice per layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.added_norms import AddedNorm, erase, norm_after
from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.splitter.segment_builder import copied


def with_summed_norms(gm: GraphModule) -> GraphModule:
    """A copy of a segment with the op in place of what it does; `gm` itself where nothing is."""
    if not any(summed_norms(gm.graph)):
        return gm
    graph, _ = copied(gm)
    # One by one: the residual of the next one may be what stands in for this one's nodes.
    while found := next(summed_norms(graph), None):
        x, group = found.added.args
        with graph.inserting_before(found.hidden):
            call = graph.call_function(
                torch.ops.piecewise.all_reduce_add_norm.default,
                (x, found.residual, found.weight, found.epsilon, group),
            )
            for index, node in enumerate((found.hidden, found.normed)):
                made = graph.call_function(operator.getitem, (call, index))
                made.meta = dict(node.meta)
                node.replace_all_uses_with(made)
        erase(graph, found.normed)
        erase(graph, found.hidden)
    return GraphModule(gm, graph)


def summed_norms(graph: Graph) -> Iterator[AddedNorm]:
    """Those of a graph on a device that the op's kernel serves."""
    for node in graph.nodes:
        if node.target is torch.ops.piecewise.all_reduce.default and kernels_serve(
            _torch.example_value(node)
        ):
            found = norm_after(node)
            if found is not None:
                yield found
