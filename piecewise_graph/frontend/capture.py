"""pg.capture: record every bucket before serving, largest first, then seal. pg.plan: what that will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from piecewise_graph.context import forward_context
from piecewise_graph.errors import CaptureError, NotCompiledError
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.graph_pool import collector_off
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.memory_plan import Plan
from piecewise_graph.runtime.budget import current_plan, over_budget, plan_sizes
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.replay import CapturedBucket
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.side_channel import Purpose, undoing_writes

MakeInputs = Callable[[int], Any]
MakeContext = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True)
class CaptureReport:
    """What pg.capture did. `str()` is for people.

    Attributes:
        captured: buckets, in the order in which they were captured.
        failed: bucket -> why it was not captured; its calls run compiled.
        seconds: wall time, compiling not included where the model was traced before.
        pool_bytes: device memory that the pool holds now, graphs of other models in it included.
        buffer_bytes: owned input and bridge buffers outside of the pool.
    """

    captured: tuple[BucketRecord, ...]
    failed: dict[int, str]
    seconds: float
    pool_bytes: int
    buffer_bytes: int

    def __str__(self) -> str:
        graphs = sum(bucket.graphs for bucket in self.captured)
        lines = [
            f"captured {len(self.captured)} buckets ({graphs} graphs) in {self.seconds:.2f} s: "
            f"{self.pool_bytes / 2**20:.1f} MiB of graphs, {self.buffer_bytes / 2**20:.1f} MiB of buffers"
        ]
        planned = [bucket.planned_bytes for bucket in self.captured]
        if any(planned):
            taken = sum(bucket.graph_bytes for bucket in self.captured)
            lines.append(
                f"  planned {sum(filter(None, planned)) / 2**20:.1f} MiB, took {taken / 2**20:.1f} MiB"
            )
        lines += [f"  not captured: {size} tokens: {why}" for size, why in self.failed.items()]
        return "\n".join(lines)


def capture(
    compiled: Any,
    make_inputs: MakeInputs,
    *,
    sizes: Sequence[int] | None = None,
    context: MakeContext | None = None,
    progress: bool = True,
) -> CaptureReport:
    """Record a tape for each of `sizes`, largest first, so that smaller ones reuse its memory.

    Afterwards nothing is captured lazily: a call whose bucket is missing runs compiled, counted as
    `not_captured`.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned.
        make_inputs: token count -> a call's arguments: a dict of keywords, a tuple, or one tensor. The
            model runs on them, so they have to be legal. What segments write to static tensors is undone;
            splitting ops with side effects (a KV cache) happen.
        sizes: token counts out of the capture sizes; None = all of them.
        context: token count -> what pg.forward_context gets around the call; with `full_graph=True` among
            it, full graphs are captured, for the objects that it holds.
        progress: show a progress bar.

    Raises:
        CaptureError: a size that is no capture size, inputs of another size, or nothing captured at all.
    """
    began = time.perf_counter()
    with undoing_writes():
        return _captured_sizes(compiled, make_inputs, sizes, context, progress, began)


def _captured_sizes(
    compiled: Any,
    make_inputs: MakeInputs,
    sizes: Sequence[int] | None,
    context: MakeContext | None,
    progress: bool,
    began: float,
) -> CaptureReport:
    call = partial(_call, compiled, make_inputs, context)
    state = state_of(compiled)
    chosen = sorted(set(state.config.sizes if state and sizes is None else sizes or ()), reverse=True)
    if state is None:
        state, chosen = _traced_state(call, sizes)
    if not chosen or not set(chosen) <= set(state.config.sizes):
        raise CaptureError.bad_sizes(sizes or [], state.config.sizes)
    known = {id(bucket) for _, bucket in _captured(state)}
    _trace_dynamic(call, chosen, state)
    if state.plan is not None or state.config.max_graph_bytes is not None:
        captured_before = (bucket for r in _runtimes(state) for bucket in r.all_tapes()[0].buckets)
        current_plan(state, {*chosen, *captured_before})
    bar = tqdm(chosen, desc="capturing", unit="bucket", disable=not progress, leave=False)
    with state.channel.calls_for(Purpose.CAPTURE), collector_off():
        for size in bar:
            call(size)
    report = _report(state, chosen, known, time.perf_counter() - began)
    state.sealed = True
    return report


def plan(compiled: Any, sizes: Sequence[int] | None = None) -> Plan:
    """Say what capturing `sizes` will take, largest first, before anything is taken.

    Nothing is captured and no splitting op called, but every segment runs once per bucket, on zeros, in
    memory that is given back. Piecewise graphs are planned, in a pool without other models. From then on
    pg.capture and pg.explain show beside what was taken what was planned.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned, called at least once.
        sizes: token counts out of the capture sizes; None = all of them.

    Raises:
        NotCompiledError: the object has no trace of this backend.
        CaptureError: a size that is no capture size.
    """
    state = state_of(compiled)
    if state is None or not state.traces:
        raise NotCompiledError.unknown(repr(compiled)[:80].splitlines()[0])
    chosen = state.config.sizes if sizes is None else sizes
    if not chosen or not set(chosen) <= set(state.config.sizes):
        raise CaptureError.bad_sizes(chosen, state.config.sizes)
    with state.pool.using():
        return plan_sizes(state, chosen)


def _traced_state(call: partial[None], sizes: Sequence[int] | None) -> tuple[ModelState, list[int]]:
    """Plain torch.compile has no model state before its first trace."""
    call(max(sizes) if sizes else 2)
    state = state_of(call.args[0])
    if state is None:
        raise CaptureError.nothing_captured(["the object has no piecewise trace after a call"])
    return state, sorted(set(sizes or state.config.sizes), reverse=True)


def _trace_dynamic(call: Callable[[int], None], sizes: Sequence[int], state: ModelState) -> None:
    """Let Dynamo find out that sizes vary before anything is captured.

    Plain torch.compile traces its first size as a constant, and would capture that trace for the largest
    bucket and another one for the rest. pg.compile needs the largest size alone. A model that has a dynamic
    trace needs neither.
    """
    if any(runtime.static_tokens is None for runtime in _runtimes(state)):
        return
    with state.channel.calls_for(Purpose.WARM_UP):
        for size in sizes[:2]:
            call(size)


def _call(compiled: Any, make_inputs: MakeInputs, context: MakeContext | None, size: int) -> None:
    if context is not None:
        fields = context(size)
        if not isinstance(fields, Mapping):
            raise CaptureError.bad_context(size, type(fields).__name__)
        with forward_context(**fields):
            return _call(compiled, make_inputs, None, size)
    inputs = make_inputs(size)
    if isinstance(inputs, dict):
        compiled(**inputs)
    elif isinstance(inputs, (tuple, list)):
        compiled(*inputs)
    elif isinstance(inputs, Tensor):
        compiled(inputs)
    else:
        raise CaptureError.bad_inputs(size, f"a {type(inputs).__name__}")
    return None


def _runtimes(state: ModelState) -> list[Runtime]:
    return [trace for trace in state.traces if isinstance(trace, Runtime)]


def _captured(state: ModelState, size: int | None = None) -> list[tuple[int, CapturedBucket]]:
    """All captured buckets, or those of one size, each with the number of its trace."""
    return [
        (number, captured)
        for number, trace in enumerate(state.traces)
        if isinstance(trace, Runtime)
        for tapes in trace.all_tapes()
        for bucket, captured in tapes.buckets.items()
        if size in (None, bucket)
    ]


def _report(state: ModelState, sizes: Sequence[int], known: set[int], seconds: float) -> CaptureReport:
    captured: list[BucketRecord] = []
    failed: dict[int, str] = {}
    for size in sizes:
        buckets = _captured(state, size)
        new = [(number, bucket) for number, bucket in buckets if id(bucket) not in known]
        failures = _failures(state, size)
        if failures and not new:  # of this mode; another one may have captured the size before
            failed[size] = failures[0]
        elif not buckets:
            failed[size] = _why_not(state, size)
        else:
            captured += [replace(bucket.record, trace=number) for number, bucket in new or buckets]
    if not captured:
        raise CaptureError.nothing_captured(sorted(set(failed.values())))
    buffers = sum(runtime.buffer_bytes() for runtime in _runtimes(state))
    return CaptureReport(tuple(captured), failed, seconds, state.pool_bytes(), buffers)


def _failures(state: ModelState, size: int) -> list[str]:
    return [
        tapes.failed[size]
        for runtime in _runtimes(state)
        for tapes in runtime.all_tapes()
        if size in tapes.failed
    ]


def _why_not(state: ModelState, size: int) -> str:
    if size in (dropped := over_budget(state)):
        return dropped[size]
    for trace in state.traces:
        reason = trace.decide(size).reason if isinstance(trace, Runtime) else trace.blocked
        if reason and reason != "not_captured":
            return reason
    return CaptureError.wrong_count(size)
