"""Calls that return a view or a copy, whichever it is: what is written in place shows which.

A trace says what it was for the layouts that it was made with. `contiguous` returns its operand where that is
contiguous: in other strides, or of a single row, it may be the other of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
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
    return bool(writes) and any(
        any(map(_has_callers_strides, node.all_input_nodes))
        and any(_is_written_after(each, node, writes) for each in (node, *node.all_input_nodes))
        for node in filter(_goes_by_layout, gm.graph.nodes)
    )


def copies_several_rows(gm: GraphModule, writes: Writes) -> bool:
    """What the trace copies is no copy of one row, and a write behind it is seen by the other name."""
    by_layout = filter(_goes_by_layout, gm.graph.nodes if writes else ())
    pairs = [(node, operand) for node in by_layout for operand in node.all_input_nodes]
    copies = [(node, operand) for node, operand in pairs if _copies_rows(node, operand)]
    chained = any(_share(operand, node) for _, operand in copies for node, _ in copies)
    return any(_shows(*pair, writes, chained=chained) for pair in copies)


def _copies_rows(node: Node, operand: Node) -> bool:
    return _torch.has_symbolic_sizes(_torch.example_value(operand)) and not _share(node, operand)


def _shows(node: Node, operand: Node, writes: Writes, *, chained: bool) -> bool:
    """A call behind `node` writes one of both, and the other is read then, or is the caller's.

    Args:
        chained: copies of copies may read them by other names.
    """
    kept = chained or any(_share(operand, argument) for argument in node.graph.find_nodes(op="placeholder"))
    return any(
        (_meet(written, node) and (kept or _is_read(operand, call, written)))
        or (_meet(written, operand) and (chained or _is_read(node, call, written)))
        for call, written in writes
        if call > node
    )


def _is_read(wanted: Node, call: Node, written: Node) -> bool:
    """By the call that writes, or by one behind it."""
    behind = (user for user in wanted.graph.nodes if user >= call)
    return any(
        _meet(given, wanted) for user in behind for given in user.all_input_nodes if given is not written
    )


def _meet(one: Node, other: Node) -> bool:
    """They share memory, and not as columns of the same rows that lie beside one another."""
    if not _share(one, other):
        return False
    mine, theirs = (_columns(_torch.example_value(node)) for node in (one, other))
    if mine is None or theirs is None or mine[0] != theirs[0]:
        return True
    return mine[1] <= theirs[2] and theirs[1] <= mine[2]


def _columns(tensor: Tensor) -> tuple[int, int, int] | None:
    """Of a row: how far the next one is, and where in it the first and the last of its elements lie."""
    pairs: list[tuple[Any, Any]] = list(zip(tensor.shape, tensor.stride(), strict=True))
    rows = [step for size, step in pairs if isinstance(size, torch.SymInt)]
    others = [(size, step) for size, step in pairs if not isinstance(size, torch.SymInt) and size != 1]
    numbers = [tensor.storage_offset(), *rows, *(step for _, step in others)]
    if len(rows) != 1 or rows[0] == 0 or any(isinstance(number, torch.SymInt) for number in numbers):
        return None
    first = int(tensor.storage_offset() % rows[0])
    last = first + sum((size - 1) * step for size, step in others)
    return (rows[0], first, last) if last < rows[0] else None


def _goes_by_layout(node: Node) -> bool:
    name = called_name(node).rpartition("::")[2]
    return name in _BY_LAYOUT or (name == "to" and "memory_format" in node.kwargs)


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
