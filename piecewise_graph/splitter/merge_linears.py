"""Parallel linears become one: q/k/v or gate/up projections of the same input, with one merged weight.

The merged linear runs where the first of its members stood. Each member becomes a copy of its columns with
the same shape, the same strides and memory of its own, so later nodes see no difference, even those that
depend on strides or write in place. Inductor folds the copy into its reader. Only linears of one region are
merged: between them no node writes, switches a mode or cuts the graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.sizes import TensorSpec
from piecewise_graph.splitter.merged_weights import Layout, Merge, Stays, joined, side_by_side
from piecewise_graph.splitter.segment_builder import copied
from piecewise_graph.splitter.source_names import MERGED_NAME, readable_source
from piecewise_graph.splitter.splitting_ops import may_write, splitting_op_of
from piecewise_graph.telemetry import counters

# Kernels read weights in pieces of 16 bytes, and are compiled for addresses that allow it.
_ALIGNMENT = 16

_Nodes = tuple[Node, ...]


def merge_linears(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, Merge]:
    """`gm` with its parallel linears merged, and the weights of the model laid out for it.

    Args:
        gm: as Dynamo traced it; it is not changed.
        example_inputs: its arguments; parameters among them are moved (Note [Who may be moved] in
            merged_weights.py).

    Returns:
        the graph to compile, which takes one more argument per layout of the second result.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = dict(zip(placeholders, example_inputs, strict=True))
    weights = {node: value for node, value in given.items() if _is_weight(node, value)}
    merging = _Merging(weights)
    for group in parallel_linears(gm, weights):
        merging.add(group)
    layouts = list(dict.fromkeys(nodes for group in merging.groups for nodes in group.layouts))
    merge = Merge(
        tuple(_layout(nodes, weights, placeholders) for nodes in layouts),
        dict(Counter("+".join(map(_module_name, group.weights)) for group in merging.groups)),
        sum(len(group.linears) for group in merging.groups),
        dict(merging.apart),
    )
    counters.add("merged_linears", merge.linears)
    if merging.moved:
        torch.cuda.empty_cache()  # no later allocation has the sizes that the weights had
    return _rewritten(gm, merging.groups, layouts) if layouts else gm, merge


@dataclass
class Group:
    """Linears of one input in one region, in program order.

    Attributes:
        weights, biases: their placeholders; no biases where the linears have none.
    """

    linears: list[Node] = field(default_factory=list)
    weights: list[Node] = field(default_factory=list)
    biases: list[Node] = field(default_factory=list)

    @property
    def layouts(self) -> list[_Nodes]:
        return [tuple(nodes) for nodes in (self.weights, self.biases) if nodes]


def parallel_linears(gm: GraphModule, weights: Mapping[Node, Tensor]) -> list[Group]:
    """Linears that may run where the first of them stands: all groups of at least two.

    Args:
        weights: the placeholders that may be their weights and biases.
    """
    found: dict[tuple[Any, ...], Group] = {}
    region = 0
    for node in gm.graph.nodes:
        region += _ends_region(node)
        x, weight, bias = linear_operands(node)
        kind = _kind(weight, weights, 2), bias is not None and _kind(bias, weights, 1)
        if isinstance(x, Node) and None not in kind:
            group = found.setdefault((x, region, kind), Group())
            group.linears.append(node)
            group.weights.append(weight)
            group.biases += [] if bias is None else [bias]
    return [group for group in found.values() if len(group.linears) > 1]


def _ends_region(node: Node) -> bool:
    switches = (*_torch.autocast_functions(), *_torch.droppable_functions())
    opaque = node.op == "call_module" or _torch.is_higher_order(node.target)
    return opaque or node.target in switches or splitting_op_of(node) is not None or may_write(node)


def linear_operands(node: Node) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a linear, Nones of another node."""
    if node.op != "call_function" or node.target is not torch.nn.functional.linear:
        return None, None, None
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
    return named["input"], named["weight"], named.get("bias")


def _kind(operand: Any, weights: Mapping[Node, Tensor], dims: int) -> tuple[Any, ...] | None:
    """What the parameters of a group have in common; None for an operand that cannot be merged."""
    value = weights.get(operand)
    if value is None or value.dim() != dims or value.numel() == 0:
        return None
    mergeable = value.is_floating_point() and value.is_contiguous()
    return (value.dtype, value.device, value.shape[1:]) if mergeable else None


class _Merging:
    """Takes groups one by one, so that the weights of one group at most exist twice at a time."""

    def __init__(self, weights: Mapping[Node, Tensor]) -> None:
        self.weights = weights
        self.layout_of: dict[Node, _Nodes] = {}
        self.groups: list[Group] = []
        self.apart: Counter[str] = Counter()
        self.moved = False

    def add(self, group: Group) -> None:
        """Merge the weights of a group, or count the reason against it."""
        reason = self._obstacle(group) or self._join(group)
        if reason is not None:
            self.apart[reason] += 1
            counters.add("unmerged_groups", reason=reason)
            return
        self.groups.append(group)
        self.layout_of.update((node, nodes) for nodes in group.layouts for node in nodes)

    def _obstacle(self, group: Group) -> str | None:
        for nodes in group.layouts:
            known = {self.layout_of.get(node) for node in nodes}
            if len(set(nodes)) < len(nodes) or known not in ({None}, {nodes}):
                return "weight_used_twice"
            if any(start % _ALIGNMENT for start in accumulate(self.weights[n].nbytes for n in nodes[:-1])):
                return "unaligned"
            if any(linear_operands(user)[0] is None for node in nodes for user in node.users):
                return "weight_read_elsewhere"
        plain = all(_is_plain(_torch.example_value(node)) for node in group.linears)
        return None if plain else "strided_output"

    def _join(self, group: Group) -> str | None:
        for members in [[self.weights[node] for node in nodes] for nodes in group.layouts]:
            self.moved |= members[0].is_cuda and side_by_side(members) is None
            merged = joined(members)
            if isinstance(merged, Stays):
                return merged.reason
        return None


def _is_weight(node: Node, value: Any) -> bool:
    _, of_module = _torch.placeholder_source(node)
    return of_module and type(value) is torch.nn.Parameter and value.device.type != "meta"


def _is_plain(value: Any) -> bool:
    """A tensor with the strides of a newly allocated one."""
    if not isinstance(value, Tensor):
        return False
    spec = TensorSpec.of(value)
    steps = accumulate(reversed(spec.shape[1:]), operator.mul, initial=1)
    return spec.stride == tuple(steps)[::-1]


def _layout(nodes: _Nodes, weights: Mapping[Node, Tensor], arguments: Sequence[Node]) -> Layout:
    shapes = tuple(tuple(weights[node].shape) for node in nodes)
    first = weights[nodes[0]]
    return Layout(tuple(map(arguments.index, nodes)), tuple(map(_name, nodes)), shapes, first.dtype)


def _name(node: Node) -> str:
    return readable_source(_torch.placeholder_source(node)[0])


def _module_name(node: Node) -> str:
    """`q_proj` of `self.layers.0.self_attn.q_proj.weight`."""
    return _name(node).split(".")[-2:][0]


def _rewritten(gm: GraphModule, groups: Sequence[Group], layouts: Sequence[_Nodes]) -> GraphModule:
    """A copy of the graph with merged linears; its nodes keep what Dynamo knows about them."""
    (graph, copies), mode = copied(gm), _torch.fake_mode_of(gm)
    with mode:  # type: ignore[union-attr]  # a graph with weights has one
        merged = dict(zip(layouts, _placeholders(graph, layouts), strict=True))
        for group in groups:
            _merge(graph, group, [copies[node] for node in group.linears], merged)
    graph.lint()
    return GraphModule(gm, graph)


def _placeholders(graph: Graph, layouts: Sequence[_Nodes]) -> Iterator[Node]:
    """One argument per layout, after those that Dynamo passes."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for number, nodes in enumerate(layouts):
        with graph.inserting_after(last):
            last = graph.placeholder(f"merged_{number}")
        values = [_torch.example_value(node) for node in nodes]
        last.meta["example_value"] = values[0].new_empty((sum(map(len, values)), *values[0].shape[1:]))
        others = [".".join(_name(node).split(".")[-2:]) for node in nodes[1:]]
        last.meta[MERGED_NAME] = " + ".join([_name(nodes[0]), *others])
        yield last


def _merge(graph: Graph, group: Group, members: Sequence[Node], merged: Mapping[_Nodes, Node]) -> None:
    """Replace `members`, the linears of `group`, by one and copies of its columns."""
    first = members[0]
    value, rows = _torch.example_value(first), [len(_torch.example_value(node)) for node in group.weights]
    with graph.inserting_before(first):
        operands = (linear_operands(first)[0], *(merged[nodes] for nodes in group.layouts))
        linear = graph.call_function(torch.nn.functional.linear, operands)
        wide = linear.meta["example_value"] = value.new_empty((*value.shape[:-1], sum(rows)))
        for member, start, count in zip(members, accumulate(rows, initial=0), rows, strict=False):
            part = graph.call_function(torch.narrow, (linear, -1, start, count))
            part.meta["example_value"] = wide.narrow(-1, start, count)
            copy = graph.call_function(torch.clone, (part,), {"memory_format": torch.contiguous_format})
            copy.meta = dict(member.meta)
            member.replace_all_uses_with(copy)
    for member in members:
        graph.erase_node(member)


def drop_copies(graph: Graph) -> None:
    """Leave out the copies of a merged linear's parts that are contiguous anyway, as those of one row are.

    Only where the parts are all that is read of the result, and do not overlap.
    """
    for linear in [node for node in graph.nodes if node.target is torch.nn.functional.linear]:
        parts = list(linear.users)
        copies = [user for part in parts for user in part.users]
        if not parts or not all(map(_is_part, parts)) or any(len(part.users) != 1 for part in parts):
            continue
        contiguous = all(_torch.example_value(part).is_contiguous() for part in parts)
        if contiguous and _disjoint(parts) and all(copy.target is torch.clone for copy in copies):
            for part, copy in zip(parts, copies, strict=True):
                copy.replace_all_uses_with(part)
                graph.erase_node(copy)


def _is_part(node: Node) -> bool:
    return node.target is torch.narrow and len(node.args) == 4 and bool(node.args[1] == -1)


def _disjoint(parts: Sequence[Node]) -> bool:
    """These `narrow(x, -1, start, length)` do not overlap; a start may count from the end."""
    width: Any = _torch.example_value(parts[0].all_input_nodes[0]).shape[-1]
    ranges: list[Any] = [(part.args[2], part.args[3]) for part in parts]
    ranges = sorted((start + width if start < 0 else start, length) for start, length in ranges)
    return all(bool(start + length <= after) for (start, length), (after, _) in pairwise(ranges))
