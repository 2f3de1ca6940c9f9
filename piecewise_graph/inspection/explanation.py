"""pg.explain: from the state of a model to its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.errors import NotCompiledError
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.inspection.report import Report, StepReport, StructureReport, TraceReport
from piecewise_graph.inspection.steps import ops_of, step_name
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.runtime.budget import over_budget
from piecewise_graph.runtime.model_state import Trace
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.sizes import range_text
from piecewise_graph.splitter.split_graph import SegmentStep, Step


def explain(compiled: Any) -> Report:
    """Report on what pg.compile or torch.compile(..., backend="piecewise") returned.

    Raises:
        NotCompiledError: the object has no trace of this backend.
    """
    state = state_of(compiled)
    if state is None:  # `generate` of transformers keeps there what it compiled
        state = state_of(getattr(compiled, "_compiled_call", None))
    if state is None or not (state.traces or state.fallbacks or state.ended):
        raise NotCompiledError.unknown(repr(compiled)[:80].splitlines()[0])
    traces = tuple(_trace(number, trace) for number, trace in enumerate(state.traces))
    buffers = sum(t.buffer_bytes() for t in state.traces if isinstance(t, Runtime))
    dropped = dict(over_budget(state))
    fallbacks, ended = dict(state.fallbacks), dict(state.ended)
    return Report(traces, state.pool_bytes(), buffers, state.sealed, fallbacks, dropped, ended)


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
        uncompiled=tuple(segment.key for segment in distinct if not segment.facts.compiles),
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
        ranks=str(program.ranks) if program.ranks.several else None,
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
