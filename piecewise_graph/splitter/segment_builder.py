"""A group of nodes -> the graph of one segment.

Note [Sizes of a segment]
Arguments of a segment are tensors and size symbols, among them each symbol of a tensor's layout; a size that
is derived from symbols is computed in it. Torch's caches keep what the code of a graph relies on, but only in
the symbols that are arguments. Of others they keep nothing, and hand the code to every trace. Nor could what
they keep of an argument that is an expression be evaluated in another trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.sizes import TensorSpec
from piecewise_graph.splitter.source_names import MODULE, readable_source
from piecewise_graph.splitter.split_graph import Opaque, Ref, Size


class SegmentBuilder:
    """Copies a group's nodes into a graph of its own, with names that equal layers share.

    FX names the nodes and placeholders are numbered. So equal layers print the same graph, and Inductor's
    on-disk cache finds them too. Nodes keep the values that Dynamo saw: AOTAutograd caches a graph only if it
    can tell that its methods are those of tensors.

    Args:
        gm: the graph of the trace.
        slots, specs: of its tensors.
        literals: nodes that each segment makes for itself.
        value: what stands for a node outside of the segment that made it.
    """

    def __init__(
        self,
        gm: GraphModule,
        slots: Mapping[Node, int],
        specs: Sequence[TensorSpec | None],
        literals: Container[Node],
        value: Callable[[Node], Any],
    ) -> None:
        self.gm, self.slots, self.specs, self.literals, self.value = gm, slots, specs, literals, value
        self.graph = Graph()
        self.root: dict[str, Any] = {}
        self.copied: dict[Node, Any] = {}
        self.sizes: dict[Size, Node] = {}  # derived from size symbols
        self.placeholders: dict[Any, Node] = {}
        self.inputs: list[Ref | Size | Opaque] = []

    def build(self, nodes: Sequence[Node], leaving: Sequence[Node]) -> GraphModule:
        """The segment of `nodes`, which returns those that are `leaving`."""
        for node in nodes:
            self._copy(node)
        self._bind_symbols()
        self.graph.output(tuple(self.copied[node] for node in leaving))
        return GraphModule(self.root, self.graph, class_name="Segment")

    def _copy(self, node: Node) -> Node:
        args = map_arg(node.args, self._operand)
        kwargs = map_arg(dict(node.kwargs), self._operand)
        new = self.graph.create_node(node.op, node.target, tuple(args), dict(kwargs))
        new.meta["example_value"] = _torch.example_value(node)
        new.meta[MODULE] = readable_source(_torch.module_source(node))
        self.copied[node] = new
        return new

    def _operand(self, node: Node) -> Any:
        if node in self.copied:
            return self.copied[node]
        if node.op == "get_attr" and node not in self.slots:
            return self._copy_attribute(node)
        value = _torch.example_value(node)
        if isinstance(value, (torch.SymFloat, torch.SymBool)) or node in self.literals:
            return self._copy(node)  # computed anew wherever it is used, from sizes or from nothing
        return self._enter(self.value(node), value)

    def _enter(self, outer: Any, value: Any) -> Any:
        """Make an outer value an argument of the segment; constants stay constants."""
        if isinstance(outer, tuple):
            return tuple(self._enter(item, part) for item, part in zip(outer, value, strict=True))
        if not isinstance(outer, (Ref, Size, Opaque)):
            return outer
        if isinstance(outer, Size) and not outer.expr.is_Symbol:
            return self._derive(outer, value)
        if outer not in self.placeholders:
            placeholder = self._placeholder(f"a{len(self.inputs)}")
            placeholder.meta["example_value"] = value
            self.placeholders[outer] = placeholder
            self.inputs.append(outer)
        return self.placeholders[outer]

    def _derive(self, size: Size, value: torch.SymInt) -> Node:
        """Compute a size in the segment (Note [Sizes of a segment])."""
        if size not in self.sizes:
            symbols = sorted(size.expr.free_symbols, key=str)
            taken = {symbol: self._enter_symbol(symbol) for symbol in symbols}
            self.sizes[size] = _torch.add_size(self.graph, value, taken)
        return self.sizes[size]

    def _enter_symbol(self, symbol: sympy.Symbol) -> Node:
        size = _torch.size_of(_torch.shape_env_of(self.gm), symbol)
        node: Node = self._enter(Size(symbol), size)
        return node

    def _bind_symbols(self) -> None:
        """Symbols that stand in layouts of arguments become arguments.

        Not a dimension that data decide: no code has conditions on it, and no call tells it beforehand.
        """
        env = _torch.shape_env_of(self.gm)
        specs = [self.specs[outer.slot] for outer in self.inputs if isinstance(outer, Ref)]
        sizes = {size for spec in specs if spec is not None for size in (*spec.shape, *spec.stride)}
        unknown = {size for size in sizes if size.is_Symbol and _torch.size_hint(env, size) is None}
        for symbol in sorted(set().union(*(size.free_symbols for size in sizes)) - unknown, key=str):
            self._enter_symbol(symbol)

    def _placeholder(self, name: str) -> Node:
        """Placeholders stand first in a graph, in the order in which they were made."""
        body = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(body) if body is not None else nullcontext():
            return self.graph.placeholder(name)

    def _copy_attribute(self, node: Node) -> Node:
        name = str(node.target)
        self.root[name] = attribute(self.gm, name)
        self.copied[node] = self.graph.get_attr(name)
        return self.copied[node]


def attribute(gm: GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(gm)


def copied(gm: GraphModule) -> tuple[Graph, dict[Node, Node]]:
    """The graph again, and the copy of each node; all keep what Dynamo knows about them."""
    graph, copies = Graph(), dict[Node, Node]()
    output = graph.output(graph.graph_copy(gm.graph, copies))
    output.meta = dict(gm.graph.output_node().meta)
    return graph, copies
