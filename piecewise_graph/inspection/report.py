"""What pg.explain tells of a model, for people (`str`) and for programs (`to_dict`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from piecewise_graph.inspection.page import page
from piecewise_graph.reasons import remedy
from piecewise_graph.recorder.bucket_record import BucketRecord

_SUMMARY_REASONS = 5  # beside these, five lines at most


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
        uncompiled: structures that write their inputs in a way that compilers get wrong.
        padding: per structure that is not padded somewhere, why.
        exact_only: why it serves exact sizes only, or None.
        failed: bucket -> why its capture failed.
        fallbacks: reason -> calls.
        merged: parallel linears that run as one, `q_proj+k_proj+v_proj` -> groups.
        merged_linears: members of all these groups.
        apart: why others could not be merged -> groups.
        layout: the steps in their order.
        structures: the compiled structures, in the order of their first segment.
        ranks: which process of several this is, and what it sums by kernels of ours; or None.
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
    uncompiled: tuple[str, ...] = ()
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
    ranks: str | None = None


@dataclass(frozen=True)
class Report:
    """All traces of a model and what they hold together.

    Attributes:
        fallbacks: of calls that reached no trace, or one that ended.
        ended: what graphs served that went with a tensor that they read (a static KV cache), by "traces",
            "graphs" and "replays".
        over_budget: bucket that max_graph_bytes has no room for -> why.
    """

    traces: tuple[TraceReport, ...]
    pool_bytes: int
    buffer_bytes: int
    sealed: bool
    fallbacks: dict[str, int]
    over_budget: dict[int, str] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for json.dump."""
        return asdict(self)

    def to_html(self) -> str:
        """One page for a browser, which needs nothing beside itself."""
        return page(self.to_dict())

    def summary(self) -> str:
        """All traces together, in at most ten lines: replays, fallbacks with remedies, bytes."""
        buckets = [bucket for trace in self.traces for bucket in trace.buckets]
        calls, graphs = sum(b.replays for b in buckets), sum(b.graphs for b in buckets)
        lines = [f"{calls} replays of {graphs} graphs; {len(buckets)} buckets in {len(self.traces)} traces"]
        apart = sum((Counter(bucket.unpadded) for bucket in buckets), Counter[str]())
        if apart:
            told = ", ".join(f"{count} x {why}" for why, count in apart.most_common(3))
            lines.append(f"between graphs, beside splitting ops: {told}")
        reasons = sum((Counter(trace.fallbacks) for trace in self.traces), Counter(self.fallbacks))
        lines += map(_fallback, reasons.most_common(_SUMMARY_REASONS))
        if len(reasons) > _SUMMARY_REASONS:
            lines.append(f"and {len(reasons) - _SUMMARY_REASONS} more reasons")
        return "\n".join([*lines, *self._ended(), self._memory()])

    def _ended(self) -> list[str]:
        told = ", ".join(f"{count} {name}" for name, count in self.ended.items() if count)
        return [f"ended with a tensor that they read, such as a cache: {told}"] if told else []

    def _memory(self) -> str:
        held = f"{_mib(self.pool_bytes)} in the graph pool, {_mib(self.buffer_bytes)} in owned buffers"
        return f"memory: {held}" + ("; sealed" if self.sealed else "")

    def __str__(self) -> str:
        lines = []
        for number, trace in enumerate(self.traces):
            lines += _trace_lines(number, trace)
        lines += map(_fallback, self.fallbacks.items())
        lines += [f"not captured: {size} tokens: {why}" for size, why in self.over_budget.items()]
        return "\n".join([*lines, *self._ended(), self._memory()])


def _trace_lines(number: int, trace: TraceReport) -> list[str]:
    ops = ", ".join(f"{count} x {name}" for name, count in trace.splitting_ops.items()) or "no splitting op"
    lines = [f"trace {number}: {trace.sizes}"]
    if trace.segments:
        inline = f" (+{trace.inline_segments} inline)" if trace.inline_segments else ""
        lines.append(f"  {trace.steps} steps: {trace.segments} segments{inline}, {ops}")
        lines.append(f"  {trace.distinct} distinct structures {_origin(trace)}")
        lines += [f"  cache_dir: {why} ({count} structures)" for why, count in trace.cache_notes.items()]
    if trace.ranks:
        lines.append(f"  {trace.ranks}")
    for size, codes in trace.exact.items():
        lines += [f"  for exactly {size} tokens: {code}" for code in codes]
    if trace.merged or trace.apart:
        lines.append(f"  merged: {_merged(trace)}")
    if trace.exact_only:
        lines.append(f"  not padded, graphs for returning sizes alone: {trace.exact_only}")
    if trace.blocked:
        lines.append(f"  never replayed: {trace.blocked}")
    lines += [f"  inside a segment, not registered: {leak}" for leak in trace.leaks]
    lines += [f"  structure {key} is not compiled: it writes views" for key in trace.uncompiled]
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
