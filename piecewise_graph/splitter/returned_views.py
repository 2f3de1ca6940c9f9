"""Results that are views of arguments: made of the caller's own tensors, outside of the graphs.

What a replay returns is memory of its own. A view of an argument has to be memory of the argument, because
what is written to one of them must be seen in the other. It costs no kernel to make it by the ops of the
trace. Everything behind this pass sees a trace without these results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.sizes import is_scalar
from piecewise_graph.splitter.splitting_ops import changes_shape_in_place, may_write, splitting_op_of


@dataclass(frozen=True)
class ReturnedViews:
    """A trace without the results that are views of its arguments, and how these are made.

    Attributes:
        gm: returns the other results.
        places: of the views among the results of the trace, in ascending order.
        make: the arguments at `needed` -> the views.
    """

    gm: GraphModule
    places: Sequence[int]
    make: Callable[..., Sequence[Tensor]]
    needed: Sequence[int]

    def added_to(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of the smaller trace, with the views among its results."""
        places, make, needed = self.places, self.make, self.needed
        if not places:
            return forward

        def forward_with_views(*args: Any) -> list[Any]:
            results = list(forward(*args))
            with _torch.traced_functions():
                views = make(*[args[index] for index in needed])
            for place, view in zip(places, views, strict=True):
                results.insert(place, view)
            return results

        return forward_with_views


def without_returned_views(gm: GraphModule) -> ReturnedViews:
    """`gm` without the results that are views of its arguments; `gm` itself is not changed."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    results: Any = gm.graph.output_node().args[0]
    is_dynamos = isinstance(results, (tuple, list))
    if not is_dynamos or _switches_grad(gm):  # a view's history tells the mode that it was made in
        return ReturnedViews(gm, (), tuple, ())
    made = {place: _ops_of_view(node, placeholders) for place, node in enumerate(results)}
    views = {place: ops for place, ops in made.items() if ops}
    if not views or any(map(changes_shape_in_place, gm.graph.nodes)):  # which makes another view of a value
        return ReturnedViews(gm, (), tuple, ())
    wanted = set().union(*views.values())
    ops = [node for node in gm.graph.nodes if node in wanted]
    read = {operand for node in ops for operand in node.all_input_nodes}
    needed = [index for index, node in enumerate(placeholders) if node in read]
    graph, copies = Graph(), dict[Node, Node]()
    for index in needed:
        copies[placeholders[index]] = graph.placeholder(f"a{index}")
    for node in ops:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[results[place]] for place in views))
    others = [node for place, node in enumerate(results) if place not in views]
    make = GraphModule({}, graph, class_name="Views").forward
    return ReturnedViews(_returning(gm, others), tuple(views), make, needed)


def _ops_of_view(node: Any, placeholders: Iterable[Node]) -> frozenset[Node]:
    """The nodes that make `node`, a view of an argument, of arguments; none of any other result."""
    value = _torch.example_value(node) if isinstance(node, Node) and node.op != "placeholder" else None
    shared = [x for x in placeholders if _torch.share_storage(_torch.example_value(x), value)]
    found: set[Node] = set()
    waiting = [node] if shared else []
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder" or one in found:
            continue
        if not _makes_views_of(value, one):
            return frozenset()
        found.add(one)
        waiting += one.all_input_nodes
    return frozenset(found)


def _makes_views_of(value: Any, node: Node) -> bool:
    """`node` computes a size of sizes, or views in the storage of `value` from such views and sizes alone.

    The views are made after the forward, which may have written what a tensor holds: no number comes from a
    tensor. Inside of a transform of functions (vmap) a view has no storage, and needs the nodes around it.
    """
    if not node.op.startswith("call_") or may_write(node) or splitting_op_of(node) is not None:
        return False
    made, given = _torch.example_value(node), list(map(_torch.example_value, node.all_input_nodes))
    if is_scalar(made):
        return all(map(is_scalar, given))
    tensors = [each for each in (made, *given) if not is_scalar(each)]
    parts = [part for each in tensors for part in (each if isinstance(each, (tuple, list)) else (each,))]
    return all(_torch.share_storage(part, value) for part in parts)


def _switches_grad(gm: GraphModule) -> bool:
    """It makes values in another grad mode than its caller's."""
    switches = gm.graph.find_nodes(op="call_function", target=_torch.grad_mode_function())
    return any(switch.args != (torch.is_grad_enabled(),) for switch in switches)


def _returning(gm: GraphModule, results: Sequence[Any]) -> GraphModule:
    """A copy of `gm` that returns these of its values; its nodes keep what Dynamo knows about them."""
    graph, copies = Graph(), dict[Node, Node]()
    graph.graph_copy(gm.graph, copies)
    output = graph.output(map_arg(tuple(results), copies.__getitem__))
    output.meta = dict(gm.graph.output_node().meta)
    return _torch.ending_like(gm, GraphModule(gm, graph))
