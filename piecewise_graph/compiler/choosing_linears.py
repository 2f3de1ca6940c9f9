"""Code for all sizes whose linears choose their kernel at each call.

Inductor leaves a linear of a varying number of rows to cuBLAS, which is slow where there are few. The ops
`piecewise::linears` and `piecewise::swiglu` look at the rows they get. When a bucket is captured, what they
chose is part of the graph. Linears of one input are one call. Where `silu` of the one is multiplied by the
other with `*`, and nothing else reads them, that is part of the call. The two may be halves of one linear,
taken as slices or by `chunk`. A dropout in eval mode after a linear is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from piecewise_graph import _torch
from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.kernels.linear import DTYPES, compile_ahead
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


def compile_kernels_ahead(gm: GraphModule, sizes: Sequence[int]) -> None:
    """Have the kernels compiled in other threads that the ops of `gm` will launch for these token counts."""
    for node in gm.graph.nodes:
        if node.target not in (torch.ops.piecewise.linears.default, torch.ops.piecewise.swiglu.default):
            continue
        x, _, biases = node.args
        value, gated = _torch.example_value(x), node.target is torch.ops.piecewise.swiglu.default
        made = [_torch.example_value(n) for n in ([node, node] if gated else node.users)]
        like = torch.empty(1, dtype=value.dtype, device=value.device)
        rows, has_bias = [int(each.shape[-1]) for each in made], biases[0] is not None
        compile_ahead(like, sizes, rows, int(value.shape[-1]), has_bias=has_bias, gated=gated)


def _grouped(gm: GraphModule, linears: list[Node]) -> list[list[Node]]:
    """Linears that one call may compute where the first of them stands. Each is in one group."""
    chosen = set(linears)
    operands = {node for linear in linears for node in linear_operands(linear)[1:] if node is not None}
    given = {node: _torch.example_value(node) for node in operands if node.op == "placeholder"}
    groups = [[n for n in group.linears if n in chosen] for group in parallel_linears(gm, given)]
    parallel = {node for group in groups for node in group}
    return [group for group in groups if group] + [[node] for node in linears if node not in parallel]


def _replace(graph: Graph, linears: list[Node]) -> None:
    """Calls of the ops where the first of some linears of one input stands."""
    ungated = list(linears)
    with graph.inserting_before(linears[0]):
        for gated in filter(None, [_gated(linear, linears) for linear in linears]):
            call = graph.call_function(torch.ops.piecewise.swiglu.default, _halved(graph, gated.linears))
            _stand_in(call, gated.product)
            ungated = [node for node in ungated if node not in gated.linears]
        if ungated:
            xs, weights, biases = zip(*map(linear_operands, ungated), strict=True)
            call = graph.call_function(torch.ops.piecewise.linears.default, (xs[0], weights, biases))
            for index, linear in enumerate(ungated):
                _stand_in(graph.call_function(operator.getitem, (call, index)), _result(linear))
    for linear in reversed(linears):
        _erase(graph, linear)


def _result(linear: Node) -> Node:
    """The linear, or the dropout in eval mode that alone reads it."""
    user = _only_user(linear)
    if user is None or user.target is not functional.dropout:
        return linear
    given = dict(zip(("input", "p", "training"), user.args, strict=False)) | dict(user.kwargs)
    return user if given.get("training") is False else linear


def _stand_in(made: Node, node: Node) -> None:
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)


def _erase(graph: Graph, node: Node) -> None:
    """It, and what reads it. Others have been made to read what stands in."""
    for user in list(node.users):
        _erase(graph, user)
    graph.erase_node(node)


class _Gated(NamedTuple):
    """`silu(gate) * up`: the linears of gate and up, or the one whose halves they are."""

    product: Node
    linears: tuple[Node, ...]


def _gated(linear: Node, group: list[Node]) -> _Gated | None:
    """Where `linear` is the gate, or has it for a half, and nothing else reads it or `up`."""
    halves = _halves(linear)
    silu = _only_user(halves[0] if halves else linear)
    product = silu and _only_user(silu)
    if not (silu and product) or silu.target is not functional.silu or product.target is not operator.mul:
        return None
    up = next((arg for arg in product.args if isinstance(arg, Node) and arg is not silu), None)
    if up is None or _only_user(up) is not product:
        return None
    if halves:
        return _Gated(product, (linear,)) if up is halves[1] else None
    alike = up in group and len(set(map(_rows, (linear, up)))) == 1
    return _Gated(product, (linear, up)) if alike else None


def _halves(linear: Node) -> list[Node]:
    """What reads `linear`, if that is its first half and its second one, in this order."""
    middle, source = _rows(linear) // 2, linear
    parts: list[Any] = [(..., slice(None, middle, None)), (..., slice(middle, None, None))]
    chunks = _only_user(linear)
    if chunks is not None and _is_in_two(chunks):
        source, parts = chunks, [0, 1]
    by_part = {repr(user.args[1]): user for user in source.users if user.target is operator.getitem}
    found = [by_part[repr(part)] for part in parts if repr(part) in by_part]
    return found if len(found) == len(source.users) == 2 and _rows(linear) == 2 * middle else []


def _is_in_two(node: Node) -> bool:
    """It is `chunk(2, dim=-1)`, of a tensor or of torch."""
    given = dict(zip(("chunks", "dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    return node.target in ("chunk", torch.chunk) and given == {"chunks": 2, "dim": -1}


def _halved(graph: Graph, linears: tuple[Node, ...]) -> tuple[Any, Any, Any]:
    """Input, weights and biases of gate and up."""
    xs, weights, biases = zip(*map(linear_operands, linears), strict=True)
    if len(linears) == 2:
        return xs[0], weights, biases
    middle = _rows(linears[0]) // 2
    parts = slice(None, middle), slice(middle, None)

    def cut(operand: Node | None) -> tuple[Node | None, ...]:
        if operand is None:
            return None, None
        return tuple(graph.call_function(operator.getitem, (operand, part)) for part in parts)

    return xs[0], cut(weights[0]), cut(biases[0])


def _rows(linear: Node) -> int:
    return int(_torch.example_value(linear_operands(linear)[1]).shape[0])


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_about_others(node: Node) -> bool:
    """It changes what ops around it do (autocast, vmap), or may launch kernels that do not wait for ours."""
    changes = node.target is _torch.autocast_functions()[0] or _torch.transform_depth(node.target) != 0
    return changes or _torch.is_higher_order(node.target)


def _may_choose(operands: tuple[Any, Any, Any]) -> bool:
    """Plain tensors of dtypes that the kernels take. A wrapper (a quantised weight) has its own linear.

    Weights have fixed sizes. Those of activations that play a weight vary, and asking would fix them.
    """
    values = [_torch.example_value(operand) for operand in operands if isinstance(operand, Node)]
    if len(values) < 2 or not all(isinstance(v, Tensor) and not _torch.is_wrapper(v) for v in values):
        return False
    x, weight, *bias = values
    alike = all(value.dtype == x.dtype and kernels_serve(value) for value in values)
    fixed = weight.dim() == 2 and all(isinstance(size, int) for size in weight.shape)
    return alike and x.dtype in DTYPES and fixed and all(b.shape == weight.shape[:1] for b in bias)
