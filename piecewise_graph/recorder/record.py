"""Program x bucket -> ReplayTape: one graph per segment, splitting ops between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.graph_pool import clean_cublas
from piecewise_graph.recorder.exact_segment import ExactSegment
from piecewise_graph.recorder.tape import Call, LateCall, ReplayTape
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.sizes import evaluate
from piecewise_graph.splitter.split_graph import Opaque, OpStep, Ref, SegmentStep, Size


def record_segments(
    workspace: Workspace, args: Sequence[Any], bucket: int, *, ops_run: bool = True
) -> ReplayTape:
    """Capture every segment at `bucket`. Call inside `pool.session()`, where its code has run before.

    Args:
        args: the call's arguments; only bound ones (weights) are used.
        ops_run: False in a plan, where no splitting op fills what a segment leaves to it.
    """
    workspace.bridges.restart()
    with clean_cublas(workspace.program.device):
        return _Recording(workspace, args, bucket, ops_run).run()


class _Memory:
    """What a tensor owns, or with `bridge` has borrowed."""

    def __init__(self, tensor: Tensor, *, bridge: bool) -> None:
        self.tensor, self.bridge, storage = tensor, bridge, tensor.untyped_storage()
        self._begin = storage.data_ptr()
        self._end = self._begin + storage.nbytes()

    def holds(self, address: int) -> bool:
        return self._begin <= address < self._end


class _Recording:
    """One pass over the steps. `values` holds what graphs address, `held` what must not be freed yet.

    A segment's outputs are held only until their last reader is captured; from then on the pool may hand
    their memory to a later segment, as it will be at every replay. An output that lies in the memory of one
    that died inherits it. The trace does not always say so: torch traces `dropout` in eval mode as a copy,
    and runs it as its argument.
    """

    def __init__(self, workspace: Workspace, args: Sequence[Any], bucket: int, ops_run: bool) -> None:
        self.workspace, self.bucket, self.ops_run = workspace, bucket, ops_run
        self.program, self.pool, self.proofs = workspace.program, workspace.pool, workspace.proofs
        self.sizes = self.program.sizes_at(bucket)
        self.exact_only = self.proofs.exact_only(self.program, bucket, one_graph=False)
        self.values = workspace.input_values(args, bucket)
        self.keep = [value for value in self.values.values() if isinstance(value, Tensor)]
        self.held: dict[int, list[_Memory]] = {}
        self.addresses: dict[int, int] = {}  # of what is held
        self.entries: list[Call | LateCall] = []
        self.steps: list[int] = []
        self.unpadded: Counter[str] = Counter()
        self.graphs = 0

    def run(self) -> ReplayTape:
        for index, step in enumerate(self.program.split.steps):
            if isinstance(step, OpStep):
                self._ops(step)
            else:
                self._segment(step, self.program.compiled[step.index])
            self._let_go(index)
            self.steps += [index] * (len(self.entries) - len(self.steps))
        return ReplayTape(
            self.program,
            self.bucket,
            tuple(self.entries),
            self.values,
            self.workspace.inputs,
            proven=self.proofs.complete(self.program, self.bucket),
            unpadded=dict(self.unpadded),
            keep=tuple(self.keep),
            graphs=self.graphs,
            steps=tuple(self.steps),
        )

    def _value(self, item: Ref | Size | Opaque) -> Any:
        return evaluate(item.expr, self.sizes) if isinstance(item, Size) else self.values[item.slot]

    def _segment(self, step: SegmentStep, segment: CompiledSegment) -> None:
        reason = self._reason_apart(step, segment)
        if step.padded and not segment.facts.computes:
            # views and allocations: made once; what ops leave in them of one call is nothing to the next
            outputs = self._filling(step, segment)(*map(self._value, step.inputs))
            self.keep.extend(outputs)
            if left := self._left_to_ops(step, segment):
                self.entries.append(_zeroing([outputs[index] for index in left]))
            self.values.update(zip(step.outputs, outputs, strict=True))
        elif reason is not None:
            self.unpadded[reason] += 1
            elements = tuple(enumerate(step.outputs))
            bridges = self.workspace.bridges
            exact = ExactSegment.of(self.program, step, segment, self.bucket, bridges)
            name = f"segment_{step.index}"
            self._late(LateCall(name, segment.run, step.inputs, {}, elements, padded=False, bind=exact.bind))
            for buffer in exact.buffers.values():
                bridges.give_back(buffer)
        else:
            run = self._filling(step, segment)
            inputs = [self._value(item) for item in step.inputs]
            written = [inputs[index] for index in segment.facts.written]
            replay, outputs = self.pool.capture(run, inputs, written=written)
            self.graphs += 1
            self.entries.append(replay)
            for slot, output in zip(step.outputs, outputs, strict=True):
                self._hold(slot, output, bridge=False)
                self.values[slot] = _torch.weak_alias(output) if output.is_cuda else output

    def _reason_apart(self, step: SegmentStep, segment: CompiledSegment) -> str | None:
        """Why the segment runs between the graphs, at the exact size; None where a graph holds it."""
        if segment.facts.host_sync:
            return "mixed_devices" if segment.facts.other_device else "data_dependent"
        reason = self.proofs.reason(self.program, step, self.bucket)
        return reason if self.exact_only is None else None

    def _filling(self, step: SegmentStep, segment: CompiledSegment) -> Callable[..., Sequence[Tensor]]:
        """The segment, with zeros in the integers that it leaves to a splitting op to fill.

        The op fills live rows only, and the next segment may look up what lies in the others.
        """
        left, compute = self._left_to_ops(step, segment), segment.at(self.bucket)
        if not left:
            return compute

        def run(*inputs: Any) -> Sequence[Tensor]:
            outputs = compute(*inputs)
            for index in left:
                outputs[index].zero_()
            return outputs

        return run

    def _left_to_ops(self, step: SegmentStep, segment: CompiledSegment) -> Collection[int]:
        """Outputs that have to be zero before an op writes their live rows."""
        specs = [self.program.split.spec(slot) for slot in step.outputs]
        floats = {index for index, spec in enumerate(specs) if spec.dtype.is_floating_point}
        return segment.facts.uninitialised - (floats if self.ops_run else frozenset())

    def _ops(self, step: OpStep) -> None:
        for call in step.calls:
            op = call.op
            self._late(
                LateCall(op.name, call.target, call.args, call.kwargs, call.outputs, op.padded, op.bind)
            )

    def _late(self, late: LateCall) -> None:
        """Give its results buffers that the graphs after it can read, those that are read at all."""
        read = tuple((element, slot) for element, slot in late.outputs if slot in self.program.last_use)
        for _, slot in read:
            spec = self.program.split.spec(slot)
            layout = spec.shape_at(self.sizes), spec.stride_at(self.sizes), spec.storage_numel(self.sizes)
            self.values[slot] = self.workspace.bridges.take(spec, *layout)
            self._hold(slot, self.values[slot], bridge=True)
        self.entries.append(replace(late, outputs=read))

    def _hold(self, slot: int, tensor: Tensor, *, bridge: bool) -> None:
        self.held[slot] = [_Memory(tensor, bridge=bridge)]
        self.addresses[slot] = tensor.data_ptr()

    def _let_go(self, index: int) -> None:
        """Free what nothing reads after step `index`."""
        dying = self.program.dying_at(index)
        for memory in [memory for slot in dying for memory in self.held.pop(slot, ())]:
            heir = next((slot for slot in self.held if memory.holds(self.addresses[slot])), None)
            if heir is not None:
                self.held[heir].append(memory)
            elif memory.bridge:
                self.workspace.bridges.give_back(memory.tensor)
            elif self.pool.poison and not any(memory.holds(other.data_ptr()) for other in self.keep):
                self.entries.append(_poisoner(memory.tensor))


def _zeroing(tensors: list[Tensor]) -> Callable[[], Any]:
    def zero() -> None:
        with torch.inference_mode():  # where they may have been made
            torch._foreach_zero_(tensors)

    return zero


def _poisoner(tensor: Tensor) -> Callable[[], Any]:
    floats = tensor.is_floating_point() or tensor.is_complex()
    is_bool = tensor.dtype == torch.bool
    value = float("nan") if floats else True if is_bool else torch.iinfo(tensor.dtype).max

    def poison() -> None:
        with torch.inference_mode():  # as StandIn does
            tensor.fill_(value)

    return poison
