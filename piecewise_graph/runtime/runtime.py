"""Runtime: the callable handed back to Dynamo. One dispatch per forward, then a tape.

Note [The hot path]
For a token count seen before, a call is: look up its bound tape, compare addresses, copy inputs, run the
list, own the outputs. Everything that can be decided once (bucket, views, who copies what) was decided when
the tape was bound; whatever may change between calls (a released pool, a reset) empties the lookup.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program, in_layout, run_steps
from piecewise_graph.context import ForwardContext, get_forward_context
from piecewise_graph.errors import CaptureError
from piecewise_graph.graph_pool import capturing_elsewhere
from piecewise_graph.recorder.full_graph import (
    CannotPad,
    exact_sizes,
    full_fault,
    live_rows,
    padded_size,
    record_full,
    run_padded,
)
from piecewise_graph.recorder.memory_plan import planned_bytes, refused
from piecewise_graph.recorder.record import is_proven, record, rehearse, unpaddable_sizes
from piecewise_graph.recorder.static_buffers import FlatBuffers, StaticInputs
from piecewise_graph.recorder.tape import own_outputs
from piecewise_graph.runtime.bound_addresses import BoundAddresses
from piecewise_graph.runtime.captured_context import CapturedContext, check_tokens
from piecewise_graph.runtime.dispatch import Action, Decision, Situation, decide
from piecewise_graph.runtime.model_state import Family
from piecewise_graph.runtime.signals import ShapeMiss, TracedOnly
from piecewise_graph.runtime.tape_set import Ready, Tape, TapeSet
from piecewise_graph.sizes import Sizes
from piecewise_graph.telemetry import counters


class Runtime:
    """Runs one trace.

    Args:
        program: the compiled trace.
        family: the model's other traces; pool, verdicts and configuration come from it.
        static_tokens: token count of a trace of fixed shapes; None where a size is dynamic.
        bound: the tensors that graphs read by address, with their argument indices.
    """

    def __init__(
        self, program: Program, family: Family, static_tokens: int | None, bound: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.program, self.family = program, family
        self.static_tokens = static_tokens
        self.fallbacks: Counter[str] = Counter()
        self.bound = {index: weakref.ref(tensor) for index, tensor in bound}
        self.bound_ids = frozenset(id(tensor) for _, tensor in bound)
        self.piecewise = TapeSet()
        self.full: dict[Hashable, TapeSet] = {}
        self.generation = 0  # rises when a tape that somebody remembers may be out of date
        self._not_full = full_fault(program)
        self.addresses = BoundAddresses(program, [index for index, _ in bound])
        self._inputs: StaticInputs | None = None
        self._buffers = FlatBuffers()
        self._size_verdicts: dict[tuple[int, ...], str | None] = {}
        sizes = self.sizes
        self.invalid = frozenset(
            size
            for size in sizes
            if program.token and program.contract.size_violation(program.sizes_at(size))
        )
        family.add(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets of this trace; one for a trace of fixed shapes."""
        if self.static_tokens is None:
            return self.family.config.sizes
        return (self.static_tokens,) if self.static_tokens <= self.family.config.max_tokens else (0,)

    def __call__(self, *args: Any) -> list[Any]:
        """Run one forward; `args` and the result are in the order of Dynamo's graph."""
        if self.family.tracing:
            raise TracedOnly
        contract = self.program.contract
        sizes = contract.read_sizes(args)
        num_tokens = self._count(sizes)
        different = contract.dim_violation(args, sizes)
        violation = different or self._size_violation(sizes)
        if violation is not None:
            raise ShapeMiss(violation, sizes_differ=bool(different), num_tokens=num_tokens)
        self.family.ran += 1
        context = get_forward_context()
        with self.family.pool.using() as nested:
            tapes = self._tapes_for(context)
            ready = tapes.ready.get(num_tokens)
            if nested:
                return self._run_compiled(args, sizes, num_tokens, "nested_forward", context)
            if ready is None or ready.stands_in(self.family) or capturing_elsewhere(self.program.device):
                return self._decide_and_run(args, sizes, num_tokens, context)
            return self._replay(ready, tapes, args, num_tokens, context)

    def _tapes_for(self, context: ForwardContext) -> TapeSet:
        if not context.full_graph:
            return self.piecewise
        return self.full.setdefault(context.graph_key, TapeSet())

    def all_tapes(self) -> Iterator[tuple[str, TapeSet]]:
        """(mode as people read it, its tapes)."""
        yield "piecewise", self.piecewise
        for key, tapes in self.full.items():
            yield "full" if key is None else f"full {key!r}", tapes

    def _size_violation(self, sizes: Sizes) -> str | None:
        """The contract's verdict on sizes, looked up after the first time: evaluating a guard is slow."""
        key = tuple(sizes.values())
        if key not in self._size_verdicts:
            self._size_verdicts[key] = self.program.contract.size_violation(sizes)
        return self._size_verdicts[key]

    def decide(self, num_tokens: int, context: ForwardContext | None = None) -> Decision:
        """What a call of `num_tokens` tokens would do now, under `context` (default: the active one)."""
        if capturing_elsewhere(self.program.device):
            return Decision(Action.COMPILED, None, "captured_by_caller")
        context, blocked = context or get_forward_context(), self.program.blocked
        if blocked is None and self.family.config.cuda_graphs == "off":
            blocked = "cuda_graphs_off"
        verdicts = self.family.verdicts
        given = Situation(
            self.sizes,
            self.family.may_capture(),
            self.piecewise.captured(unpaddable_sizes(self.program, verdicts, self.sizes)),
            self._tapes_for(context).captured(exact_sizes(self.program, verdicts, self.sizes))
            if context.full_graph
            else None,
            blocked,
            self._not_full,
            self.invalid,
            refused(self.family) if blocked is None else (),
        )
        return decide(num_tokens, given)

    def drop_graphs(self) -> None:
        """Forget tapes and the buffers they read; the next calls capture again."""
        self.piecewise = TapeSet()
        self.full = {}
        self._inputs = None
        self.addresses.forget()
        self._forget_bound()
        self._buffers = FlatBuffers()

    def buffer_bytes(self) -> int:
        """Bytes of owned buffers outside of the graph pool."""
        return self._buffers.bytes() + (self._inputs.bytes() if self._inputs else 0)

    def count(self, args: Sequence[Any]) -> int:
        """Tokens of a call with these arguments."""
        return self._count(self.program.contract.read_sizes(args))

    def _count(self, sizes: Sizes) -> int:
        if self.program.token is not None:
            return sizes[self.program.token]
        return self.static_tokens or 0

    def _decide_and_run(
        self, args: Sequence[Any], sizes: Sizes, num_tokens: int, context: ForwardContext
    ) -> list[Any]:
        decision = self.decide(num_tokens, context)
        if decision.action is Action.COMPILED:
            assert decision.reason is not None
            if decision.not_full:
                counters.add("not_full", reason=decision.not_full)
            return self._run_compiled(args, sizes, num_tokens, decision.reason, context)
        assert decision.bucket is not None
        if decision.action is Action.CAPTURE:
            return self._capture(args, num_tokens, decision, context)
        ready = self._bind(decision, num_tokens, context)
        return self._replay(ready, self._tapes_for(context), args, num_tokens, context)

    def ready_for(self, num_tokens: int, context: ForwardContext) -> Ready | None:
        """The tape that would serve such a call now, bound; None where none would."""
        ready = self._tapes_for(context).ready.get(num_tokens)
        if ready is None:
            decision = self.decide(num_tokens, context)
            if decision.action is Action.REPLAY:
                ready = self._bind(decision, num_tokens, context)
        return ready

    def _bind(self, decision: Decision, num_tokens: int, context: ForwardContext) -> Ready:
        assert decision.bucket is not None
        asked = self._tapes_for(context)
        entry = (asked if decision.full else self.piecewise).tapes[decision.bucket]
        bound = entry.tape.bind(num_tokens)
        ready = Ready(bound, entry.context, decision.bucket, decision.not_full)
        asked.ready[num_tokens] = ready
        return ready

    def _forget_bound(self) -> None:
        self.generation += 1
        for _, tapes in self.all_tapes():
            tapes.ready.clear()

    def _run_compiled(
        self, args: Sequence[Any], sizes: Sizes, num_tokens: int, reason: str, context: ForwardContext
    ) -> list[Any]:
        args = in_layout(self.program, args, sizes)
        if self.family.capturing is not False:  # pg.capture's tracing calls are nobody's forwards
            counters.add("fallbacks", reason=reason)
            self.fallbacks[reason] += 1
        # Inside of the caller's own capture nothing may be proven: a proof waits for the device.
        padded = None if reason == "captured_by_caller" else self._run_padded(args, num_tokens, context)
        if padded is None:
            return run_steps(self.program, args, sizes)
        return live_rows(self.program, padded, args, num_tokens, self._static_inputs())

    def _run_padded(self, args: Sequence[Any], num_tokens: int, context: ForwardContext) -> list[Any] | None:
        """A forward on padded inputs, where the context asks for a full graph; None where that cannot be."""
        valid = [size for size in self.sizes if size not in self.invalid]
        bucket = padded_size(self.program, self.family.verdicts, valid, num_tokens)
        if bucket is None or not context.full_graph:
            return None
        check_tokens(context, num_tokens)
        try:
            return run_padded(
                self.program, args, num_tokens, bucket, self._static_inputs(), self.family.verdicts
            )
        except CannotPad:
            return None

    def _static_inputs(self) -> StaticInputs:
        if self._inputs is None:
            self._inputs = StaticInputs(self.program, max(self.sizes))
        return self._inputs

    def _replay(
        self, ready: Ready, tapes: TapeSet, args: Sequence[Any], num_tokens: int, context: ForwardContext
    ) -> list[Any]:
        if self.family.config.check != "off":
            self.addresses.check(args)
        ready.check(context, num_tokens, always=self.family.config.check == "always")
        bound = ready.bound
        bound.copy_in.fill(args)
        self.family.pool.run_off_default_stream(bound.calls)
        counters.add("replays")
        tapes.replays[num_tokens] += 1
        if ready.not_full is not None:
            counters.add("not_full", reason=ready.not_full)
        for reason, segments in bound.unpadded.items():
            counters.add("unpadded_segments", segments, reason=reason)
        return own_outputs(self.program, bound.outputs, args, copy=self.family.config.outputs == "copy")

    def _capture(
        self, args: Sequence[Any], num_tokens: int, decision: Decision, context: ForwardContext
    ) -> list[Any]:
        """Answer the call uncaptured and record its bucket along the way."""
        program, family, bucket = self.program, self.family, decision.bucket
        assert bucket is not None
        family.pool.join(program.device, self)
        if family.config.check != "off":
            self.addresses.check(args)
        if decision.not_full:
            counters.add("not_full", reason=decision.not_full)
        args = in_layout(self.program, args, program.sizes_at(num_tokens))
        before, began = family.pool.bytes(), time.perf_counter()
        with family.pool.session():
            outputs, padded = self._rehearse(args, num_tokens, bucket, context)
            fault = self._fault(bucket, decision.full)
            if fault is not None and bucket != num_tokens:
                counters.add("fallbacks", reason=fault)
                self.fallbacks[fault] += 1
                return outputs
            self._record(args, bucket, context if decision.full else None, padded, before, began)
        return outputs

    def _rehearse(
        self, args: Sequence[Any], num_tokens: int, bucket: int, context: ForwardContext
    ) -> tuple[list[Any], list[Any]]:
        """One uncaptured forward: its outputs, and the padded ones where it ran at the bucket's size."""
        program, verdicts, watch = self.program, self.family.verdicts, not self.piecewise.tapes
        padded = self._run_padded(args, num_tokens, context)
        if padded is not None:
            return live_rows(program, padded, args, num_tokens, self._static_inputs()), padded
        outputs = rehearse(program, args, num_tokens, bucket, verdicts, watch_ops=watch)
        return outputs, outputs if num_tokens == bucket else []

    def _fault(self, bucket: int, full: bool) -> str | None:
        """Why `bucket` would serve its exact size only."""
        find = exact_sizes if full else unpaddable_sizes
        found = find(self.program, self.family.verdicts, [bucket]).get(bucket)
        if found is None and not is_proven(self.program, self.family.verdicts, bucket):
            return "padding_unproven"
        return found

    def _record(
        self,
        args: Sequence[Any],
        bucket: int,
        full: ForwardContext | None,
        padded: Sequence[Any],
        before: int,
        began: float,
    ) -> None:
        """Record `bucket`; a failure costs this bucket, not the call."""
        program, family, inputs = self.program, self.family, self._static_inputs()
        tapes = self.piecewise if full is None else self._tapes_for(full)
        planned = planned_bytes(self, bucket) if full is None else None
        remembered = None
        try:
            if full is None:
                tape = record(program, args, bucket, family.pool, inputs, self._buffers, family.verdicts)
            else:
                remembered = CapturedContext.of(full)
                tape = record_full(program, args, bucket, family.pool, inputs, family.verdicts, padded)
        except torch.OutOfMemoryError as error:
            tapes.failed[bucket] = CaptureError.out_of_memory(bucket, str(error), planned)
        except Exception as error:  # whatever it was: the call itself has its answer
            tapes.failed[bucket] = f"{type(error).__name__}: {error}"
        else:
            seconds, graph_bytes = time.perf_counter() - began, family.pool.bytes() - before
            tapes.tapes[bucket] = Tape(tape, seconds, graph_bytes, remembered, planned)
            counters.add("captures", tape.graphs)
            counters.add("tapes")
            self.addresses.remember(args)
            self._forget_bound()
            return
        counters.add("failed_captures")
