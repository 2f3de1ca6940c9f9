"""Sums over ranks that begin with one op and are waited for by another become one op that does both.

Dynamo traces `torch.distributed.all_reduce(x)` as a functional all-reduce, a wait, and a copy back into x.
`piecewise::all_reduce` does not return before it is done (Note [Ops of our own] in ranks/collectives.py), and
where nothing else can see the memory of x, who reads x afterwards reads the result instead of a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.ranks import collectives  # noqa: F401  # its op
from piecewise_graph.splitter.merge_linears import linear_operands
from piecewise_graph.splitter.segment_builder import copied

_OURS = (torch.ops.piecewise.all_reduce.default, torch.ops.piecewise.all_gather.default)


def with_waited_collectives(gm: GraphModule) -> GraphModule:
    """A copy of `gm` whose sums over ranks are one op each; `gm` itself where there are none."""
    if not any(map(_waited, gm.graph.nodes)):
        return gm
    graph, _ = copied(gm)
    for wait in [node for node in graph.nodes if _waited(node) is not None]:
        begun: Any = _waited(wait)
        x, _, group = begun.args
        with graph.inserting_before(wait):
            done = graph.call_function(torch.ops.piecewise.all_reduce.default, (x, group))
        done.meta = dict(wait.meta)
        wait.replace_all_uses_with(done)
        graph.erase_node(wait)
        graph.erase_node(begun)
        _read_in_place_of(x, done)
    graph.lint()
    return _torch.ending_like(gm, GraphModule(gm, graph))


def groups_of(gm: GraphModule) -> list[str]:
    """Names of the process groups whose ranks run the trace together."""
    found = dict.fromkeys(filter(None, map(_group_of, gm.graph.nodes)))
    return list(found)


def sums_of(gm: GraphModule) -> list[tuple[str, Tensor]]:
    """Of each sum over ranks: the name of its process group, and a tensor of its dtype and device."""
    sums = [node for node in gm.graph.nodes if node.target is torch.ops.piecewise.all_reduce.default]
    return [(str(node.args[1]), _torch.example_value(node)) for node in sums]


def _group_of(node: Node) -> str | None:
    if _torch.is_sharded(value := _torch.example_value(node)):
        return str(value.device_mesh.get_group().group_name) if value.device_mesh.ndim == 1 else None
    if node.target not in _OURS and _torch.functional_collective(node) is None:
        return None
    texts = [text for text in (*node.args, *node.kwargs.values()) if isinstance(text, str)]
    return texts[-1] if texts else None  # the group comes last, behind the kind of reduction


def _waited(node: Node) -> Node | None:
    """The sum over ranks that `node` waits for, and nothing else reads."""
    called = _torch.functional_collective
    begun: Any = node.args[0] if called(node) == "wait_tensor" else None
    if not isinstance(begun, Node) or called(begun) != "all_reduce" or len(begun.args) != 3:
        return None
    value = _torch.example_value(begun.args[0]) if isinstance(begun.args[0], Node) else None
    plain = isinstance(value, Tensor) and not _torch.is_wrapper(value) and value.is_contiguous()
    return begun if plain and begun.args[1] == "sum" and list(begun.users) == [node] else None


def _read_in_place_of(x: Node, done: Node) -> None:
    """Leave out the copy of `done` back into `x`, where `x` is memory that nothing else has seen before."""
    after = list(x.users)
    copy = next((user for user in done.users if user.target == "copy_" and user.args[:2] == (x, done)), None)
    if copy is None or linear_operands(x)[0] is None or not isinstance(_torch.example_value(x), Tensor):
        return
    places = {node: place for place, node in enumerate(x.graph.nodes)}
    if any(places[user] < places[copy] for user in after if user is not done):
        return  # it may be a view, which the copy would be seen through
    copy.replace_all_uses_with(done)
    x.graph.erase_node(copy)
    x.replace_all_uses_with(done, delete_user_cb=lambda user: user is not done)
