"""RMS norms in a graph, of a sum with a residual, as transformers writes them.

In a Llama's kind of model they follow the attention's output and the MLP, twice per layer. (RMS norm: Zhang
and Sennrich, arXiv 1910.07467.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from piecewise_graph import _torch
from piecewise_graph.kernels import added_norm


class AddedNorm(NamedTuple):
    """`hidden = residual + added`, `normed = weight * hidden / rms(hidden)`."""

    added: Node
    residual: Node
    weight: Node
    epsilon: float
    hidden: Node
    normed: Node


def norm_after(added: Node) -> AddedNorm | None:
    """The residual that `added` is added to and the norm of the sum, if nothing else reads `added`."""
    hidden = _only_user(added, _calls(operator.add))
    residual = next((arg for arg in hidden.args if arg is not added), None) if hidden else None
    if hidden is None or not isinstance(residual, Node):
        return None
    value = _value(hidden)
    # With more dimensions, `hidden` may lie in memory otherwise than row by row; an op's result does not.
    is_plain = isinstance(value, Tensor) and value.dim() <= 3 and added_norm.serves(value)
    for wide in hidden.users if is_plain else ():
        found = _norm_of(wide, value) if _is_float32_of(wide, hidden) else None
        if found is None or not (_is_like(residual, value) and _is_like(added, value)):
            continue
        weight, epsilon, normed = found
        if not others_between(added, normed, residual):
            return AddedNorm(added, residual, weight, epsilon, hidden, normed)
    return None


def others_between(first: Node, last: Node, residual: Node) -> bool:
    """Other calls stand between. They may write what the op reads, by whatever name it has.

    The one that makes the residual is such a call too.
    """
    chain, node = {last}, last
    while node is not first:
        node = node.prev
        if node is not residual and any(user in chain for user in node.users):
            chain.add(node)
        elif node.op not in ("placeholder", "get_attr"):
            return True
    return False


def erase(graph: Graph, node: Node) -> None:
    """It, and the calls that only it has read. The caller knows that they have no effect."""
    if node.op in ("placeholder", "get_attr") or node.users:
        return
    # What others read as well is erased with the last of them.
    sources = [source for source in node.all_input_nodes if len(source.users) == 1]
    graph.erase_node(node)
    for source in sources:
        erase(graph, source)


def _norm_of(wide: Node, hidden: Tensor) -> tuple[Node, float, Node] | None:
    """(weight, epsilon, result) of the RMS norm that begins with `wide`."""
    square = next((user for user in wide.users if user.target == "pow" and user.args == (wide, 2)), None)
    mean = _only_user(square, lambda node: node.target == "mean" and _means_rows(node))
    shifted = _only_user(mean, _calls(operator.add))
    epsilon = shifted.args[1] if shifted is not None else None
    root = _only_user(shifted, _calls(torch.rsqrt))
    unit = _only_user(root, _calls(operator.mul))
    if not isinstance(epsilon, float) or unit is None or set(unit.args) != {wide, root}:
        return None
    if set(wide.users) != {square, unit}:
        return None
    narrow = _only_user(unit, lambda node: node.target == "to" and _is_cast(node, hidden.dtype))
    normed = _only_user(narrow, _calls(operator.mul))
    if normed is None:
        return None
    weight = next((arg for arg in normed.args if arg is not narrow), None)
    scale = _value(weight)
    fits = isinstance(scale, Tensor) and scale.shape == hidden.shape[-1:] and scale.dtype == hidden.dtype
    is_given = isinstance(weight, Node) and weight.op in ("placeholder", "get_attr")
    return (weight, epsilon, normed) if fits and is_given else None  # type: ignore[return-value]


def _is_cast(node: Node, dtype: torch.dtype) -> bool:
    return node.args[1:] == (dtype,) and not node.kwargs


def _means_rows(node: Node) -> bool:
    if not node.kwargs.keys() <= {"dim", "keepdim"}:
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return dims in (-1, (-1,), [-1]) and (node.kwargs.get("keepdim") is True or node.args[2:] == (True,))


def _is_float32_of(node: Node, source: Node) -> bool:
    to = node.target == "to" and node.args[0] is source and _is_cast(node, torch.float32)
    return to or (node.target == "float" and node.args == (source,))


def _is_like(node: Node, value: Tensor) -> bool:
    """It is a tensor of the same shape and dtype, whose rows follow each other."""
    other = _value(node)
    if not isinstance(other, Tensor) or other.dtype != value.dtype or other.dim() != value.dim():
        return False
    # Compared as expressions: to compare dynamic sizes as numbers would be a condition on them.
    same = [str(size) for size in other.shape] == [str(size) for size in value.shape]
    steps = [str(step) for step in other.stride()[-2:]]
    return same and steps == [str(value.shape[-1]), "1"][-value.dim() :]


def _only_user(node: Node | None, fits: Callable[[Node], bool]) -> Node | None:
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and fits(users[0]) else None


def _calls(function: Any) -> Callable[[Node], bool]:
    return lambda node: node.op == "call_function" and node.target is function and len(node.kwargs) == 0


def _value(node: Any) -> Any:
    return _torch.example_value(node) if isinstance(node, Node) else None
