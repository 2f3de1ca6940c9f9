"""pg.capture: record every bucket before serving, largest first, then seal. pg.plan: what that will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from piecewise_graph.context import forward_context
from piecewise_graph.errors import CaptureError, NotCompiledError
from piecewise_graph.frontend.lookup import family_for
from piecewise_graph.graph_pool import collector_off
from piecewise_graph.recorder.memory_plan import Plan, current_plan, make_plan, refused
from piecewise_graph.runtime.model_state import Family
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.tape_set import Tape

MakeInputs = Callable[[int], Any]
MakeContext = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True)
class CapturedBucket:
    """One bucket of one trace.

    Attributes:
        graphs: graphs captured for it.
        graph_bytes: what it added to the pool (later buckets reuse, and add little or nothing).
        seconds: its rehearsal and capture.
        planned_bytes: what pg.plan said of `graph_bytes` before; None where nobody asked it.
    """

    tokens: int
    graphs: int
    graph_bytes: int
    seconds: float
    planned_bytes: int | None = None


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

    captured: tuple[CapturedBucket, ...]
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
            model runs on them, so they have to be legal; ops with side effects (a KV cache) happen.
        sizes: token counts out of the capture sizes; None = all of them.
        context: token count -> what pg.forward_context gets around the call; with `full_graph=True` among
            it, full graphs are captured, for the objects that it holds.
        progress: show a progress bar.

    Raises:
        CaptureError: a size that is no capture size, inputs of another size, or nothing captured at all.
    """
    began = time.perf_counter()
    call = partial(_call, compiled, make_inputs, context)
    family = family_for(compiled)
    allowed = family.config.sizes if family else None
    chosen = sorted(set(allowed or () if sizes is None else sizes), reverse=True)
    if family is None:
        family, chosen = _traced_family(call, sizes)
    if not chosen or not set(chosen) <= set(family.config.sizes):
        raise CaptureError.bad_sizes(sizes or [], family.config.sizes)
    known = {id(entry) for entry in _entries(family)}
    _trace_dynamic(call, chosen, family)
    if family.plan is not None or family.config.max_graph_bytes is not None:
        current_plan(family, {*chosen, *(bucket for r in _runtimes(family) for bucket in r.piecewise.tapes)})
    family.capturing = True
    try:
        with collector_off():
            for size in tqdm(chosen, desc="capturing", unit="bucket", disable=not progress, leave=False):
                call(size)
    finally:
        family.capturing = None
    family.sealed = True
    return _report(family, chosen, known, time.perf_counter() - began)


def plan(compiled: Any, sizes: Sequence[int] | None = None) -> Plan:
    """Say what capturing `sizes` will take, largest first, before anything is taken.

    Nothing is captured and no splitting op called, but every segment runs once per bucket, on zeros, in
    memory that is given back. Piecewise graphs are planned, in a pool that nobody else uses. From then on
    pg.capture and pg.explain show beside what was taken what was planned.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned, called at least once.
        sizes: token counts out of the capture sizes; None = all of them.

    Raises:
        NotCompiledError: the object has no trace of this backend.
        CaptureError: a size that is no capture size.
    """
    family = family_for(compiled)
    if family is None or not family.runtimes:
        raise NotCompiledError.unknown(repr(compiled)[:80].splitlines()[0])
    chosen = family.config.sizes if sizes is None else sizes
    if not chosen or not set(chosen) <= set(family.config.sizes):
        raise CaptureError.bad_sizes(chosen, family.config.sizes)
    with family.pool.using():
        return make_plan(family, chosen)


def _traced_family(call: partial[None], sizes: Sequence[int] | None) -> tuple[Family, list[int]]:
    """Plain torch.compile tells its family only once it has been traced."""
    call(max(sizes) if sizes else 2)
    family = family_for(call.args[0])
    if family is None:
        raise CaptureError.nothing_captured(["the object has no piecewise trace after a call"])
    return family, sorted(set(sizes or family.config.sizes), reverse=True)


def _trace_dynamic(call: Callable[[int], None], sizes: Sequence[int], family: Family) -> None:
    """Let Dynamo find out that sizes vary before anything is captured.

    Plain torch.compile traces its first size as a constant, and would capture that trace for the largest
    bucket and another one for the rest. pg.compile needs the largest size alone.
    """
    family.capturing = False
    try:
        for size in sizes[:2]:
            call(size)
    finally:
        family.capturing = None


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


def _runtimes(family: Family) -> list[Runtime]:
    return [runtime for runtime in family.runtimes if isinstance(runtime, Runtime)]


def _entries(family: Family, size: int | None = None) -> list[Tape]:
    """All tapes, or those of one bucket."""
    return [
        entry
        for runtime in _runtimes(family)
        for _, tapes in runtime.all_tapes()
        for bucket, entry in tapes.tapes.items()
        if size in (None, bucket)
    ]


def _report(family: Family, sizes: Sequence[int], known: set[int], seconds: float) -> CaptureReport:
    captured, failed = [], {}
    for size in sizes:
        entries = _entries(family, size)
        new = [entry for entry in entries if id(entry) not in known]
        refused = _failures(family, size)
        if refused and not new:  # of this mode, whatever another one has captured before
            failed[size] = refused[0]
        elif not entries:
            failed[size] = _why_not(family, size)
        else:
            captured += [
                CapturedBucket(size, e.tape.graphs, e.graph_bytes, e.seconds, e.planned_bytes)
                for e in new or entries
            ]
    if not captured:
        raise CaptureError.nothing_captured(sorted(set(failed.values())))
    buffers = sum(runtime.buffer_bytes() for runtime in _runtimes(family))
    return CaptureReport(tuple(captured), failed, seconds, family.pool.bytes(), buffers)


def _failures(family: Family, size: int) -> list[str]:
    return [
        tapes.failed[size]
        for runtime in _runtimes(family)
        for _, tapes in runtime.all_tapes()
        if size in tapes.failed
    ]


def _why_not(family: Family, size: int) -> str:
    if size in (dropped := refused(family)):
        return dropped[size]
    for runtime in family.runtimes:
        reason = runtime.decide(size).reason if isinstance(runtime, Runtime) else runtime.reason
        if reason and reason != "not_captured":
            return reason
    return CaptureError.wrong_count(size)
