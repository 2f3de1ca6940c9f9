"""The norm between two linears disappears into them.

Where a linear's result is added to a residual, and only linears of one call read the RMS norm of that, the op
`piecewise::linear_norm_linears` stands for all of it. For few rows it launches no kernel for the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.compiler.added_norms import AddedNorm, erase, norm_after, others_between
from piecewise_graph.kernels.linear import compile_norm_ahead
from piecewise_graph.splitter.segment_builder import copied

_LINEARS, _SWIGLU = torch.ops.piecewise.linears.default, torch.ops.piecewise.swiglu.default
_OP = torch.ops.piecewise.linear_norm_linears.default


class _Deferred(NamedTuple):
    """The calls of `linears` before a norm, and of `linears` or `swiglu` after it."""

    before: Node
    norm: AddedNorm
    after: Node


def with_deferred_norms(gm: GraphModule) -> GraphModule:
    """A copy of what `choosing_linears` made with the op in it; `gm` itself where there is no such norm."""
    if not any(_deferred(gm.graph)):
        return gm
    graph, _ = copied(gm)
    # One by one: the residual of the next one may be what stands in for this one's sum.
    while found := next(_deferred(graph), None):
        _replace(graph, found)
    return GraphModule(gm, graph)


def compile_norms_ahead(gm: GraphModule, sizes: Sequence[int]) -> None:
    """Have the kernels compiled in other threads that the op will launch for these token counts."""
    for node in gm.graph.find_nodes(op="call_function", target=_OP):
        operands: Any = node.args
        _, weight, bias, residual, _, _, weights, biases, gated = operands
        value, first = _torch.example_value(residual), _torch.example_value(weight)
        made = {user.args[1]: user for user in node.users}  # halves of a weight have no example
        sized = [made[1], made[1]] if gated else weights
        rows = [int(_torch.example_value(each).shape[-1 if gated else 0]) for each in sized]
        compile_norm_ahead(
            torch.empty(1, dtype=value.dtype, device=value.device),
            sizes,
            [int(size) for size in first.shape],
            rows,
            has_biases=(bias is not None, biases[0] is not None),
            gated=gated,
        )


def _deferred(graph: Graph) -> Iterator[_Deferred]:
    for before in graph.find_nodes(op="call_function", target=_LINEARS):
        results = list(before.users)
        norm = norm_after(results[0]) if len(_operands(before)[1]) == len(results) == 1 else None
        readers = list(norm.normed.users) if norm is not None else []
        if norm is None or len(readers) != 1 or readers[0].target not in (_LINEARS, _SWIGLU):
            continue
        source, weights, biases = _operands(readers[0])
        alone = source is norm.normed and all(map(_is_given, (*weights, *biases)))
        if alone and not others_between(before, readers[0], norm.residual):
            yield _Deferred(before, norm, readers[0])


def _operands(call: Node) -> tuple[Any, Any, Any]:
    """Input, weights and biases."""
    x, weights, biases = call.args
    return x, weights, biases


def _is_given(operand: Node | None) -> bool:
    """It is no result of the graph, and so not of the norm, or a fixed part of what is none."""
    if operand is not None and operand.target is operator.getitem and len(operand.all_input_nodes) == 1:
        [operand] = operand.all_input_nodes
    return operand is None or operand.op in ("placeholder", "get_attr")


def _replace(graph: Graph, found: _Deferred) -> None:
    before, norm, after = found
    x, [weight], [bias] = _operands(before)
    _, weights, biases = _operands(after)
    gated = after.target is _SWIGLU
    results: dict[Node, Any] = {after: 0} if gated else {user: user.args[1] for user in after.users}
    with graph.inserting_before(after):
        sums = norm.residual, norm.weight, norm.epsilon
        call = graph.call_function(_OP, (x, weight, bias, *sums, weights, biases, gated))
        for node, index in {**results, norm.hidden: -1}.items():
            made = graph.call_function(operator.getitem, (call, 1 + index))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
    for node in (*results, norm.hidden):
        erase(graph, node)
