"""Weights that are wrapper subclasses become their inner tensors.

A quantised weight of torchao is a tensor of no storage, made of a few others (integers, scales). Graphs read
memory by address, so these others become the arguments of the trace, and each node that uses the wrapper
gets a new one, made inside of its segment. The ops of the wrapper are traced from there, as AOTAutograd does
it. Everything behind this pass sees plain tensors alone.

A wrapper that the caller passes, or of symbolic sizes, stays, as does one that a splitting op takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.splitter.segment_builder import attribute, copied

# Equal layouts are one object, so that equal structures are told to be equal (segment_key.py).
_layouts: list[_torch.WrapperLayout] = []


@dataclass(frozen=True)
class PlainGraph:
    """A trace whose wrapper weights are taken apart.

    Attributes:
        gm: takes what `arguments` returns.
        layouts: of the wrappers, by their place among the arguments of the trace.
    """

    gm: GraphModule
    layouts: Mapping[int, _torch.WrapperLayout]

    def arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """A call's arguments, with the inner tensors of a wrapper in its place."""
        if not self.layouts:
            return args
        plain: list[Any] = []
        for index, value in enumerate(args):
            layout = self.layouts.get(index)
            plain.extend([value] if layout is None else layout.take_apart(value))
        return plain

    def taking_apart(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of the plain arguments, for the arguments of the trace."""

        def forward_of_wrappers(*args: Any) -> Any:
            return forward(*self.arguments(args))

        return forward_of_wrappers

    def weights(self, args: Sequence[Any]) -> list[int]:
        """Places in `arguments(args)` of parameters and of what they are made of."""
        found: list[int] = []
        at = 0
        for index, value in enumerate(args):
            layout = self.layouts.get(index)
            count = 1 if layout is None else len(list(layout.names_of_parts()))
            found += range(at, at + count) if isinstance(value, torch.nn.Parameter) else ()
            at += count
        return found


def without_wrappers(gm: GraphModule, example_inputs: Sequence[Any]) -> PlainGraph:
    """`gm` with the wrappers among its weights taken apart; `gm` itself is not changed."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    layouts = {
        index: _one(_torch.WrapperLayout.of(value))
        for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True))
        if _is_wrapper_weight(node, value)
    }
    return PlainGraph(_rewritten(gm, layouts) if layouts else gm, layouts)


def _is_wrapper_weight(node: Node, value: Any) -> bool:
    seen = _torch.example_value(node)
    if not (_torch.is_wrapper(value) and _torch.is_wrapper(seen) and _torch.has_constant_sizes(seen)):
        return False
    return isinstance(value, torch.nn.Parameter) or _torch.placeholder_source(node)[1]


def _one(layout: _torch.WrapperLayout) -> _torch.WrapperLayout:
    """The known layout that equals this one."""
    for known in _layouts:
        if known == layout:
            return known
    _layouts.append(layout)
    return layout


def _rewritten(gm: GraphModule, layouts: Mapping[int, _torch.WrapperLayout]) -> GraphModule:
    """A copy of the graph, with inner tensors as arguments; its nodes keep what Dynamo knows about them."""
    graph, copies = copied(gm)
    held = {f"wrapper_layout_{index}": layout for index, layout in layouts.items()}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for name, index in zip(held, layouts, strict=True):
        _replace(graph, copies[placeholders[index]], name, layouts[index])
    graph.lint()
    attributes = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    held |= {name: attribute(gm, name) for name in attributes}
    return _torch.ending_like(gm, GraphModule(held, graph))


def _replace(graph: Graph, node: Node, name: str, layout: _torch.WrapperLayout) -> None:
    """The inner tensors of the argument `node` in its place, and a wrapper of them for each of its users."""
    seen, parts = _torch.example_value(node), []
    for way, value in zip(layout.names_of_parts(), layout.take_apart(seen), strict=True):
        with graph.inserting_before(node):
            parts.append(graph.placeholder("_".join([node.name, *way])))
        parts[-1].meta = _torch.meta_of_part(node, way, value)
    for user in list(node.users):
        with graph.inserting_before(user):
            made = graph.call_function(_torch.put_together, (graph.get_attr(name), *parts))
        made.meta = {key: user.meta[key] for key in ("nn_module_stack",) if key in user.meta}
        made.meta["example_value"] = seen
        user.replace_input_with(node, made)
    graph.erase_node(node)
