"""ReplayTape: one bucket as a flat list of zero-argument calls.

Everything that a forward does between its first copy and its last is bound here beforehand: graph
replays as they are, splitting ops with their arguments narrowed to the token count. The views for one
token count are made once and kept, because a slice costs more host time than a graph replay.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program, check_promise
from piecewise_graph.recorder.static_buffers import InputCopies, StaticInputs, narrow, tails
from piecewise_graph.sizes import evaluate, in_strides, overwrite
from piecewise_graph.splitter.split_graph import Opaque, Ref, Size, resolve

Call = Callable[..., Any]  # of no arguments; one that copies results takes `op` too


@dataclass(frozen=True)
class LateCall:
    """What runs between graphs: a splitting op, or a segment that must not be padded.

    Attributes:
        name: of the op, or of the segment.
        target: called as `target(*args, **kwargs)`; Ref and Size stand nested in both.
        outputs: (index into the result or None, slot of the buffer that it is copied to).
        padded: it takes the bucket's full size.
        bind: see SplittingOp.
    """

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int | None, int], ...]
    padded: bool
    bind: Callable[..., Call] | None = None


@dataclass(frozen=True)
class BoundTape:
    """A tape bound to one token count.

    Attributes:
        copy_in: brings the caller's activations to the static inputs.
        calls: the forward.
        outputs: per graph output a view of a static tensor, or a value that is no tensor of ours.
        strides: per graph output those that the trace has for it, where a clone of the view has others.
        unpadded: see ReplayTape.
    """

    copy_in: InputCopies
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    unpadded: Mapping[str, int]


@dataclass(eq=False)
class ReplayTape:
    """The captured graphs of one bucket.

    Attributes:
        bucket: token count that the graphs were captured for.
        entries: zero-argument replays, and LateCalls that are bound per token count.
        values: slot -> static tensor (weak aliases where the pool owns the memory).
        proven: every captured segment was shown to tolerate padding.
        unpadded: reason -> number of segments that run uncaptured because they do not.
        keep: storages that graphs read by address, kept alive by the tape.
        graphs: how many were captured.
        steps: per entry, the index of the step that it belongs to; empty for a tape of one graph.
        bind_seconds: host time that binding has taken so far.
    """

    program: Program
    bucket: int
    entries: tuple[Call | LateCall, ...]
    values: Mapping[int, Tensor]
    inputs: StaticInputs
    proven: bool
    unpadded: Mapping[str, int]
    keep: tuple[Any, ...]
    graphs: int
    steps: tuple[int, ...] = ()
    bind_seconds: float = 0.0
    _bound: dict[int, BoundTape] = field(default_factory=dict)

    @property
    def token_counts(self) -> int:
        """How many it was bound to."""
        return len(self._bound)

    def bind(self, num_tokens: int) -> BoundTape:
        """The calls for `num_tokens` live tokens; made once per count."""
        bound = self._bound.get(num_tokens)
        if bound is None:
            began = time.perf_counter()
            calls = tuple(
                self._bind_late(entry, num_tokens) if isinstance(entry, LateCall) else entry
                for entry in self.entries
            )
            items = self.program.split.outputs
            outputs = tuple(resolve(items, lambda item: self._output(item, num_tokens)))
            pairs = zip(items, outputs, strict=True)
            strides = tuple(self._strides(item, value, num_tokens) for item, value in pairs)
            copy_in = self.inputs.copies(self.bucket, num_tokens)
            bound = BoundTape(copy_in, calls, outputs, strides, self.unpadded)
            self._bound[num_tokens] = bound
            self.bind_seconds += time.perf_counter() - began
        return bound

    def run_first(self, args: Sequence[Any], num_tokens: int) -> list[Any]:
        """Replay a call for the first time: what ops return is held against what their fakes said.

        Later replays copy it as it is. Call it inside `pool.session()`.

        Returns:
            the graph's outputs, owned by the caller.

        Raises:
            SplittingOpError: an op returned another dtype or shape than its fake promised.
        """
        bound = self.bind(num_tokens)
        bound.copy_in.fill(args)
        for entry, call in zip(self.entries, bound.calls, strict=True):
            if isinstance(entry, LateCall) and entry.outputs:
                call(op=entry.name)
            else:
                call()
        return own_outputs(self.program, bound, args, copy=True)

    def _bind_late(self, late: LateCall, num_tokens: int) -> Call:
        size = self.bucket if late.padded else num_tokens

        def bound(item: Ref | Size | Opaque) -> Any:
            if isinstance(item, Opaque):
                return self.values[item.slot]
            return self._view(item.slot, size) if isinstance(item, Ref) else self._integer(item, size)

        args, kwargs = resolve(late.args, bound), resolve(late.kwargs, bound)
        if late.bind is not None:
            call = late.bind(*args, **kwargs, num_tokens=num_tokens)
        else:
            call = partial(late.target, *args, **kwargs)
        if not late.outputs:
            return call
        destinations = tuple((element, self._view(slot, size)) for element, slot in late.outputs)
        return partial(_call_into, call, destinations, self._integer_tails(late, size))

    def _integer_tails(self, late: LateCall, size: int) -> tuple[Tensor, ...]:
        """What lies past the live rows of integer results: the next graph may look it up, so it is zeroed.

        Not of windows, whose rows share elements with live ones: no graph reads them padded.
        """
        found: list[Tensor] = []
        for _, slot in late.outputs:
            spec = self.program.split.spec(slot)
            if not (spec.dtype.is_floating_point or spec.overlaps(self.program.sizes_at(self.bucket))):
                found += tails(self.values[slot], spec, self.program, size)
        return tuple(found)

    def _output(self, item: Ref | Size | Opaque, num_tokens: int) -> Any:
        if isinstance(item, Size):
            return self._integer(item, num_tokens)
        if isinstance(item, Opaque):
            return self.values[item.slot]
        if item.slot < len(self.program.split.inputs):
            return item  # the caller gets its own argument back
        return self._view(item.slot, num_tokens)

    def _strides(self, item: Any, value: Any, num_tokens: int) -> tuple[int, ...] | None:
        """See BoundTape. The rows of a bucket may lie further apart than those of fewer tokens."""
        if not isinstance(item, Ref) or not isinstance(value, Tensor):
            return None
        strides = self.program.split.spec(item.slot).stride_at(self.program.sizes_at(num_tokens))
        return None if torch.empty_like(value, device="meta").stride() == strides else strides

    def _integer(self, item: Size, num_tokens: int) -> int:
        return evaluate(item.expr, self.program.sizes_at(num_tokens))

    def _view(self, slot: int, num_tokens: int) -> Tensor:
        value = self.values[slot]
        if num_tokens == self.bucket:
            return value
        return narrow(value, self.program.split.spec(slot), self.program, num_tokens)


def _call_into(
    call: Call,
    destinations: tuple[tuple[int | None, Tensor], ...],
    to_zero: tuple[Tensor, ...],
    op: str | None = None,
) -> None:
    """
    Args:
        op: name of the op whose results are checked; None copies them as they are.
    """
    result = call()
    for element, destination in destinations:
        part = result if element is None else result[element]
        if op is not None:
            check_promise(op, part, destination.dtype, tuple(destination.shape))
        overwrite(destination, part)
    for tail in to_zero:
        tail.zero_()


def own_outputs(program: Program, bound: BoundTape, args: Sequence[Any], *, copy: bool) -> list[Any]:
    """A bound tape's outputs as the caller gets them.

    Args:
        args: the call's arguments; an output may be one of them.
        copy: the caller owns what it gets, in the strides that the trace has for it.
    """
    return [
        _argument(program, value, args)
        if isinstance(value, Ref)
        else value
        if not copy or not isinstance(value, Tensor)
        else value.clone()
        if strides is None
        else in_strides(value, strides)
        for value, strides in zip(bound.outputs, bound.strides, strict=True)
    ]


def _argument(program: Program, item: Ref, args: Sequence[Any]) -> Any:
    return args[item.slot] if item.slot < len(args) else program.split.inputs[item.slot].constant
