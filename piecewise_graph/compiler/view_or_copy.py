"""Calls that return a view or a copy, whichever it is: what is written in place shows which.

A trace says what it was for the layouts that it was made with. `contiguous` returns its operand where that is
contiguous: in other strides, or of a single row, it may be the other of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch.fx import GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.splitter.splitting_ops import called_name, written_operands

Writes = Sequence[tuple[Node, Node]]  # (an in-place call, what it may write)

_BY_LAYOUT = frozenset({"contiguous", "flatten", "ravel", "reshape", "reshape_as"})


def writes_of(gm: GraphModule) -> Writes:
    return [(node, operand) for node in gm.graph.nodes for operand in written_operands(node)]


def writes_a_dropout(gm: GraphModule, writes: Writes) -> bool:
    """Dropout in eval mode, traced as a copy, returns its argument, which what is written to it reaches."""
    return any(_is_written_after(node, node, writes) for node in gm.graph.nodes if _returns_argument(node))


def decided_by_strides(gm: GraphModule, writes: Writes) -> bool:
    """In other strides of the caller's tensors, what is written would reach other tensors."""
    return any(any(map(_has_callers_strides, node.all_input_nodes)) for node in _written(gm, writes))


def copies_several_rows(gm: GraphModule, writes: Writes) -> bool:
    """With one row, what is written would reach a tensor that the trace has copied: it needs no copy then."""
    return any(_copies_rows(node) for node in _written(gm, writes))


def _copies_rows(node: Node) -> bool:
    operands = node.all_input_nodes
    has_rows = any(_torch.has_symbolic_sizes(_torch.example_value(operand)) for operand in operands)
    return has_rows and not any(_share(node, operand) for operand in operands)


def _written(gm: GraphModule, writes: Writes) -> Iterator[Node]:
    """Calls that decide by layout, of which an operand or the result is written later."""
    for node in gm.graph.nodes if writes else ():
        name = called_name(node).rpartition("::")[2]
        by_layout = name in _BY_LAYOUT or (name == "to" and "memory_format" in node.kwargs)
        if by_layout and any(_is_written_after(each, node, writes) for each in (node, *node.all_input_nodes)):
            yield node


def _is_written_after(node: Node, place: Node, writes: Writes) -> bool:
    """A call behind `place` writes to what the node makes, or to a view of it."""
    return any(_share(operand, node) for call, operand in writes if call > place)


def _share(one: Node, other: Node) -> bool:
    return _torch.share_storage(_torch.example_value(one), _torch.example_value(other))


def _returns_argument(node: Node) -> bool:
    name = called_name(node).rpartition("::")[2]
    return "dropout" in name or name in ("lift", "lift_fresh")


def _has_callers_strides(node: Node) -> bool:
    """A tensor whose layout may differ in another call: an argument's, or one that follows from sizes."""
    arguments = node.graph.find_nodes(op="placeholder")
    follows = _torch.has_symbolic_strides(_torch.example_value(node))
    return follows or any(_share(node, argument) for argument in arguments)
