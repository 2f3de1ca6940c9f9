"""Decode steps on a static KV cache: their attention is compiled with what stands around it.

A cut keeps attention out of graphs that serve several token counts. A trace of fixed sizes whose KV cache
lies at fixed addresses is one graph of one size. Torch then traces attention too: it prepares the mask once
for all layers instead of once per layer (16 kernels of 2 us in a step of 1.4 ms, Llama-1B on an H200).
"""

from __future__ import annotations

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.splitter.segment_builder import copied
from piecewise_graph.splitter.splitting_ops import (
    INSIDE,
    bind_arguments,
    is_plain_attention,
    may_write,
    splitting_op_of,
)


def with_attention_inside(gm: GraphModule) -> GraphModule:
    """A copy of `gm` that is not cut at attention; `gm` itself where that has to be cut."""
    pairs = ((node, splitting_op_of(node)) for node in gm.graph.nodes)
    cuts = {node: op for node, op in pairs if op is not None}
    plain = (is_plain_attention(op, node.target, node.args, node.kwargs) for node, op in cuts.items())
    if not cuts or not all(plain) or not _is_decode_step(gm):
        return gm
    graph, copies = copied(gm)
    for node in cuts:
        copies[node].meta[INSIDE] = True
        _make_dense(graph, copies[node])
    graph.lint()
    return _torch.ending_like(gm, GraphModule(gm, graph))


def _is_decode_step(gm: GraphModule) -> bool:
    """Its sizes are fixed, it writes a tensor at a fixed address, and all lies on one device."""
    placeholders, values = gm.graph.find_nodes(op="placeholder"), _torch.argument_values(gm)
    tensors = [value for value in values if isinstance(value, Tensor)]
    fixed = len(tensors) == len(values) and all(map(_torch.has_constant_sizes, tensors))
    if not fixed or len({tensor.device for tensor in tensors}) != 1:
        return False
    static = {_torch.storage_id(_torch.example_value(x)) for x in placeholders if _torch.is_marked_static(x)}
    targets = (node.args[0] for node in gm.graph.nodes if may_write(node) and node.args)
    written = (_torch.example_value(target) for target in targets if isinstance(target, Node))
    plain = (value for value in written if isinstance(value, Tensor) and not _torch.is_wrapped(value))
    return any(_torch.storage_id(tensor) in static for tensor in plain)


def _make_dense(graph: Graph, attention: Node) -> None:
    """Copy keys and values that are expanded (Note [Expanded keys] in dense_keys.py)."""
    given = dict(bind_arguments(attention.target, attention.args, attention.kwargs))
    both = dict.fromkeys((given["key"], given["value"]))
    for node in [node for node in both if 0 in _torch.example_value(node).stride()]:
        with graph.inserting_before(attention):
            dense = graph.call_method("contiguous", (node,))
        dense.meta["example_value"] = _torch.example_value(node).contiguous()
        attention.replace_input_with(node, dense)
