"""pg.explain: what became of a model, for people (`str`) and for programs (`to_dict`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.errors import NotCompiledError
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.inspection.page import page
from piecewise_graph.inspection.steps import ops_of, step_name
from piecewise_graph.reasons import remedy
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.runtime.budget import over_budget
from piecewise_graph.runtime.model_state import Trace
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.sizes import range_text
from piecewise_graph.splitter.split_graph import SegmentStep, Step


@dataclass(frozen=True)
class StepReport:
    """A segment, or the splitting ops between two.

    Attributes:
        name: `segment_4`, as depyf's files are called, or the ops' names.
        structure: key of a segment's structure; "" of splitting ops.
        ops: what it calls, with the paths of the modules that call it.
    """

    name: str
    segment: bool
    structure: str
    ops: tuple[str, ...]


@dataclass(frozen=True)
class StructureReport:
    """A compiled structure.

    Attributes:
        segments: names of those that it runs.
        origin: what made it: "Inductor", a loaded file, or "FX".
        code: that Inductor generated; else the graph itself.
    """

    key: str
    segments: tuple[str, ...]
    origin: str
    seconds: float
    code: str


@dataclass(frozen=True)
class TraceReport:
    """One graph that Dynamo traced.

    Attributes:
        sizes: the token counts that it serves, as text.
        steps, segments, inline_segments: how it was cut; inline ones have no compute.
        splitting_ops: name -> calls.
        distinct: segment structures, each compiled once or loaded from cache_dir.
        compile_seconds: summed over the structures that were compiled.
        from_cache: structures loaded from cache_dir.
        load_seconds: summed over these.
        cache_notes: why files of cache_dir were not used or not written -> structures.
        exact: token count -> what became of `specialize`, a line per structure.
        leaks: suspicious ops left inside a segment.
        blocked: why it never replays, or None.
        padding: per structure that is not padded somewhere, why.
        exact_only: why it serves exact sizes only, or None.
        failed: bucket -> why its capture failed.
        fallbacks: reason -> calls.
        merged: parallel linears that run as one, `q_proj+k_proj+v_proj` -> groups.
        merged_linears: members of all these groups.
        apart: why others could not be merged -> groups.
        layout: the steps in their order.
        structures: the compiled structures, in the order of their first segment.
    """

    sizes: str
    steps: int
    segments: int = 0
    inline_segments: int = 0
    splitting_ops: dict[str, int] = field(default_factory=dict)
    distinct: int = 0
    compile_seconds: float = 0.0
    from_cache: int = 0
    load_seconds: float = 0.0
    cache_notes: dict[str, int] = field(default_factory=dict)
    exact: dict[int, tuple[str, ...]] = field(default_factory=dict)
    leaks: tuple[str, ...] = ()
    blocked: str | None = None
    padding: dict[str, str] = field(default_factory=dict)
    exact_only: str | None = None
    buckets: tuple[BucketRecord, ...] = ()
    failed: dict[int, str] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    merged: dict[str, int] = field(default_factory=dict)
    merged_linears: int = 0
    apart: dict[str, int] = field(default_factory=dict)
    layout: tuple[StepReport, ...] = ()
    structures: tuple[StructureReport, ...] = ()


@dataclass(frozen=True)
class Report:
    """All traces of a model and what they hold together.

    Attributes:
        fallbacks: of calls that reached no trace.
        over_budget: bucket that max_graph_bytes has no room for -> why.
    """

    traces: tuple[TraceReport, ...]
    pool_bytes: int
    buffer_bytes: int
    sealed: bool
    fallbacks: dict[str, int]
    over_budget: dict[int, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for json.dump."""
        return asdict(self)

    def to_html(self) -> str:
        """One page for a browser, which needs nothing beside itself."""
        return page(self.to_dict())

    def __str__(self) -> str:
        lines = []
        for number, trace in enumerate(self.traces):
            lines += _trace_lines(number, trace)
        lines += map(_fallback, self.fallbacks.items())
        lines += [f"not captured: {size} tokens: {why}" for size, why in self.over_budget.items()]
        held = f"{_mib(self.pool_bytes)} in the graph pool, {_mib(self.buffer_bytes)} in owned buffers"
        lines.append(f"memory: {held}" + ("; sealed" if self.sealed else ""))
        return "\n".join(lines)


def explain(compiled: Any) -> Report:
    """Report on what pg.compile or torch.compile(..., backend="piecewise") returned.

    Raises:
        NotCompiledError: the object has no trace of this backend.
    """
    state = state_of(compiled)
    if state is None or not (state.traces or state.fallbacks):
        raise NotCompiledError.unknown(repr(compiled)[:80].splitlines()[0])
    traces = tuple(_trace(number, trace) for number, trace in enumerate(state.traces))
    buffers = sum(t.buffer_bytes() for t in state.traces if isinstance(t, Runtime))
    dropped = dict(over_budget(state))
    return Report(traces, state.pool_bytes(), buffers, state.sealed, dict(state.fallbacks), dropped)


def _trace(number: int, trace: Trace) -> TraceReport:
    if isinstance(trace, Runtime):
        return _split_trace(number, trace)
    return TraceReport("all", steps=1, blocked=trace.blocked, fallbacks=dict(trace.fallbacks))


def _split_trace(number: int, runtime: Runtime) -> TraceReport:
    program = runtime.program
    split, segments = program.split, program.compiled
    ops: dict[str, int] = {}
    for call in split.op_calls:
        ops[call.op.name] = ops.get(call.op.name, 0) + 1
    inline = sum(not s.facts.computes for s in segments.values())
    distinct = program.distinct
    return TraceReport(
        sizes=_sizes(runtime),
        steps=len(split.steps),
        segments=len(segments) - inline,
        inline_segments=inline,
        splitting_ops=ops,
        distinct=len(distinct),
        compile_seconds=sum(s.seconds for s in distinct if not s.from_cache),
        from_cache=sum(s.from_cache for s in distinct),
        load_seconds=sum(s.seconds for s in distinct if s.from_cache),
        cache_notes=dict(Counter(s.cache_reason for s in distinct if s.cache_reason is not None)),
        exact=_exact(distinct),
        leaks=split.leaks,
        blocked=runtime.blocked,
        padding=_unpadded(program, runtime.state.proofs),
        exact_only=program.unpaddable,
        buckets=tuple(
            replace(tapes.buckets[size].record, trace=number)
            for tapes in runtime.all_tapes()
            for size in sorted(tapes.buckets)
        ),
        failed={size: failure for tapes in runtime.all_tapes() for size, failure in tapes.failed.items()},
        fallbacks=dict(runtime.fallbacks),
        merged=dict(program.merge.merged),
        merged_linears=program.merge.linears,
        apart=dict(program.merge.apart),
        layout=tuple(map(partial(_step, program), split.steps)),
        structures=tuple(_structure(program, segment) for segment in distinct),
    )


def _step(program: Program, step: Step) -> StepReport:
    is_segment = isinstance(step, SegmentStep)
    key = program.compiled[step.index].key if isinstance(step, SegmentStep) else ""
    return StepReport(step_name(step), is_segment, key, ops_of(step))


def _structure(program: Program, segment: CompiledSegment) -> StructureReport:
    steps = [step for step in program.split.segments if program.compiled[step.index].key == segment.key]
    code = _torch.generated_code(segment.run)
    origin = "loaded from cache_dir" if segment.from_cache else "Inductor" if code else "FX"
    names = tuple(map(step_name, steps))
    return StructureReport(segment.key, names, origin, segment.seconds, code or segment.gm.code.strip())


def _unpadded(program: Program, proofs: PaddingProofs) -> dict[str, str]:
    """Structures that run at exact sizes, and why."""
    found = dict(proofs.failed())
    for step in program.split.segments:
        if step.index in program.unproved and not (step.padded and program.compiled[step.index].key in found):
            verb = "not proved" if program.unpaddable or not step.padded else "left to trials"
            found[program.compiled[step.index].key] = f"{verb}: {program.unproved[step.index]}"
    keys = {segment.key for segment in program.compiled.values()}
    return {key: reason for key, reason in found.items() if key in keys}


def _exact(distinct: Sequence[CompiledSegment]) -> dict[int, tuple[str, ...]]:
    """What became of `specialize`, per size."""
    found: dict[int, tuple[str, ...]] = {}
    for segment in distinct:
        for size, code in segment.exact.items():
            linears = f", {'; '.join(code.linears)}" if code.linears else ""
            line = f"not used: {code.reason}" if code.reason else f"{code.seconds:.1f} s{linears}"
            found[size] = (*found.get(size, ()), f"structure {segment.key} {line}")
    return found


def _sizes(runtime: Runtime) -> str:
    program = runtime.program
    fixed = ", ".join(f"{symbol} = {size}" for symbol, size in program.fixed.items())
    if program.token is None:
        return fixed or ("fixed shapes" if not program.contract.symbols else _several_sizes(runtime))
    guards = [str(guard) for guard in program.contract.guards]
    where = f", where {', '.join(guards)[:120]}" if guards else ""
    return (f"{fixed}, " if fixed else "") + range_text(program.contract.ranges[0]) + where


def _several_sizes(runtime: Runtime) -> str:
    batches = runtime.several.batches if runtime.several is not None else None
    if batches is None:
        return "several dynamic sizes"
    prepared = f"{batches.prepared} batch sizes and proofs took {batches.preparing:.2f} s"
    served = f"{batches.requests} requests in batches of {batches.rows} rows"
    return f"several dynamic sizes, {served}; {prepared}"


def _trace_lines(number: int, trace: TraceReport) -> list[str]:
    ops = ", ".join(f"{count} x {name}" for name, count in trace.splitting_ops.items()) or "no splitting op"
    lines = [f"trace {number}: {trace.sizes}"]
    if trace.segments:
        inline = f" (+{trace.inline_segments} inline)" if trace.inline_segments else ""
        lines.append(f"  {trace.steps} steps: {trace.segments} segments{inline}, {ops}")
        lines.append(f"  {trace.distinct} distinct structures {_origin(trace)}")
        lines += [f"  cache_dir: {why} ({count} structures)" for why, count in trace.cache_notes.items()]
    for size, codes in trace.exact.items():
        lines += [f"  for exactly {size} tokens: {code}" for code in codes]
    if trace.merged or trace.apart:
        lines.append(f"  merged: {_merged(trace)}")
    if trace.exact_only:
        lines.append(f"  not padded, graphs for returning sizes alone: {trace.exact_only}")
    if trace.blocked:
        lines.append(f"  never replayed: {trace.blocked}")
    lines += [f"  inside a segment, not registered: {leak}" for leak in trace.leaks]
    lines += [f"  structure {key} is not padded, {fault}" for key, fault in trace.padding.items()]
    if trace.buckets:
        lines.append("  bucket  graphs  pool MiB   planned  seconds  replays  mode")
    for b in trace.buckets:
        lines.append(
            f"  {b.tokens:6d}  {b.graphs:6d}  {b.graph_bytes / 2**20:8.1f}  {_planned(b)}  {b.seconds:7.2f}"
            f"  {b.replays:7d}  {b.mode}"
        )
    counts = sum(bucket.token_counts for bucket in trace.buckets)
    if counts:
        each = sum(bucket.bind_seconds for bucket in trace.buckets) / counts
        lines.append(f"  host time of a new token count: {each * 1e6:.0f} us (met: {counts})")
    lines += [f"  bucket {size} failed: {why}" for size, why in trace.failed.items()]
    lines += [f"  {_fallback(item)}" for item in trace.fallbacks.items()]
    return lines


def _fallback(item: tuple[str, int]) -> str:
    reason, count = item
    return f"fallback {reason}: {count} calls; {remedy(reason)}"


def _planned(bucket: BucketRecord) -> str:
    return f"{'-':>8}" if bucket.planned_bytes is None else f"{bucket.planned_bytes / 2**20:8.1f}"


def _origin(trace: TraceReport) -> str:
    compiled = f"compiled in {trace.compile_seconds:.1f} s"
    loaded = f"loaded from cache_dir in {trace.load_seconds:.1f} s"
    if not trace.from_cache:
        return compiled
    if trace.from_cache == trace.distinct:
        return loaded
    return f"({trace.distinct - trace.from_cache} {compiled}, {trace.from_cache} {loaded})"


def _merged(trace: TraceReport) -> str:
    groups = f"{sum(trace.merged.values())} groups of {trace.merged_linears} linears"
    names = f" ({', '.join(trace.merged)})" if trace.merged else ""
    apart = ", ".join(f"{count} {why}" for why, count in trace.apart.items())
    return groups + names + (f"; apart: {apart}" if apart else "")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
