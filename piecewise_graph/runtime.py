"""Runtime: the callable handed back to Dynamo. One dispatch per forward, then a tape.

Note [The hot path]
For a token count seen before, a call is: look up its bound tape, compare addresses, copy inputs, run the
list, own the outputs. Everything that can be decided once (bucket, views, who copies what) was decided when
the tape was bound; whatever may change between calls (a released pool, a reset) empties the lookup.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.dispatch import Action, Decision, Situation, decide
from piecewise_graph.errors import AddressMovedError, CaptureError, InputError
from piecewise_graph.family import Family
from piecewise_graph.program import Program, run_steps
from piecewise_graph.recorder import is_proven, record, rehearse, unpaddable_reason
from piecewise_graph.shapes import Sizes, overwrite
from piecewise_graph.split_graph import Ref
from piecewise_graph.static_inputs import FlatBuffers, StaticInputs
from piecewise_graph.tape import BoundTape, ReplayTape
from piecewise_graph.telemetry import counters


class ShapeMiss(InputError):
    """A call reached a trace that is not valid for its shapes; pg.compile answers with another trace.

    Attributes:
        sizes_differ: dimensions differ that were equal when the trace was made.
        num_tokens: of the call, 0 where the trace has no token symbol.
    """

    def __init__(self, what: str, *, sizes_differ: bool, num_tokens: int) -> None:
        shown = InputError.shape_contract(what)
        super().__init__(shown.what, shown.remedy)
        self.sizes_differ, self.num_tokens = sizes_differ, num_tokens


class TracedOnly(Exception):
    """Ends a call that was made for its trace alone, before anything ran."""


class Tape:
    """A recorded bucket and what recording it cost."""

    def __init__(self, tape: ReplayTape, seconds: float, graph_bytes: int) -> None:
        self.tape, self.seconds, self.graph_bytes = tape, seconds, graph_bytes


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
        self.replays: Counter[int] = Counter()
        self.bound_ids = frozenset(id(tensor) for _, tensor in bound)
        self.tapes: dict[int, Tape] = {}
        self.failed: dict[int, str] = {}
        self._bound_indices = tuple(index for index, _ in bound)
        self._addresses: list[int] | None = None
        self._inputs: StaticInputs | None = None
        self._buffers = FlatBuffers()
        self._ready: dict[int, BoundTape] = {}
        self._size_verdicts: dict[tuple[int, ...], str | None] = {}
        sizes = self.sizes
        self._invalid = frozenset(
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
        with self.family.pool.using():
            bound = self._ready.get(num_tokens)
            if bound is None or _capturing_elsewhere(self.program.device):
                return self._decide_and_run(args, sizes, num_tokens)
            return self._replay(bound, args, num_tokens)

    def _size_violation(self, sizes: Sizes) -> str | None:
        """The contract's verdict on sizes, looked up after the first time: evaluating a guard is slow."""
        key = tuple(sizes.values())
        if key not in self._size_verdicts:
            self._size_verdicts[key] = self.program.contract.size_violation(sizes)
        return self._size_verdicts[key]

    def decide(self, num_tokens: int) -> Decision:
        """What a call of `num_tokens` tokens would do now."""
        if _capturing_elsewhere(self.program.device):
            return Decision(Action.COMPILED, None, "captured_by_caller")
        blocked = self.program.blocked
        if blocked is None and self.family.config.cuda_graphs == "off":
            blocked = "cuda_graphs_off"
        return decide(
            num_tokens,
            Situation(
                self.sizes,
                {bucket: entry.tape.proven for bucket, entry in self.tapes.items()},
                self.failed,
                self.family.may_capture(),
                blocked,
                {
                    size: fault
                    for size in self.sizes
                    if (fault := unpaddable_reason(self.program, self.family.verdicts, size))
                },
                self._invalid,
            ),
        )

    def drop_graphs(self) -> None:
        """Forget tapes and the buffers they read; the next calls capture again."""
        self._ready.clear()
        self.tapes.clear()
        self.failed.clear()
        self._addresses = self._inputs = None
        self._buffers = FlatBuffers()

    def buffer_bytes(self) -> int:
        """Bytes of owned buffers outside of the graph pool."""
        return self._buffers.bytes() + (self._inputs.bytes() if self._inputs else 0)

    def _count(self, sizes: Sizes) -> int:
        if self.program.token is not None:
            return sizes[self.program.token]
        return self.static_tokens or 0

    def _decide_and_run(self, args: Sequence[Any], sizes: Sizes, num_tokens: int) -> list[Any]:
        decision = self.decide(num_tokens)
        if decision.action is Action.COMPILED:
            assert decision.reason is not None
            return self._run_compiled(args, sizes, decision.reason)
        assert decision.bucket is not None
        if decision.action is Action.CAPTURE:
            return self._capture(args, num_tokens, decision.bucket)
        bound = self.tapes[decision.bucket].tape.bind(num_tokens)
        self._ready[num_tokens] = bound
        return self._replay(bound, args, num_tokens)

    def _run_compiled(self, args: Sequence[Any], sizes: Sizes, reason: str) -> list[Any]:
        args = self._in_layout(args, sizes)
        if self.family.capturing is not False:  # pg.capture's tracing calls are nobody's forwards
            counters.fallback(reason)
            self.fallbacks[reason] += 1
        return run_steps(self.program, args, sizes)

    def _in_layout(self, args: Sequence[Any], sizes: Sizes) -> Sequence[Any]:
        """Activations with the strides that the segments were compiled for.

        Dynamo keeps conditions on symbolic strides among the guards that pg.compile drops.
        """
        laid_out = list(args)
        for index, given in enumerate(self.program.split.inputs[: len(args)]):
            if given.spec is not None and not given.bound:
                strides = given.spec.stride_at(sizes)
                if not _same_layout(args[index], strides):
                    if self.program.blocked == "writes_an_input":
                        raise InputError.strides(given.name, args[index].stride(), strides)
                    laid_out[index] = given.spec.empty(sizes)
                    overwrite(laid_out[index], args[index])
        return laid_out

    def _replay(self, bound: BoundTape, args: Sequence[Any], num_tokens: int) -> list[Any]:
        if self.family.config.check != "off":
            self._check_addresses(args)
        bound.copy_in.fill(args)
        self.family.pool.run_off_default_stream(bound.calls)
        counters.add("replays")
        self.replays[num_tokens] += 1
        for reason, segments in bound.unpadded.items():
            counters.unpadded(reason, segments)
        return self._own(bound.outputs, args)

    def _own(self, outputs: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        copy = self.family.config.outputs == "copy"
        return [
            _argument(value, args, self.program)
            if isinstance(value, Ref)
            else value.clone()
            if copy and isinstance(value, Tensor)
            else value
            for value in outputs
        ]

    def _check_addresses(self, args: Sequence[Any]) -> None:
        found = [args[index].data_ptr() for index in self._bound_indices]
        if found == self._addresses:
            return
        assert self._addresses is not None
        for index, address, expected in zip(self._bound_indices, found, self._addresses, strict=True):
            if address != expected:
                raise AddressMovedError.moved(self.program.split.inputs[index].name)

    def _capture(self, args: Sequence[Any], num_tokens: int, bucket: int) -> list[Any]:
        """Answer the call uncaptured and record `bucket` along the way."""
        program, family = self.program, self.family
        family.pool.join(program.device, self)
        if self._addresses is not None and family.config.check != "off":
            self._check_addresses(args)
        args = self._in_layout(args, program.sizes_at(num_tokens))
        before, began = family.pool.bytes(), time.perf_counter()
        with family.pool.session():
            outputs = rehearse(program, args, num_tokens, bucket, family.verdicts, watch_ops=not self.tapes)
            fault = unpaddable_reason(program, family.verdicts, bucket)
            if fault is None and not is_proven(program, family.verdicts, bucket):
                fault = "padding_unproven"
            if fault is not None and bucket != num_tokens:
                counters.fallback(fault)
                self.fallbacks[fault] += 1
                return outputs
            self._record(args, bucket, before, began)
        return outputs

    def _record(self, args: Sequence[Any], bucket: int, before: int, began: float) -> None:
        """Record `bucket`; a failure costs this bucket, not the call."""
        family = self.family
        if self._inputs is None:
            self._inputs = StaticInputs(self.program, max(self.sizes))
            self._addresses = [args[index].data_ptr() for index in self._bound_indices]
        try:
            tape = record(
                self.program, args, bucket, family.pool, self._inputs, self._buffers, family.verdicts
            )
        except torch.OutOfMemoryError as error:
            self.failed[bucket] = CaptureError.out_of_memory(bucket, str(error))
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            self.failed[bucket] = f"{type(error).__name__}: {error}"
        else:
            self._ready.clear()
            seconds = time.perf_counter() - began
            self.tapes[bucket] = Tape(tape, seconds, family.pool.bytes() - before)
            return
        counters.add("failed_captures")


class WholeRuntime:
    """Runs a trace that cannot be split, compiled as one, and counts why.

    Args:
        run: the whole graph, compiled.
        reason: why it was not split.
        bound: its weights, by which `explain` finds it.
    """

    def __init__(
        self, run: Callable[..., Any], reason: str, family: Family, bound: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.run, self.reason, self.family = run, reason, family
        self.fallbacks: Counter[str] = Counter()
        self.bound_ids = frozenset(id(tensor) for _, tensor in bound)
        family.add(self)

    def __call__(self, *args: Any) -> Any:
        if self.family.tracing:
            raise TracedOnly
        self.family.ran += 1
        counters.fallback(self.reason)
        self.fallbacks[self.reason] += 1
        return self.run(*args)

    def drop_graphs(self) -> None:
        """It has none."""


def _same_layout(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Strides are equal where they matter: in dimensions of more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(found == wanted for size, found, wanted in pairs if size > 1)


def _argument(item: Ref, args: Sequence[Any], program: Program) -> Any:
    return args[item.slot] if item.slot < len(args) else program.split.inputs[item.slot].constant


def _capturing_elsewhere(device: torch.device) -> bool:
    """The caller is capturing a graph of his own: our replays and captures would not belong in it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
