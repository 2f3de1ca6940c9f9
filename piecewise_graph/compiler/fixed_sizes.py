"""A trace with some of its sizes taken for numbers: the graph that Dynamo would make of static ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.sizes import TensorSpec, substitute

# Symbols, and what they are taken for: a number, or another symbol of the trace.
Fixed = Mapping[sympy.Symbol, int | sympy.Symbol]


def with_fixed_sizes(gm: GraphModule, sizes: Fixed) -> GraphModule:
    """A copy of `gm` in which the symbols of `sizes` are fixed; its arguments stay in their places.

    Args:
        gm: a graph of Dynamo, its fake values in `example_value`.
    """
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    copy, env, mode = GraphModule(gm, graph), _torch.shape_env_of(gm), _torch.fake_mode_of(gm)
    given = _torch.argument_values(gm)
    _torch.propagate_fake(copy, _fixed(given, sizes, env, mode), mode)
    for node in list(graph.nodes):
        value = _torch.example_value(node)
        if node.op != "output" and type(value) is int:
            _fold(node, value)
    _fold_arguments(graph, given, sizes)
    copy.recompile()
    return copy


def _fixed(values: Sequence[Any], sizes: Fixed, env: Any, mode: Any) -> list[Any]:
    def size(expr: Any) -> Any:
        return _torch.size_of(env, substitute(expr, sizes))

    def fixed(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return size(_torch.expression(value))
        if not isinstance(value, Tensor):
            return value
        spec = TensorSpec.of(value)
        if spec.symbols.isdisjoint(sizes):
            return value
        shape, stride = map(size, spec.shape), map(size, spec.stride)
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=spec.dtype, device=spec.device)

    with mode:
        return [fixed(value) for value in values]


def _fold_arguments(graph: Graph, given: Sequence[Any], sizes: Fixed) -> None:
    """Have the arguments that were symbols of their own read no more, and be what they were."""
    numbers = [
        (node, value)
        for node, value in zip(graph.find_nodes(op="placeholder"), given, strict=True)
        if isinstance(value, torch.SymInt)
    ]
    by_symbol = {_torch.expression(value): node for node, value in numbers}
    for node, value in numbers:
        other = by_symbol.get(sizes.get(_torch.expression(value)))
        if other is not None:
            node.replace_all_uses_with(other)
        node.meta["example_value"] = value


def _fold(node: Node, value: int) -> None:
    """Put the number in the place of the node that computes it, or takes it."""
    for user in list(node.users):
        user.args = map_arg(user.args, lambda source: value if source is node else source)
        user.kwargs = map_arg(user.kwargs, lambda source: value if source is node else source)
    if node.op != "placeholder":
        node.graph.erase_node(node)
