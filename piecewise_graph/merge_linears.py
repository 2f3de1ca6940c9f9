"""Parallel linears become one: q/k/v or gate/up projections of the same input, with one merged weight.

Note [What a merge leaves as it was]
The merged linear runs where the first of its members stood, and each member becomes a copy of its columns:
same shape, same strides, memory of its own. So nothing after it can tell the difference, whatever it does
with strides or in place. Inductor folds the copy into what reads it. Members may only be drawn together where
nothing between them writes, switches a mode or cuts the graph: linears of one region.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.call_names import readable_source
from piecewise_graph.merged_weights import Layout, Merge, find_fault, lay, side_by_side
from piecewise_graph.shapes import TensorSpec
from piecewise_graph.split_graph import MERGED_NAME
from piecewise_graph.splitting_ops import may_write, splitting_op_of
from piecewise_graph.telemetry import counters

# Kernels read weights in pieces of 16 bytes, and are compiled for addresses that allow it.
_ALIGNMENT = 16


def merge_linears(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[GraphModule, Merge]:
    """`gm` with its parallel linears merged, and the weights of the model laid out for it.

    Args:
        gm: as Dynamo traced it; it is not changed.
        example_inputs: its arguments; parameters among them are moved (Note [Who may be moved] in
            merged_weights.py).

    Returns:
        the graph to compile, which takes one more argument per layout of the second result.
    """
    merging = _Merging(gm, example_inputs)
    for group in _groups(gm, merging.given):
        merging.add(group)
    merging.finish()
    return merging.graph_module(), merging.summary()


@dataclass
class _Group:
    """Linears of one input in one region, in program order.

    Attributes:
        weights, biases: their placeholders; no biases where the linears have none.
    """

    linears: list[Node] = field(default_factory=list)
    weights: list[Node] = field(default_factory=list)
    biases: list[Node] = field(default_factory=list)

    @property
    def layouts(self) -> list[tuple[Node, ...]]:
        return [tuple(nodes) for nodes in (self.weights, self.biases) if nodes]


def _groups(gm: GraphModule, given: dict[Node, Tensor]) -> list[_Group]:
    """All groups of at least two.

    Args:
        given: placeholder -> the parameter that it stands for.
    """
    found: dict[tuple[Any, ...], _Group] = {}
    region = 0
    for node in gm.graph.nodes:
        region += _ends_region(node)
        x, weight, bias = _operands(node)
        kinds = [_kind(operand, given) for operand in (weight, bias)]
        if not isinstance(x, Node) or kinds[0] is None or (bias is not None and kinds[1] is None):
            continue
        group = found.setdefault((x, region, *kinds), _Group())
        group.linears.append(node)
        group.weights.append(weight)
        group.biases += [] if bias is None else [bias]
    return [group for group in found.values() if len(group.linears) > 1]


def _ends_region(node: Node) -> bool:
    switches = (*_torch.autocast_functions(), *_torch.droppable_functions())
    opaque = node.op == "call_module" or _torch.is_higher_order(node.target)
    return opaque or node.target in switches or splitting_op_of(node) is not None or may_write(node)


def _operands(node: Node) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a linear, Nones of another node."""
    if node.op != "call_function" or node.target is not torch.nn.functional.linear:
        return None, None, None
    named = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
    return named["input"], named["weight"], named.get("bias")


def _kind(operand: Any, given: dict[Node, Tensor]) -> tuple[Any, ...] | None:
    """What the parameters of a group have in common; None for what is no parameter."""
    value = given.get(operand) if isinstance(operand, Node) else None
    if value is None or not value.is_floating_point() or not value.is_contiguous() or value.numel() == 0:
        return None
    return (value.dtype, value.device, *value.shape[1:])


class _Merging:
    """One pass: takes groups one by one, moves their weights, then rewrites a copy of the graph."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self.gm = gm
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        pairs = list(zip(placeholders, example_inputs, strict=True))
        self.index = {node: index for index, node in enumerate(placeholders)}
        self.given = {node: value for node, value in pairs if _is_weight(node, value)}
        self.layout_of: dict[Node, tuple[Node, ...]] = {}
        self.groups: list[_Group] = []
        self.apart: Counter[str] = Counter()
        self.moved: set[torch.device] = set()

    def add(self, group: _Group) -> None:
        """Merge the weights of a group, or count why not."""
        reason = self._fault(group) or self._move(group)
        if reason is not None:
            self.apart[reason] += 1
            counters.unmerged(reason)
            return
        self.groups.append(group)
        self.layout_of.update((node, layout) for layout in group.layouts for node in layout)

    def finish(self) -> None:
        counters.add("merged_linears", sum(len(group.linears) for group in self.groups))
        if any(device.type == "cuda" for device in self.moved):
            torch.cuda.empty_cache()  # the memory that the weights had is of sizes that nobody else asks for

    def _fault(self, group: _Group) -> str | None:
        for layout in group.layouts:
            known = {self.layout_of.get(node) for node in layout}
            if len(set(layout)) < len(layout) or known not in ({None}, {layout}):
                return "weight_used_twice"
            sizes = [self.given[node].nbytes for node in layout]
            if any(start % _ALIGNMENT for start in accumulate(sizes[:-1])):
                return "unaligned"
            if any(_operands(user)[0] is None for node in layout for user in node.users):
                return "weight_read_elsewhere"
        if any(not _is_plain(_torch.example_value(node)) for node in group.linears):
            return "strided_output"
        faults = (find_fault([self.given[node] for node in layout]) for layout in group.layouts)
        return next((fault.reason for fault in faults if fault is not None), None)

    def _move(self, group: _Group) -> str | None:
        try:
            for members in [[self.given[node] for node in layout] for layout in group.layouts]:
                if side_by_side(members) is None:
                    lay(members)
                    self.moved.add(members[0].device)
        except (torch.OutOfMemoryError, MemoryError):
            return "no_room"
        except RuntimeError as error:
            if "alloc" not in str(error):  # the CPU's allocator has no error of its own
                raise
            return "no_room"
        return None

    def graph_module(self) -> GraphModule:
        if not self.groups:
            return self.gm
        return _Rewriting(self.gm, self.groups, self._distinct()).run()

    def _distinct(self) -> list[tuple[Node, ...]]:
        return list(dict.fromkeys(layout for group in self.groups for layout in group.layouts))

    def summary(self) -> Merge:
        layouts = tuple(map(self._layout, self._distinct()))
        labels = Counter("+".join(map(_module_name, group.weights)) for group in self.groups)
        linears = sum(len(group.linears) for group in self.groups)
        return Merge(layouts, dict(labels), linears, dict(self.apart))

    def _layout(self, nodes: tuple[Node, ...]) -> Layout:
        values = [self.given[node] for node in nodes]
        return Layout(
            tuple(self.index[node] for node in nodes),
            tuple(map(_name, nodes)),
            tuple(tuple(value.shape) for value in values),
            values[0].dtype,
        )


def _is_weight(node: Node, value: Any) -> bool:
    _, of_module = _torch.placeholder_source(node)
    return of_module and type(value) is torch.nn.Parameter and value.device.type != "meta"


def _is_plain(value: Any) -> bool:
    """A tensor that lies as one would that was just made with its shape."""
    if not isinstance(value, Tensor):
        return False
    spec = TensorSpec.of(value)
    steps = list(accumulate(reversed(spec.shape[1:]), lambda a, b: a * b, initial=1))
    return list(spec.stride) == steps[::-1]


def _name(node: Node) -> str:
    return readable_source(_torch.placeholder_source(node)[0])


def _module_name(node: Node) -> str:
    """`q_proj` of `self.layers.0.self_attn.q_proj.weight`."""
    return _name(node).split(".")[-2:][0]


class _Rewriting:
    """Makes a copy of the graph, with merged linears, in which nodes keep what Dynamo knows about them."""

    def __init__(self, gm: GraphModule, groups: list[_Group], layouts: list[tuple[Node, ...]]) -> None:
        self.gm, self.groups, self.layouts = gm, groups, layouts
        self.mode: Any = _torch.fake_mode_of(gm)
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}

    def run(self) -> GraphModule:
        returned = self.graph.graph_copy(self.gm.graph, self.copies)
        output = self.graph.output(returned)
        output.meta = dict(next(iter(reversed(self.gm.graph.nodes))).meta)
        merged = dict(zip(self.layouts, self._placeholders(), strict=True))
        for group in self.groups:
            weight, *bias = (merged[layout] for layout in group.layouts)
            self._merge(group, weight, bias[0] if bias else None)
        self.graph.lint()
        return GraphModule(self.gm, self.graph)

    def _placeholders(self) -> Iterator[Node]:
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        for number, layout in enumerate(self.layouts):
            with self.graph.inserting_after(last):
                last = self.graph.placeholder(f"merged_{number}")
            values = [_torch.example_value(node) for node in layout]
            shape = (sum(len(value) for value in values), *values[0].shape[1:])
            last.meta["example_value"] = self._fake(values[0], shape)
            names = [_name(layout[0]), *(".".join(_name(node).split(".")[-2:]) for node in layout[1:])]
            last.meta[MERGED_NAME] = " + ".join(names)
            yield last

    def _merge(self, group: _Group, weight: Node, bias: Node | None) -> None:
        members = [self.copies[node] for node in group.linears]
        first = members[0]
        rows = [len(_torch.example_value(node)) for node in group.weights]
        with self.graph.inserting_before(first):
            x = _operands(first)[0]
            linear = self._call(torch.nn.functional.linear, x, weight, bias)
            value = _torch.example_value(first)
            linear.meta["example_value"] = self._fake(value, (*value.shape[:-1], sum(rows)))
            for member, start, count in zip(members, accumulate(rows, initial=0), rows, strict=False):
                part = self._call(torch.narrow, linear, -1, start, count)
                with self.mode, _torch.python_dispatcher():
                    part.meta["example_value"] = torch.narrow(_torch.example_value(linear), -1, start, count)
                copy = self._call(torch.clone, part, memory_format=torch.contiguous_format)
                copy.meta = dict(member.meta)
                member.replace_all_uses_with(copy)
        for member in members:
            self.graph.erase_node(member)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return self.graph.call_function(target, args, kwargs)

    def _fake(self, like: Tensor, shape: Sequence[Any]) -> Tensor:
        with self.mode, _torch.python_dispatcher():
            return torch.empty(shape, dtype=like.dtype, device=like.device)
