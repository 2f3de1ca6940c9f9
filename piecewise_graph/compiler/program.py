"""Program: a compiled trace with everything that running it needs, and the uncaptured way to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from piecewise_graph.compiler.segments import CompiledGraph, CompiledSegment
from piecewise_graph.errors import InputError, SplittingOpError
from piecewise_graph.sizes import ShapeContract, Sizes, TensorSpec, evaluate, overwrite, same_layout
from piecewise_graph.splitter.merged_weights import Merge, with_merged
from piecewise_graph.splitter.split_graph import (
    OpCall,
    Ref,
    SegmentStep,
    Size,
    SplitGraph,
    references,
    resolve,
)

RunSegment = Callable[[SegmentStep, CompiledSegment, list[Any]], Sequence[Tensor]]
RunOp = Callable[[OpCall, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Program:
    """One trace, ready to run.

    Attributes:
        token: the size symbol that counts tokens; None for a trace of fixed shapes.
        device: where its tensors live.
        last_use: slot -> index of the last step that reads it, itself or through a view
            (`len(steps)` for graph outputs).
        blocked: why no call of this trace can be replayed, or None.
        unpaddable: why it can be replayed at exact sizes only, or None.
        merge: which of its linears were merged.
    """

    compiled: CompiledGraph
    contract: ShapeContract
    token: sympy.Symbol | None
    device: torch.device
    last_use: Mapping[int, int]
    blocked: str | None
    unpaddable: str | None
    merge: Merge = field(default_factory=Merge)

    @property
    def split(self) -> SplitGraph:
        return self.compiled.split

    def sizes_at(self, num_tokens: int) -> Sizes:
        return {} if self.token is None else {self.token: num_tokens}

    def code(self, segment: CompiledSegment, sizes: Sizes) -> Callable[..., Sequence[Tensor]]:
        """What runs `segment` at `sizes`."""
        return segment.at(None if self.token is None else sizes[self.token])

    def dying_at(self, step: int) -> list[int]:
        """Slots that nothing reads after `step`."""
        return [slot for slot, last in self.last_use.items() if last == step]


def liveness(compiled: CompiledGraph) -> dict[int, int]:
    """Last reader of every slot, where a view keeps what it views alive."""
    steps = compiled.split.steps
    last = dict.fromkeys(references(compiled.split.outputs), len(steps))
    for index in reversed(range(len(steps))):
        step = steps[index]
        until = index
        if isinstance(step, SegmentStep):
            read = references(step.inputs)
            facts = compiled.segments[step.index].facts
            if facts.entangled_outputs or not facts.computes:
                until = max([index, *(last.get(slot, index) for slot in step.outputs)])
        else:
            read = [slot for call in step.calls for slot in references((call.args, call.kwargs))]
        for slot in read:
            last[slot] = max(last.get(slot, until), until)
    return last


def in_layout(program: Program, args: Sequence[Any], sizes: Sizes) -> Sequence[Any]:
    """The arguments that the segments take: activations with the strides that these were compiled for, and
    merged weights at the end.

    Dynamo keeps conditions on symbolic strides among the guards that pg.compile drops.

    Raises:
        InputError: the trace writes an argument of other strides; a copy would lose the writes.
        MergedWeightsError: see `with_merged`.
    """
    laid_out = list(args)
    for index, given in enumerate(program.split.inputs[: len(args)]):
        if given.spec is not None and not given.bound:
            strides = given.spec.stride_at(sizes)
            if not same_layout(args[index], strides):
                if program.blocked == "writes_an_input":
                    raise InputError.strides(given.name, args[index].stride(), strides)
                laid_out[index] = given.spec.empty(sizes)
                overwrite(laid_out[index], args[index])
    return with_merged(laid_out, program.merge.layouts)


def run_steps(
    program: Program,
    args: Sequence[Any],
    sizes: Sizes,
    *,
    run_segment: RunSegment | None = None,
    run_op: RunOp | None = None,
) -> list[Any]:
    """Run the trace without graphs, at the exact size of `args`.

    Args:
        run_segment, run_op: called in place of a plain call; the recorder rehearses through them.

    Returns:
        the graph's outputs, owned by the caller.

    Raises:
        SplittingOpError: an op returned another dtype or shape than its fake promised.
    """
    split = program.split
    constants = [given.constant for given in split.inputs[len(args) :]]
    values: list[Any] = [*args, *constants, *([None] * (len(split.specs) - len(split.inputs)))]

    def value_of(item: Ref | Size) -> Any:
        return values[item.slot] if isinstance(item, Ref) else evaluate(item.expr, sizes)

    for index, step in enumerate(split.steps):
        if isinstance(step, SegmentStep):
            segment = program.compiled.segments[step.index]
            inputs = [value_of(item) for item in step.inputs]
            results = (
                run_segment(step, segment, inputs) if run_segment else program.code(segment, sizes)(*inputs)
            )
            for slot, result in zip(step.outputs, results, strict=True):
                values[slot] = result
        else:
            for call in step.calls:
                call_args, call_kwargs = resolve(call.args, value_of), resolve(call.kwargs, value_of)
                result = (run_op or _plain_op)(call, call_args, call_kwargs)
                for element, slot in call.outputs:
                    part = result if element is None else result[element]
                    values[slot] = as_promised(call.op.name, part, split.spec(slot), sizes)
        for slot in program.dying_at(index):
            values[slot] = None
    return [resolve(output, value_of) for output in split.outputs]


def _plain_op(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call.target(*args, **kwargs)


def as_promised(op: str, result: Any, spec: TensorSpec, sizes: Sizes) -> Tensor:
    """`result` in the layout that the next segment was compiled for."""
    found = (result.dtype, tuple(result.shape))
    promised = (spec.dtype, spec.shape_at(sizes))
    if found != promised:
        raise SplittingOpError.broken_promise(op, "dtype and shape", promised, found)
    if result.stride() == spec.stride_at(sizes):
        return result
    kept = spec.empty(sizes)
    overwrite(kept, result)
    return kept
