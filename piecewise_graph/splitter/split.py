"""FX graph -> SplitGraph: cut a Dynamo graph at its splitting ops, in program order.

The cut is made in Dynamo's graph, before AOTAutograd functionalizes it. There a splitting op is still one
node with its real arguments; afterwards an op that writes its arguments is a functional one, and its outputs
would have to be threaded back by hand. In return the graph still has in-place ops, views and modes;
`analysis/facts.py` finds out what each segment does.

Sizes enter a segment and never leave it. `x.size()`, `x.shape[0] // 2` and the like are nodes too, a
torch.Size that leaves a segment breaks AOTAutograd, and an integer needs no segment to be known. So a size
belongs to no segment: each one that uses it computes it from size symbols, which are arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.sizes import TensorSpec, evaluate, is_scalar
from piecewise_graph.splitter.literals import literals_of
from piecewise_graph.splitter.segment_builder import SegmentBuilder, attribute
from piecewise_graph.splitter.source_names import MERGED_NAME, readable_source
from piecewise_graph.splitter.split_graph import (
    Input,
    Opaque,
    OpCall,
    OpStep,
    Ref,
    SegmentStep,
    Size,
    SplitGraph,
    Step,
)
from piecewise_graph.splitter.splitting_ops import callable_of, leaked_op, may_write, splitting_op_of


class Unsplittable(Exception):
    """The graph cannot be cut, for a fallback reason. `build_program` catches it; no user sees it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Kind(Enum):
    """What a group of nodes becomes."""

    SEGMENT = "segment"
    UNPADDED = "segment that runs on live rows"
    OPS = "splitting ops"


@dataclass
class _Group:
    """Adjacent nodes of one kind."""

    kind: _Kind
    nodes: list[Node] = field(default_factory=list)


def split(gm: GraphModule, unpadded: Container[str] = ()) -> SplitGraph:
    """Cut `gm` at every registered splitting op, and around `unpadded` nodes.

    Args:
        unpadded: names of nodes that go to segments of their own, which are never padded.

    Raises:
        Unsplittable: with the reason for which the graph has to stay whole.
    """
    _refuse_hidden_ops(gm)
    groups, home = _group_nodes(gm, unpadded)
    _refuse_open_modes(groups, home)
    return _Lowering(gm, groups, home).run()


def _group_nodes(gm: GraphModule, unpadded: Container[str]) -> tuple[list[_Group], dict[Node, _Group]]:
    groups: list[_Group] = []
    home: dict[Node, _Group] = {}
    dropped = _torch.droppable_functions()
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or _is_scalar(node):
            continue
        if node.op == "call_function" and node.target in dropped:
            continue
        kind = _kind(node, unpadded)
        owner, _ = _element(node)
        if owner is not None:
            group = home[owner]  # an element stays with the tuple that holds it
        elif groups and groups[-1].kind is kind:
            group = groups[-1]
        else:
            group = _Group(kind)
            groups.append(group)
        group.nodes.append(node)
        home[node] = group
    return groups, home


def _kind(node: Node, unpadded: Container[str]) -> _Kind:
    if splitting_op_of(node) is not None:
        return _Kind.OPS
    # A wrapper is put together for one reader, and cannot cross a cut: it goes where its reader goes.
    reader = next(iter(node.users)) if node.target is _torch.put_together else node
    return _Kind.UNPADDED if node.name in unpadded or reader.name in unpadded else _Kind.SEGMENT


def _is_scalar(node: Node) -> bool:
    """Integers, sizes, symbolic floats and booleans, and tuples of them: no segment owns them."""
    return is_scalar(_torch.example_value(node))


def _element(node: Node) -> tuple[Any, Any]:
    """(t, i) of a node `t[i]` where the node t returned a tuple of tensors; Nones of any other node."""
    owner = node.args[0] if node.target is operator.getitem else None
    if not isinstance(owner, Node) or not isinstance(_torch.example_value(owner), (tuple, list)):
        return None, None
    return owner, node.args[1]


def _refuse_hidden_ops(gm: GraphModule) -> None:
    """A splitting op in the body of a higher-order op would be captured with it."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "get_attr"]
    for inner in _torch.inner_graphs(gm, names):
        for node in inner.graph.nodes:
            if splitting_op_of(node) is not None:
                raise Unsplittable("splitting_op_inside_higher_order_op")
        _refuse_hidden_ops(inner)


def _refuse_open_modes(groups: list[_Group], home: dict[Node, _Group]) -> None:
    """A region of autocast, or of a function transform (vmap), has to begin and end in one segment."""
    enter, leave = _torch.autocast_functions()
    for group in groups:
        entered = {node for node in group.nodes if node.target is enter}
        left = {node.args[0] for node in group.nodes if node.target is leave}
        if entered != left:
            raise Unsplittable("autocast_region_crosses_a_cut")
        if sum(_torch.transform_depth(node.target) for node in group.nodes):
            raise Unsplittable("splitting_op_inside_higher_order_op")


class _Lowering:
    """One pass over the groups: gives tensors their slots and groups their steps."""

    def __init__(self, gm: GraphModule, groups: list[_Group], home: dict[Node, _Group]) -> None:
        self.gm, self.groups, self.home = gm, groups, home
        self.inputs: list[Input] = []
        self.specs: list[TensorSpec | None] = []
        self.storages: list[int | None] = []
        self.slots: dict[Node, int] = {}
        self.symbols: set[sympy.Symbol] = set()
        self.assigned, self.literals = _torch.assigned_attributes(), literals_of(gm)
        values = _torch.argument_values(gm)
        specs = [TensorSpec.of(value) for value in values if isinstance(value, Tensor)]
        self.in_layouts = set().union(*(spec.symbols for spec in specs))

    def run(self) -> SplitGraph:
        nodes = list(self.gm.graph.nodes)
        for op in ("placeholder", "get_attr"):
            for node in nodes:
                if node.op == op:
                    self._add_input(node)
        steps: list[Step] = []
        for group in self.groups:
            is_ops = group.kind is _Kind.OPS
            step = self._op_step(group) if is_ops else self._segment_step(group, len(steps))
            if step is not None:
                steps.append(step)
        outputs = map_arg(nodes[-1].args[0], self._output)
        computed = (node for group in self.groups if group.kind is not _Kind.OPS for node in group.nodes)
        leaks = tuple(name for name in map(leaked_op, computed) if name)
        return SplitGraph(
            tuple(self.inputs), tuple(self.specs), tuple(self.storages), tuple(steps), tuple(outputs), leaks
        )

    def _add_input(self, node: Node) -> None:
        value, constant = _torch.example_value(node), None
        if node.op == "get_attr":
            constant = attribute(self.gm, str(node.target))
            if not isinstance(constant, Tensor):
                return  # the body of a higher-order op: copied into the segment that calls it
            value = constant if value is None else value
        source, of_module = _torch.placeholder_source(node)
        name, merged = node.meta.get(MERGED_NAME) or readable_source(source), MERGED_NAME in node.meta
        stays = of_module and source not in self.assigned  # else every call brings another tensor
        stays |= _torch.is_marked_static(node)
        bound = stays or merged or constant is not None or isinstance(value, torch.nn.Parameter)
        size = _torch.expression(value) if isinstance(value, torch.SymInt) else None
        # Where a view begins in its storage is an argument that nothing reads, and that a copy does not have.
        is_read = bool(node.users) or size in self.in_layouts
        symbol = size if size is not None and size.is_Symbol and is_read else None
        spec = self.specs[self._add_slot(node, value)]
        self.symbols.update([symbol] if symbol is not None else ())
        self.symbols.update(*(size.free_symbols for size in (spec.shape if spec is not None else ())))
        self.inputs.append(Input(name, spec, bound, constant, symbol, merged, _torch.is_opaque(value)))

    def _new_slot(self, node: Node) -> int:
        value = _torch.example_value(node)
        if not isinstance(value, Tensor):
            several = isinstance(value, (tuple, list))
            raise Unsplittable("a_tuple_crosses_a_cut" if several else "an_effect_crosses_a_cut")
        if _torch.is_wrapper(value):
            raise Unsplittable("tensor_subclass")
        return self._add_slot(node, value)

    def _add_slot(self, node: Node, value: Any) -> int:
        is_tensor = isinstance(value, Tensor)
        if is_tensor and (value.is_conj() or value.is_neg()):  # a copy of it has no such bit
            raise Unsplittable("lazy_conjugate")
        self.slots[node] = len(self.specs)
        self.specs.append(TensorSpec.of(value) if is_tensor else None)
        self.storages.append(_torch.storage_id(value) if is_tensor else None)
        return self.slots[node]

    def _value(self, node: Node) -> Any:
        """What stands for `node` outside of the group that made it."""
        value, slot = _torch.example_value(node), self.slots.get(node)
        if slot is not None and self.specs[slot] is not None:
            return Ref(slot)
        if slot is not None and self.inputs[slot].opaque:
            return Opaque(slot)
        return self._scalar(value)

    def _value_in_segment(self, node: Node) -> Any:
        """The same for a segment, which computes the sizes that it uses, from integers alone."""
        value = self._value(node)
        sizes = value if isinstance(value, tuple) else (value,)
        if any(isinstance(size, Size) and _torch.has_float_steps(size.expr) for size in sizes):
            raise Unsplittable("a_symbolic_float_crosses_a_cut")
        return value

    def _output(self, node: Node) -> Any:
        """What the trace returns for `node`: of a tensor that was written in place, the argument itself."""
        value, made = self._value(node), _torch.example_value(node)
        if not isinstance(value, Ref) or value.slot < len(self.inputs):
            return value
        within = {
            i for i, x in enumerate(self.inputs) if x.bound and self.storages[i] == self.storages[value.slot]
        }
        arguments = ((slot, n) for n, slot in self.slots.items() if slot in within)
        same = (slot for slot, n in arguments if _torch.is_same_view(_torch.example_value(n), made))
        return Ref(next(same, value.slot))

    def _scalar(self, value: Any) -> Any:
        is_answer = isinstance(value, torch.SymBool) and not _torch.has_float_steps(value)
        if isinstance(value, torch.SymInt) or is_answer:
            expr = _torch.expression(value)
            if not expr.free_symbols <= self.symbols:
                raise Unsplittable("data_dependent_size")
            return Size(expr) if expr.free_symbols else evaluate(expr, {})
        if isinstance(value, (tuple, list)):
            return tuple(self._scalar(item) for item in value)
        if isinstance(value, (int, float)):
            return value
        raise Unsplittable(
            "a_symbolic_float_crosses_a_cut" if value is not None else "an_effect_crosses_a_cut"
        )

    def _op_step(self, group: _Group) -> OpStep:
        return OpStep(tuple(self._op_call(node, group) for node in group.nodes if _element(node)[0] is None))

    def _op_call(self, node: Node, group: _Group) -> OpCall:
        args, kwargs = map_arg(node.args, self._value), map_arg(dict(node.kwargs), self._value)
        elements = [(_element(other)[1], other) for other in group.nodes if _element(other)[0] is node]
        outputs: tuple[tuple[int | None, int], ...] = ()
        if elements:
            outputs = tuple((index, self._new_slot(element)) for index, element in elements)
        elif isinstance(_torch.example_value(node), Tensor):
            outputs = ((None, self._new_slot(node)),)
        elif any(_element(user)[0] is None for user in node.users):
            raise Unsplittable("a_tuple_crosses_a_cut")
        op = splitting_op_of(node)
        assert op is not None and callable(node.target)
        module = readable_source(_torch.module_source(node))
        return OpCall(op, callable_of(op, node.target), tuple(args), dict(kwargs), outputs, module)

    def _takes(self, user: Node, node: Node) -> bool:
        """`user`, in another group, is given what `node` makes."""
        makes_its_own = user in self.home and self.home[user].kind is not _Kind.OPS
        return not _is_scalar(user) and not (node in self.literals and makes_its_own)

    def _segment_step(self, group: _Group, position: int) -> SegmentStep | None:
        inside = set(group.nodes)
        leaving = [n for n in group.nodes if any(self._takes(u, n) for u in n.users if u not in inside)]
        if not leaving and not any(map(may_write, group.nodes)):
            return None
        builder = SegmentBuilder(self.gm, self.slots, self.specs, self.literals, self._value_in_segment)
        gm = builder.build(group.nodes, leaving)
        origins = {new.name: node.name for node, new in builder.copied.items()}
        return SegmentStep(
            position,
            gm,
            tuple(builder.inputs),
            tuple(self._new_slot(n) for n in leaving),
            padded=group.kind is _Kind.SEGMENT,
            origins=origins,
        )
