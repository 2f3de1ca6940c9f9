"""Program: a compiled trace with everything that running it needs, and the uncaptured way to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.errors import SplittingOpError
from piecewise_graph.ranks.exchange import Ranks
from piecewise_graph.sizes import (
    ShapeContract,
    Sizes,
    TensorSpec,
    evaluate,
    in_strides,
    overwrite,
    same_layout,
)
from piecewise_graph.splitter.merged_weights import Merge, with_merged
from piecewise_graph.splitter.split_graph import (
    Opaque,
    OpCall,
    Ref,
    SegmentStep,
    Size,
    SplitGraph,
    references,
    resolve,
)
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments

RunSegment = Callable[[SegmentStep, CompiledSegment, list[Any]], Sequence[Tensor]]
RunOp = Callable[[OpCall, tuple[Any, ...], dict[str, Any]], Any]
Settle = Callable[[str, Any, TensorSpec, Sizes], Tensor]


@dataclass(frozen=True)
class Program:
    """One trace, ready to run.

    Attributes:
        traced: the graph that was split.
        compiled: what runs each segment, by SegmentStep.index.
        token: the size symbol that counts tokens; None for a trace of fixed shapes.
        static_tokens: token count of a trace of fixed shapes, the only one that it serves; else None.
        device: where its tensors live.
        last_use: slot -> index of the last step that reads it, itself or through a view
            (`len(steps)` for graph outputs).
        blocked: why no call of this trace can be replayed, or None.
        writes_arguments: it writes an argument that replays would copy.
        unproved: SegmentStep.index -> what could not be proved of its padding, and why. A step that is not
            `padded` runs on live rows; of another one (`padding="tried"`) trials decide.
        unpaddable: why it can be replayed at exact sizes only, or None.
        merge: which of its linears were merged.
        breaks: the forward goes on with what this trace returns, behind a graph break for instance.
        fixed: what the sizes that Dynamo left open were taken for, all or the batch; empty where none was.
        uncapturable: names of nodes of `traced` that no graph can hold, as a capture showed, and why.
        changed: the caller's objects that the forward changes in Python, after every call of the graph.
        ranks: the processes that run it together.
    """

    traced: GraphModule
    split: SplitGraph
    compiled: Mapping[int, CompiledSegment]
    contract: ShapeContract
    token: sympy.Symbol | None
    static_tokens: int | None
    device: torch.device
    last_use: Mapping[int, int]
    blocked: str | None
    writes_arguments: bool
    unproved: Mapping[int, str]
    unpaddable: str | None
    merge: Merge
    breaks: bool
    changed: tuple[str, ...]
    ranks: Ranks
    fixed: Sizes = field(default_factory=dict)
    uncapturable: Mapping[str, str] = field(default_factory=dict)

    @property
    def form(self) -> tuple[object, ...]:
        """How it is cut, and what may be replayed; ranks that run it together have to have the same."""
        padded = (isinstance(step, SegmentStep) and step.padded for step in self.split.steps)
        return len(self.split.steps), *padded, self.blocked, self.unpaddable

    @property
    def distinct(self) -> tuple[CompiledSegment, ...]:
        """Its distinct structures that compute."""
        return tuple({s.key: s for s in self.compiled.values() if s.facts.computes}.values())

    @cached_property
    def static_writes(self) -> tuple[int, ...]:
        """Indices of the arguments at fixed addresses that its segments write."""
        split = self.split
        storages = {split.storages[slot] for slot in _written_by_segments(split, self.compiled)}
        return tuple(i for i, x in enumerate(split.inputs) if x.bound and split.storages[i] in storages)

    def written_tensors(self, args: Sequence[Any]) -> list[Tensor]:
        """Tensors among a call's arguments, merged weights and constants whose storages its steps write."""
        if not self._written_storages:
            return []
        values = [*args, *(given.constant for given in self.split.inputs[len(args) :])]
        places = zip(values, self.split.storages, strict=False)  # results of steps follow
        return [x for x, storage in places if isinstance(x, Tensor) and storage in self._written_storages]

    @cached_property
    def _written_storages(self) -> frozenset[int | None]:
        return frozenset(self.split.storages[slot] for slot in written_slots(self.split, self.compiled))

    @property
    def has_effects(self) -> bool:
        """A call may change what outlives it: it writes an argument, or runs an op that is not torch's."""
        foreign = any(not call.op.name.startswith("aten::") for call in self.split.op_calls)
        return foreign or any(segment.facts.written for segment in self.compiled.values())

    def sizes_at(self, num_tokens: int) -> Sizes:
        return self.fixed if self.token is None else {self.token: num_tokens}

    def bound_arguments(self, args: Sequence[Any]) -> list[tuple[int, Tensor]]:
        """Those of a call's arguments that graphs read by address, with their indices."""
        pairs = enumerate(zip(self.split.inputs, args, strict=False))  # merged weights and constants follow
        return [(index, x) for index, (given, x) in pairs if given.bound and isinstance(x, Tensor)]

    def with_merged(self, args: Sequence[Any]) -> Sequence[Any]:
        """A call's arguments, followed by the merged tensors that its weights make up.

        Raises:
            MergedWeightsError: the weights do not make them up any more, and cannot be moved.
        """
        return with_merged(args, self.merge.layouts)

    def weights_alone(self, weights: Mapping[int, Any]) -> Sequence[Any]:
        """The arguments of a call without activations: `weights` and objects, merged ones, None elsewhere."""
        own = [given for given in self.split.inputs if given.constant is None and not given.merged]
        return self.with_merged([weights.get(index) for index in range(len(own))])

    def dying_at(self, step: int) -> Sequence[int]:
        """Slots that nothing reads after `step`."""
        return self._dying.get(step, ())

    @cached_property
    def _dying(self) -> Mapping[int, Sequence[int]]:
        found: dict[int, list[int]] = {}
        for slot, last in self.last_use.items():
            found.setdefault(last, []).append(slot)
        return found


def written_slots(graph: SplitGraph, segments: Mapping[int, CompiledSegment]) -> list[int]:
    """What segments and ops write."""
    by_ops = [
        slot
        for call in graph.op_calls
        for name, value in bind_arguments(call.target, call.args, call.kwargs)
        if name in written_arguments(call.target)
        for slot in references(value)
    ]
    return [*by_ops, *_written_by_segments(graph, segments)]


def _written_by_segments(graph: SplitGraph, segments: Mapping[int, CompiledSegment]) -> list[int]:
    return [
        item.slot
        for step in graph.segments
        for index in segments[step.index].facts.written
        if isinstance(item := step.inputs[index], Ref)
    ]


def in_layout(program: Program, args: Sequence[Any], sizes: Sizes) -> Sequence[Any]:
    """A call's arguments as segments take them: activations in the strides of the trace, then merged weights.

    pg.compile drops Dynamo's guards on symbolic strides, so an activation may come in others. Where the trace
    writes an argument it may not (ShapeContract.strides).

    Raises:
        MergedWeightsError: see `Program.with_merged`.
    """
    laid_out = list(args)
    for index, spec in program.split.activations:
        strides = spec.stride_at(sizes)
        if not same_layout(args[index], strides):
            laid_out[index] = spec.empty(sizes)
            overwrite(laid_out[index], args[index])
    return program.with_merged(laid_out)


def run_steps(
    program: Program,
    args: Sequence[Any],
    sizes: Sizes,
    *,
    run_segment: RunSegment | None = None,
    run_op: RunOp | None = None,
    settle: Settle | None = None,
) -> list[Any]:
    """Run the trace without graphs, at the exact size of `args`.

    Args:
        run_segment, run_op: called in place of a plain call; the recorder rehearses through them.
        settle: makes of an op's result what the next segment takes; default `as_promised`.

    Returns:
        the graph's outputs, owned by the caller.

    Raises:
        SplittingOpError: an op returned another dtype or shape than its fake promised.
    """
    split, tokens = program.split, None if program.token is None else sizes[program.token]
    constants = [given.constant for given in split.inputs[len(args) :]]
    values: list[Any] = [*args, *constants, *([None] * (len(split.specs) - len(split.inputs)))]

    def value_of(item: Ref | Size | Opaque) -> Any:
        return evaluate(item.expr, sizes) if isinstance(item, Size) else values[item.slot]

    for index, step in enumerate(split.steps):
        if isinstance(step, SegmentStep):
            segment = program.compiled[step.index]
            inputs = [value_of(item) for item in step.inputs]
            results = run_segment(step, segment, inputs) if run_segment else segment.at(tokens)(*inputs)
            for slot, result in zip(step.outputs, results, strict=True):
                values[slot] = result
        else:
            for call in step.calls:
                call_args, call_kwargs = resolve(call.args, value_of), resolve(call.kwargs, value_of)
                result = (
                    run_op(call, call_args, call_kwargs) if run_op else call.target(*call_args, **call_kwargs)
                )
                for element, slot in call.outputs:
                    part = result if element is None else result[element]
                    values[slot] = (settle or as_promised)(call.op.name, part, split.spec(slot), sizes)
        for slot in program.dying_at(index):
            values[slot] = None
    outputs = [resolve(output, value_of) for output in split.outputs]
    return _without_bases(split, outputs) if program.breaks else outputs


def _without_bases(split: SplitGraph, outputs: Sequence[Any]) -> list[Any]:
    """A trace's results as replays return them: behind a graph break, Dynamo guards what a tensor views.

    A result whose memory somebody else knows stays as it is.
    """

    kept = {*range(len(split.inputs)), *split.shared_results}

    def alone(item: Any, value: Any) -> Any:
        is_ours = isinstance(item, Ref) and item.slot not in kept
        return in_strides(value, value.stride()) if is_ours and value._is_view() else value

    return [alone(item, value) for item, value in zip(split.outputs, outputs, strict=True)]


def as_promised(op: str, result: Any, spec: TensorSpec, sizes: Sizes) -> Tensor:
    """`result` in the layout that the next segment was compiled for.

    Raises:
        SplittingOpError: see `check_promise`.
    """
    shape, stride = spec.shape_at(sizes), spec.stride_at(sizes)
    check_promise(op, result, spec.dtype, shape)
    if result.dtype != spec.dtype:
        return spec.empty(sizes)  # without elements
    return result if result.stride() == stride else in_strides(result, stride)


def check_promise(op: str, result: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Hold what a splitting op returned against what its fake said.

    A result without elements only orders ops (vLLM's writes of KV); its dtype says nothing.

    Raises:
        SplittingOpError: dtype or shape differ.
    """
    found = (result.dtype, tuple(result.shape))
    orders_only = not result.numel() and found[1] == shape
    if found != (dtype, shape) and not orders_only:
        raise SplittingOpError.broken_promise(op, (dtype, shape), found)


def as_returned(
    program: Program,
    outputs: Sequence[Any],
    args: Sequence[Any],
    sizes: Sizes,
    own: Callable[[int, Any], Any],
) -> list[Any]:
    """What a padded forward returned, as the call without padding returns it.

    Args:
        outputs: of the padded forward.
        args: of the call; an output may be one of them.
        sizes: of the call.
        own: slot of a tensor that the forward made, and the tensor -> its live rows. Here they get the
            strides that the trace has for them.
    """

    def returned(item: Any, value: Any) -> Any:
        if isinstance(item, Size):
            return evaluate(item.expr, sizes)
        if not isinstance(item, Ref):
            return value
        if item.slot < len(args):
            return args[item.slot]
        rows, strides = own(item.slot, value), program.split.spec(item.slot).stride_at(sizes)
        return rows if rows.stride() == strides else in_strides(rows, strides)

    return [returned(item, value) for item, value in zip(program.split.outputs, outputs, strict=True)]
