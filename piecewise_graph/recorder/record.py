"""Program x bucket -> ReplayTape: rehearse on live inputs, then capture.

Note [Rehearsal]
A capture executes nothing, so it needs no live data, but three things must have happened before it: every
kernel of the bucket ran once (loading a module or growing a workspace is not allowed in a capture), every
distinct segment was shown to tolerate padding, and every splitting op did what its schema and fake say.
The rehearsal does all three in one uncaptured forward at the exact token count. Splitting ops run exactly
once in it, so a KV cache is not written twice, and its outputs are the answer of the call.

Note [cuBLAS workspaces]
A captured GEMM holds the address of a workspace that torch keeps per stream and frees whenever someone
clears it. They are cleared before the captures, so that the first captured GEMM allocates one inside the
pool, which the graphs keep mapped; and after, so that nobody else writes to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program, run_steps
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.errors import SplittingOpError
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.recorder.padding import Unproven, padding_fault, probe_size, warm_up
from piecewise_graph.recorder.static_buffers import FlatBuffers, StaticInputs
from piecewise_graph.recorder.tape import Call, LateCall, ReplayTape
from piecewise_graph.sizes import evaluate
from piecewise_graph.splitter.split_graph import OpCall, OpStep, Ref, SegmentStep, Size
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments

Verdicts = dict[tuple[str, int], str | None]


# A larger argument (a whole KV cache) is not cloned to see whether an op wrote it.
_WATCHED_BYTES = 256 * 2**20


def rehearse(
    program: Program,
    args: Sequence[Any],
    num_tokens: int,
    bucket: int,
    verdicts: Verdicts,
    *,
    watch_ops: bool,
) -> list[Any]:
    """Run one forward at its exact size, proving and warming what `bucket` needs (Note [Rehearsal]).

    Args:
        verdicts: (structure key, bucket) -> why it must not be padded, or None; grows here.
        watch_ops: see whether splitting ops write what they do not declare (once per trace is enough).

    Returns:
        the forward's outputs.

    Raises:
        SplittingOpError: an op broke its schema's or its fake's promise.
    """
    probe = None if program.unpaddable else probe_size(program, num_tokens, bucket)
    warmed: set[str] = set()

    def run_segment(step: SegmentStep, segment: CompiledSegment, inputs: list[Any]) -> Sequence[Tensor]:
        key = segment.key, bucket
        if probe is not None and key not in verdicts:
            prove(program, step, segment, inputs, probe, bucket, verdicts)
        elif (
            num_tokens < bucket
            and segment.facts.computes
            and not (segment.key in warmed or verdicts.get(key))
        ):
            warm_up(program, step, segment, inputs, num_tokens, bucket)
        warmed.add(segment.key)
        return segment.at(num_tokens)(*inputs)

    sizes = program.sizes_at(num_tokens)
    return run_steps(program, args, sizes, run_segment=run_segment, run_op=_watched_op if watch_ops else None)


def prove(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    inputs: list[Any],
    probe: int,
    bucket: int,
    verdicts: Verdicts,
) -> None:
    """Settle whether `segment` may be padded to `bucket`, where its live inputs allow to tell."""
    first = all(known != segment.key for known, _ in verdicts)
    try:
        fault = padding_fault(program, step, segment, inputs, probe, bucket, thorough=first)
    except Unproven:
        return
    except (RuntimeError, ValueError, IndexError, AssertionError):
        # The model cannot run at this size (a batch norm of one row): its own business, not the caller's.
        fault = "proof_failed"
    verdicts[segment.key, bucket] = fault


def _watched_op(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a splitting op and see that it writes nothing but what its schema declares."""
    declared = written_arguments(call.target)
    named = list(bind_arguments(call.target, args, kwargs))
    shared = {_torch.storage_id(v) for name, v in named if name in declared and isinstance(v, Tensor)}
    watched = {
        name: (value, value.clone())
        for name, value in named
        if isinstance(value, Tensor)
        and _torch.storage_id(value) not in shared
        and value.nbytes <= _WATCHED_BYTES
    }
    result = call.target(*args, **kwargs)
    for name, (value, before) in watched.items():
        if not bool(((value == before) | ((value != value) & (before != before))).all()):
            raise SplittingOpError.undeclared_write(call.op.name, name)
    return result


def unpaddable_reason(program: Program, verdicts: Verdicts, bucket: int) -> str | None:
    """Why `bucket` serves its exact size only, as far as the verdicts are known.

    A segment that failed runs uncaptured at the exact size, its outputs copied to buffers. Outputs
    that share storage cannot be: a splitting op that writes one of them would not reach the other.
    """
    for segment in program.compiled.segments.values():
        fault = verdicts.get((segment.key, bucket))
        stays = segment.facts.entangled_outputs or not segment.facts.computes
        if fault is not None and (fault == "derived_size" or stays):
            return fault
    return program.unpaddable


def unpaddable_sizes(program: Program, verdicts: Verdicts, sizes: Iterable[int]) -> dict[int, str]:
    """The same for several buckets: those that have a reason."""
    found = {size: unpaddable_reason(program, verdicts, size) for size in sizes}
    return {size: why for size, why in found.items() if why is not None}


def is_proven(program: Program, verdicts: Verdicts, bucket: int) -> bool:
    """Every segment has a verdict on padding to `bucket`."""
    return all((segment.key, bucket) in verdicts for segment in program.compiled.segments.values())


def record(
    program: Program,
    args: Sequence[Any],
    bucket: int,
    pool: GraphPool,
    inputs: StaticInputs,
    buffers: FlatBuffers,
    verdicts: Verdicts,
) -> ReplayTape:
    """Capture every segment of `program` at `bucket`. Call inside `pool.session()`, after `rehearse`.

    Args:
        args: the call's arguments; only bound ones (weights) are used.
    """
    buffers.restart()
    with capturing(program.device):
        return _Recording(program, args, bucket, pool, inputs, buffers, verdicts).run()


@contextmanager
def capturing(device: torch.device) -> Iterator[None]:
    """Surround the captures of one bucket (Note [cuBLAS workspaces])."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    _torch.clear_cublas_workspaces()
    try:
        yield
    finally:
        _torch.clear_cublas_workspaces()


class _Recording:
    """One pass over the steps. `values` holds what graphs address; `owned` what must not be freed yet.

    A segment's outputs are owned only until their last reader is captured; from then on the pool may
    hand their memory to a later segment, as it will be at every replay.
    """

    def __init__(
        self,
        program: Program,
        args: Sequence[Any],
        bucket: int,
        pool: GraphPool,
        inputs: StaticInputs,
        buffers: FlatBuffers,
        verdicts: Verdicts,
    ) -> None:
        self.program, self.bucket, self.pool = program, bucket, pool
        self.inputs, self.buffers, self.verdicts = inputs, buffers, verdicts
        self.sizes = program.sizes_at(bucket)
        self.unpaddable = unpaddable_reason(program, verdicts, bucket)
        self.values = input_values(program, args, bucket, inputs)
        self.keep: list[Any] = list(self.values.values())
        self.owned: dict[int, Tensor] = {}
        self.borrowed: dict[int, Tensor] = {}
        self.entries: list[Call | LateCall] = []
        self.unpadded: Counter[str] = Counter()
        self.graphs = 0

    def run(self) -> ReplayTape:
        for index, step in enumerate(self.program.split.steps):
            if isinstance(step, OpStep):
                self._ops(step)
            else:
                self._segment(step, self.program.compiled.segments[step.index])
            self._let_go(index)
        return ReplayTape(
            self.program,
            self.bucket,
            tuple(self.entries),
            self.values,
            self.inputs,
            proven=is_proven(self.program, self.verdicts, self.bucket),
            unpadded=dict(self.unpadded),
            keep=tuple(self.keep),
            graphs=self.graphs,
        )

    def _value(self, item: Ref | Size) -> Any:
        return self.values[item.slot] if isinstance(item, Ref) else evaluate(item.expr, self.sizes)

    def _segment(self, step: SegmentStep, segment: CompiledSegment) -> None:
        fault = self.verdicts.get((segment.key, self.bucket))
        if not segment.facts.computes:
            # views and allocations: made once
            outputs = self._filling(step, segment)(*map(self._value, step.inputs))
            self.keep.extend(outputs)
            self.values.update(zip(step.outputs, outputs, strict=True))
        elif fault is not None and self.unpaddable is None:
            self.unpadded[fault] += 1
            elements = tuple(enumerate(step.outputs))
            self._late(LateCall(segment.run, step.inputs, {}, elements, padded=False))
        else:
            run = self._filling(step, segment)
            replay, outputs = self.pool.capture(run, [self._value(item) for item in step.inputs])
            self.graphs += 1
            self.entries.append(replay)
            for slot, output in zip(step.outputs, outputs, strict=True):
                self.owned[slot] = output
                self.values[slot] = _torch.weak_alias(output) if output.is_cuda else output

    def _filling(self, step: SegmentStep, segment: CompiledSegment) -> Callable[..., Sequence[Tensor]]:
        """The segment, with zeros in the integers that it leaves to a splitting op to fill.

        The op fills live rows only, and the next segment may look up what lies in the others.
        """
        dtypes = [self.program.split.spec(slot).dtype for slot in step.outputs]
        floats = {index for index, dtype in enumerate(dtypes) if dtype.is_floating_point}
        left = segment.facts.uninitialised - (frozenset() if self.pool.trial else floats)
        compute = segment.at(self.bucket)
        if not left:
            return compute

        def run(*inputs: Any) -> Sequence[Tensor]:
            outputs = compute(*inputs)
            for index in left:
                outputs[index].zero_()
            return outputs

        return run

    def _ops(self, step: OpStep) -> None:
        for call in step.calls:
            op = call.op
            self._late(LateCall(call.target, call.args, call.kwargs, call.outputs, op.padded, op.bind))

    def _late(self, late: LateCall) -> None:
        """Give its results buffers that the graphs after it can read, those that are read at all."""
        read = tuple((element, slot) for element, slot in late.outputs if slot in self.program.last_use)
        for _, slot in read:
            spec = self.program.split.spec(slot)
            layout = spec.shape_at(self.sizes), spec.stride_at(self.sizes), spec.storage_numel(self.sizes)
            self.values[slot] = self.borrowed[slot] = self.buffers.take(spec, *layout)
        self.entries.append(replace(late, outputs=read))

    def _let_go(self, index: int) -> None:
        for slot in self.program.dying_at(index):
            dead = self.owned.pop(slot, None)
            if dead is not None and self.pool.poison and not self._is_shared(dead):
                self.entries.append(_poisoner(dead))
            if slot in self.borrowed:
                self.buffers.give_back(self.borrowed.pop(slot))

    def _is_shared(self, dead: Tensor) -> bool:
        """Something that is still read lies in the same storage."""
        kept = [*self.owned.values(), *self.keep]
        return any(_torch.storage_id(dead) == _torch.storage_id(other) for other in kept)


def input_values(program: Program, args: Sequence[Any], bucket: int, inputs: StaticInputs) -> dict[int, Any]:
    """What the graphs read for each argument: the weight itself, or our buffer for an activation."""
    values: dict[int, Any] = {}
    for index, given in enumerate(program.split.inputs):
        if given.constant is not None:
            values[index] = given.constant
        elif given.spec is not None and not given.bound:
            values[index] = inputs.view(index, bucket)
        elif given.merged:
            values[index] = args[index]  # nobody else has it (Note [Who may be moved] in merged_weights.py)
        elif given.bound and index in program.last_use:
            # detached: keeps the storage itself alive when somebody swaps the parameter's data
            values[index] = args[index].detach()
    return values


def _poisoner(tensor: Tensor) -> Callable[[], Any]:
    if tensor.is_floating_point():
        return lambda: tensor.fill_(float("nan"))
    return lambda: tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
