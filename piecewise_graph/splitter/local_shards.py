"""Sharded tensors (DTensor) of a trace become what this rank holds of them, and the collectives between.

A tensor-parallel model declares its activations sharded, computes, and has the result gathered or summed.
Behind the pass that takes weights apart (wrapper_weights.py), each such value stands for a local tensor and a
placement. So the ops that lead from local tensors to local tensors are replaced by what they do on one rank:
a linear by a linear, a sum over ranks by `piecewise::all_reduce`. Segments then hold plain tensors alone, as
the rules of the padding proof, the kernels of linears and Inductor want them.

What has no rule here stays as it is: DTensor runs it inside of its segment.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional

from piecewise_graph import _torch
from piecewise_graph.ranks import collectives  # noqa: F401  # its ops
from piecewise_graph.sizes import is_scalar
from piecewise_graph.splitter.merge_linears import linear_operands
from piecewise_graph.splitter.segment_builder import copied

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm")  # its first arguments


def with_local_shards(gm: GraphModule) -> GraphModule:
    """A copy of `gm` in which local tensors stand for sharded ones; `gm` itself where there are none."""
    if not any(_torch.is_sharded(_torch.example_value(node)) for node in gm.graph.nodes):
        return gm
    graph, _ = copied(gm)
    mode = _torch.fake_mode_of(gm)
    assert mode is not None  # a graph with a sharded tensor has one
    _Localising(graph, mode).run()
    graph.lint()
    env = _torch.shape_env_of(gm)
    if env is not None and not any(_torch.is_sharded(_torch.example_value(node)) for node in graph.nodes):
        _torch.forget_conditions_of_shards(env)
    return _torch.ending_like(gm, GraphModule(gm, graph))


class _Localising:
    """One pass over a graph. `local` has, for each sharded value that has one, the node of its local part."""

    def __init__(self, graph: Graph, mode: Any) -> None:
        self.graph, self.mode = graph, mode
        self.local: dict[Node, Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if _torch.is_sharded(_torch.example_value(node)):
                with self.graph.inserting_before(node):
                    local = self._local(node)
                if local is not None:
                    self.local[node] = local
            elif _torch.takes_local(node) and (local := self.local.get(_first(node))) is not None:
                node.replace_all_uses_with(local)
                self.graph.erase_node(node)
        for node in reversed(list(self.graph.nodes)):
            if not node.users and (node in self.local or _is_shape_alone(node)):
                self.graph.erase_node(node)

    def _local(self, node: Node) -> Node | None:
        """A node for what this rank holds of a sharded value; None where no rule here makes it."""
        if len(_placements(node)) != 1:
            return None
        if node.target is _torch.put_together:
            parts = node.args[1:]
            return parts[0] if len(parts) == 1 and isinstance(parts[0], Node) else None
        if _torch.makes_sharded_of_local(node):
            return node.args[0] if isinstance(node.args[0], Node) else None
        if _torch.moves_shards(node):
            return self._moved(node)
        if node.target is functional.embedding:
            return self._embedding(node)
        return self._linear(node) if linear_operands(node)[0] is not None else None

    def _moved(self, node: Node) -> Node | None:
        source: Any = node.args[0]
        local = self.local.get(source)
        (before,), (after,) = _placements(source), _placements(node)
        if local is None or before == after:
            return local
        whole, group = _torch.example_value(node), _group(node)
        if after.is_replicate() and before.is_partial() and before.reduce_op == "sum":
            return self._call(torch.ops.piecewise.all_reduce.default, local, group.group_name)
        both = before, after
        if not all(map(_is_plain, both)) or not any(each.is_replicate() for each in both):
            return None
        dim = (before if after.is_replicate() else after).dim
        size = whole.shape[dim]
        if not isinstance(size, int):
            return None
        if after.is_replicate():
            return self._call(torch.ops.piecewise.all_gather.default, local, dim, size, group.group_name)
        part = self._call(torch.narrow, local, dim, *_part_of(size, group))
        return self._call(torch.clone, part)  # memory of its own, as DTensor gives it

    def _embedding(self, node: Node) -> Node | None:
        """Each rank looks up the ids of its rows of the table, and has zeros for the others."""
        given: dict[str, Any] = dict(zip(_EMBEDDING, node.args, strict=False)) | dict(node.kwargs)
        whole: Any = given["weight"]
        ids, table = self.local.get(given["input"]), self.local.get(whole)
        if ids is None or table is None or given.get("max_norm") is not None:
            return None
        (of_ids,), (of_table,) = _placements(given["input"]), _placements(whole)
        (made,) = _placements(node)
        if not of_ids.is_replicate() or not _is_plain(of_table):
            return None
        if of_table.is_replicate() or of_table.dim == 1:
            return self._call(functional.embedding, ids, table) if not made.is_partial() else None
        size, group = int(_torch.example_value(whole).shape[0]), _group(node)
        start, length = _part_of(size, group)
        if not made.is_partial() or -(-size // group.size()) * (group.size() - 1) >= size:
            return None  # the last rank would have no row
        shifted = self._call(operator.sub, ids, start)
        clamped = self._call(torch.clamp, shifted, 0, length - 1)
        rows = self._call(functional.embedding, clamped, table)
        elsewhere = self._call(torch.unsqueeze, self._call(torch.ne, shifted, clamped), -1)
        return self._call(torch.masked_fill, rows, elsewhere, 0.0)

    def _linear(self, node: Node) -> Node | None:
        """By columns, by rows, or whole on every rank. A sum over ranks has the bias from one of them."""
        x, weight, bias = linear_operands(node)
        local = [self.local.get(each) if each is not None else None for each in (x, weight, bias)]
        if local[0] is None or local[1] is None or (bias is not None and local[2] is None):
            return None
        (of_x,), (of_weight,), (made,) = map(_placements, (x, weight, node))
        of_bias = _placements(bias)[0] if bias is not None else None
        if not all(_is_plain(placement) for placement in (of_x, of_weight, of_bias) if placement is not None):
            return None
        last = _torch.example_value(x).dim() - 1
        by_rows = of_weight.is_shard(1) and made.is_partial() and (of_x.is_replicate() or of_x.is_shard(last))
        if by_rows and (of_bias is None or of_bias.is_replicate()):
            group, width = _group(node), int(_torch.example_value(x).shape[last])
            if of_x.is_replicate():
                local[0] = self._call(torch.narrow, local[0], last, *_part_of(width, group))
            if local[2] is not None:  # by a factor, so that all ranks compile one graph
                local[2] = self._call(torch.mul, local[2], float(group.rank() == 0))
            return self._call(functional.linear, *local)
        alike = of_x.is_replicate() and (of_bias is None or of_bias == of_weight)
        columns = of_weight.is_shard(0) and made.is_shard(last)
        whole = of_weight.is_replicate() and made.is_replicate()
        return self._call(functional.linear, *local) if alike and (columns or whole) else None

    def _call(self, function: Callable[..., Any], *args: Any) -> Node:
        made = self.graph.call_function(function, args)
        values = [_torch.example_value(arg) if isinstance(arg, Node) else arg for arg in args]
        made.meta["example_value"] = _torch.fake_result(function, values, self.mode)
        return made


def _first(node: Node) -> Any:
    return node.args[0]


def _placements(node: Any) -> Sequence[Any]:
    value: Any = _torch.example_value(node)
    return tuple(value.placements) if _torch.is_sharded(value) else ()


def _group(node: Node) -> Any:
    value: Any = _torch.example_value(node)
    return value.device_mesh.get_group()


def _is_plain(placement: Any) -> bool:
    """Replicated, or sharded in the way of `torch.chunk`: other ways (strided shards) are subclasses."""
    from torch.distributed.tensor import Replicate, Shard

    return type(placement) in (Replicate, Shard)


def _part_of(size: int, group: Any) -> tuple[int, int]:
    """(start, length) of this rank's part of a dimension, as `torch.chunk` cuts it."""
    longest = -(-size // group.size())
    start = min(group.rank() * longest, size)
    return start, min(longest, size - start)


def _is_shape_alone(node: Node) -> bool:
    """A tensor without memory, which was made to ask for its strides, or such a stride."""
    value, given = _torch.example_value(node), node.all_input_nodes
    if isinstance(value, Tensor):
        return node.target is torch.empty and value.device.type == "meta"
    return is_scalar(value) and bool(given) and all(map(_is_shape_alone, given))
