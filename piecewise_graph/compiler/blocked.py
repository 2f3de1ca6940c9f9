"""Why no call of a trace can be replayed, as far as its graph tells."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.fx import Node

from piecewise_graph import _torch
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.sizes import TensorSpec
from piecewise_graph.splitter.split_graph import Ref, SegmentStep, SplitGraph

# Why a trace has no buckets: graphs of it serve one combination of sizes (runtime/exact_sizes.py).
WITHOUT_BUCKETS = frozenset({"no_token_dimension", "number_varies", "second_dynamic_dimension"})


def blocked(
    graph: SplitGraph, segments: Mapping[int, CompiledSegment], writes_arguments: bool, breaks: bool
) -> str | None:
    """Why no call of a trace can be replayed; it runs its compiled segments instead."""
    sizes = {symbol for given in graph.inputs if given.spec is not None for symbol in given.spec.symbols}
    if not sizes.issuperset(graph.symbols):
        return "number_varies"
    if len(graph.symbols) > 1:
        return "second_dynamic_dimension"
    token = next(iter(graph.symbols), None)
    if token and not any(given.spec and given.spec.token_dims(token) for given in graph.inputs):
        return "no_token_dimension"
    return blocked_at_any_size(graph, segments, writes_arguments, breaks)


def blocked_at_any_size(
    graph: SplitGraph, segments: Mapping[int, CompiledSegment], writes_arguments: bool, breaks: bool
) -> str | None:
    """The same for one combination of sizes."""
    facts = [segment.facts for segment in segments.values()]
    padded = [segments[step.index].facts for step in graph.segments if step.padded]
    if any(fact.host_sync for fact in padded):
        return "mixed_devices" if any(fact.other_device for fact in padded) else "data_dependent"
    if any(fact.random for fact in facts):
        return "random_numbers"
    if writes_arguments:
        return "writes_an_input"
    if _returns_a_view(graph, breaks):
        return "returns_a_view"
    if any(spec.symbols - set(graph.symbols) for spec in graph.specs if spec is not None):
        return "data_dependent_size"
    if any(_reads_beyond_inputs(graph, step) for step in graph.segments):
        return "reads_beyond_a_view"
    return None


def _returns_a_view(graph: SplitGraph, breaks: bool) -> bool:
    """A result lies in the memory of an argument, or, before a graph break, in that of another result.

    What writes one afterwards would not change the copies that replays return.
    """
    given = {graph.storages[slot] for slot, x in enumerate(graph.inputs) if x.spec is not None}
    return any(breaks or graph.storages[slot] in given for slot in graph.shared_results)


def _reads_beyond_inputs(graph: SplitGraph, step: SegmentStep) -> bool:
    """as_strided reads storage, and what a segment is given is a copy or a narrowed view of the traced one.

    Both hold the same elements in the same places where the tensor is all of its storage.
    """
    placeholders = [node for node in step.gm.graph.nodes if node.op == "placeholder"]
    partial: set[int] = set()
    for node, item in zip(placeholders, step.inputs, strict=True):
        value = _torch.example_value(node)
        if isinstance(value, Tensor) and isinstance(item, Ref):
            is_made = item.slot >= len(graph.inputs)
            partial |= set() if is_made and _is_all_of_its_storage(value) else {_torch.storage_id(value)}
    given = [arg for node in step.gm.graph.nodes if _is_as_strided(node) for arg in node.all_input_nodes]
    bases = (value for value in map(_torch.example_value, given) if isinstance(value, Tensor))
    return any(_torch.storage_id(base) in partial for base in bases)


def _is_as_strided(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and name.startswith("as_strided")


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    """Contiguous from the first element of the storage to the last, whatever the token count."""
    spec, size = TensorSpec.of(tensor), _torch.expression(tensor.untyped_storage().nbytes())
    step = _torch.expression(tensor.element_size())
    for length, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if length != 1 and stride * tensor.element_size() != step:
            return False
        step = step * length
    return bool(_torch.expression(tensor.storage_offset()) == 0 and (step - size).expand() == 0)
