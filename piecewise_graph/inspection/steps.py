"""What the steps of a trace make: the slots to look at after each of them, and names for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.splitter.source_names import MODULE
from piecewise_graph.splitter.split_graph import OpCall, SegmentStep, Step, references
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments

See = Callable[[int, int, Tensor], None]  # step, slot, what lies in the slot after the step


def made_by_segment(
    step: SegmentStep, segment: CompiledSegment, outputs: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(slot, tensor) of what a segment computed; what it leaves to a splitting op to fill is no result."""
    for index, (slot, output) in enumerate(zip(step.outputs, outputs, strict=True)):
        if index not in segment.facts.uninitialised:
            yield slot, output


def made_by_op(
    call: OpCall, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program
) -> Iterator[tuple[int, Tensor]]:
    """(slot, tensor) of what an op returned, and of what it wrote besides the trace's own arguments."""
    for element, slot in call.outputs:
        yield slot, result if element is None else result[element]
    found = dict(bind_arguments(call.target, args, kwargs))
    for name, slot in written_slots(call, program):
        if isinstance(found[name], Tensor):
            yield slot, found[name]


def written_slots(call: OpCall, program: Program) -> Iterator[tuple[str, int]]:
    """(argument name, slot) of the tensors that an op writes, the trace's own arguments apart."""
    declared = written_arguments(call.target)
    for name, value in bind_arguments(call.target, call.args, call.kwargs):
        for slot in references(value) if name in declared else ():
            if slot >= len(program.split.inputs):
                yield name, slot


def slots_of(step: Step, program: Program) -> list[int]:
    """The slots that `made_by_segment` or `made_by_op` name."""
    if isinstance(step, SegmentStep):
        left = program.compiled[step.index].facts.uninitialised
        return [slot for index, slot in enumerate(step.outputs) if index not in left]
    returned = [slot for call in step.calls for _, slot in call.outputs]
    return returned + [slot for call in step.calls for _, slot in written_slots(call, program)]


def step_name(step: Step) -> str:
    """`segment_4`, as depyf's files are called, or the names of the splitting ops."""
    if isinstance(step, SegmentStep):
        return f"segment_{step.index}"
    return " + ".join(call.op.name for call in step.calls)


def ops_of(step: Step) -> tuple[str, ...]:
    """What a step calls, in order: `linear (self.layers.0.mlp.up_proj)`."""
    if not isinstance(step, SegmentStep):
        return tuple(_called(call.op.name, call.module) for call in step.calls)
    nodes = (node for node in step.gm.graph.nodes if node.op in ("call_function", "call_method"))
    return tuple(_called(_short(node.target), node.meta.get(MODULE, "")) for node in nodes)


def _called(name: str, module: str) -> str:
    return f"{name} ({module})" if module else name


def _short(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
