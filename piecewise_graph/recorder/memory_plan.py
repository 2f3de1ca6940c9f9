"""What buckets will take before they are captured, and which of them a budget has room for.

Note [Plan]
What a capture takes depends on the compiler's intermediates, on when outputs die, on cuBLAS' workspaces and
on how the allocator cuts blocks. So a plan does what a capture does, with the same recorder, bucket by
bucket, largest first; but segments run instead of being captured, in a memory pool that is given back at
once. They run on the real weights and on zeros, legal indices as in padded tails; splitting ops are not
called, and what they should have filled is zero too. Buckets that are captured in another order reuse less,
and take more than planned; so may full graphs beside piecewise ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.errors import CaptureError
from piecewise_graph.graph_pool import GraphPool, Run
from piecewise_graph.recorder.padding import probe_size
from piecewise_graph.recorder.record import Verdicts, record
from piecewise_graph.recorder.static_buffers import FlatBuffers, StaticInputs
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.runtime.model_state import Family
from piecewise_graph.splitter.merged_weights import with_merged

if TYPE_CHECKING:
    from piecewise_graph.runtime.runtime import Runtime


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket of one trace.

    Attributes:
        trace: its number in pg.explain.
        graphs: how many will be captured for it.
        graph_bytes: what it adds to the pool when the larger buckets are captured before it.
        buffer_bytes: what it adds to the owned buffers; the first one of a trace brings the static inputs.
    """

    trace: int
    tokens: int
    graphs: int
    graph_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class Plan:
    """What capturing will take. `str()` is for people.

    Attributes:
        buckets: in the order of their capture, largest first.
        dropped: bucket -> why it is not among them: over the budget, or it could not be tried out.
        sizes: the token counts that were asked for, largest first.
        traces: how many the model had then.
    """

    buckets: tuple[PlannedBucket, ...]
    dropped: dict[int, str]
    sizes: tuple[int, ...]
    traces: int

    @property
    def pool_bytes(self) -> int:
        """What the pool will hold, graphs of other models in it apart."""
        return sum(bucket.graph_bytes for bucket in self.buckets)

    @property
    def buffer_bytes(self) -> int:
        """Owned input and bridge buffers outside of the pool."""
        return sum(bucket.buffer_bytes for bucket in self.buckets)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, ready for json.dump."""
        return asdict(self) | {"pool_bytes": self.pool_bytes, "buffer_bytes": self.buffer_bytes}

    def __str__(self) -> str:
        taken = f"{self.pool_bytes / 2**20:.1f} MiB of graphs, {self.buffer_bytes / 2**20:.1f} MiB of buffers"
        lines = [f"{len(self.buckets)} buckets will take {taken}"]
        lines += ["  bucket  graphs  pool MiB  buffer MiB  trace"] if self.buckets else []
        lines += [
            f"  {b.tokens:6d}  {b.graphs:6d}  {b.graph_bytes / 2**20:8.1f}  {b.buffer_bytes / 2**20:10.1f}"
            f"  {b.trace:5d}"
            for b in self.buckets
        ]
        return "\n".join(
            lines + [f"  not captured: {size} tokens: {why}" for size, why in self.dropped.items()]
        )


def largest_to_drop(needs: Iterable[int], budget: int) -> list[int]:
    """Needs of the buckets to drop so that the rest fits `budget`.

    Args:
        needs: bytes per bucket, largest bucket first: of it and all smaller ones. Read as far as necessary.
    """
    return list(takewhile(lambda need: need > budget, needs))


@torch.no_grad()
def make_plan(family: Family, sizes: Iterable[int]) -> Plan:
    """Plan `sizes` for all traces of a model (Note [Plan]), and keep the plan as `family.plan`."""
    order = sorted(set(sizes), reverse=True)
    dropped: dict[int, str] = {}
    tried: dict[int, list[PlannedBucket]] = {}

    def need(first: int) -> int:
        tried[first] = _try_out(family, order[first:], dropped)
        return sum(bucket.graph_bytes for bucket in tried[first])

    kept, budget = 0, family.config.max_graph_bytes
    if budget is not None:
        needs = largest_to_drop(map(need, range(len(order))), budget)
        kept = len(needs)
        for size, needed in zip(order, needs, strict=False):
            dropped[size] = CaptureError.over_budget(size, needed, budget)
    buckets = tried[kept] if kept in tried else _try_out(family, order[kept:], dropped)
    family.plan = Plan(tuple(buckets), dropped, tuple(order), len(family.runtimes))
    return family.plan


def current_plan(family: Family, sizes: Iterable[int]) -> Plan:
    """The plan of these sizes; made anew where the latest one is of others, or a trace came since."""
    plan, wanted = family.plan, set(sizes)
    fits = plan is not None and set(plan.sizes) == wanted and plan.traces == len(family.runtimes)
    return plan if plan is not None and fits else make_plan(family, wanted)


def refused(family: Family) -> Mapping[int, str]:
    """Buckets that a budget forbids, with the reason; plans what may be captured and nobody has planned."""
    if family.config.max_graph_bytes is None:
        return {}
    plan = family.plan
    if family.may_capture():
        every = {size for r in family.runtimes if _replays(r) for size in _served(r)}
        plan = current_plan(family, plan.sizes if plan and family.capturing else every)
    return {} if plan is None else plan.dropped


def planned_bytes(runtime: Runtime, bucket: int) -> int | None:
    """What the plan says that `bucket` adds to the pool; None where it says nothing."""
    plan, traces = runtime.family.plan, dict(enumerate(runtime.family.runtimes))
    planned = plan.buckets if plan else ()
    found = (b.graph_bytes for b in planned if b.tokens == bucket and traces.get(b.trace) is runtime)
    return next(found, None)


def _try_out(family: Family, order: Sequence[int], failed: dict[int, str]) -> list[PlannedBucket]:
    """Lay the tapes of these buckets in one trial pool; `failed` gets those that cannot run."""
    traces = [_Trial(number, runtime) for number, runtime in enumerate(family.runtimes) if _replays(runtime)]
    found: list[PlannedBucket] = []
    if not traces:
        return found
    pool = _TrialPool(traces[0].runtime.program.device)
    for size in order:
        for trial in traces:
            if size in _served(trial.runtime):
                try:
                    found.append(trial.run(pool, size))
                except Exception as error:  # whatever it was: a plan of the others is worth having
                    failed[size] = f"cannot be planned: {type(error).__name__}: {error}"
    return found


def _replays(runtime: Any) -> bool:
    return getattr(runtime, "program", None) is not None and runtime.program.blocked is None


def _served(runtime: Any) -> list[int]:
    return [size for size in runtime.sizes if size not in runtime.invalid and size > 0]


class _Trial:
    """One trace with buffers of its own."""

    def __init__(self, number: int, runtime: Any) -> None:
        self.number, self.runtime = number, runtime
        self.inputs: StaticInputs | None = None
        self.buffers = FlatBuffers()
        self.tapes: list[ReplayTape] = []  # a CPU's stand-ins live in them

    def run(self, pool: GraphPool, size: int) -> PlannedBucket:
        program, graphs, owned = self.runtime.program, pool.bytes(), self._owned()
        self.inputs = self.inputs or StaticInputs(program, max(self.runtime.sizes))
        args = _weights(self.runtime)
        verdicts = _expected(program, size, self.runtime.family.verdicts)
        tape = record(program, args, size, pool, self.inputs, self.buffers, verdicts)
        self.tapes.append(tape)
        return PlannedBucket(self.number, size, tape.graphs, pool.bytes() - graphs, self._owned() - owned)

    def _owned(self) -> int:
        return self.buffers.bytes() + (self.inputs.bytes() if self.inputs else 0)


class _TrialPool(GraphPool):
    """Segments run where they would be captured, in memory that goes when the pool does."""

    trial = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        if device.type == "cuda":
            with torch.cuda.device(device):  # a MemPool gives back the memory of the device it was made on
                self._memory = torch.cuda.MemPool()

    def capture(
        self, run: Run, inputs: Sequence[object], *, warm: Sequence[Tensor] | None = None
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        if self._memory is None:
            return super().capture(run, inputs, warm=warm)
        with torch.cuda.device(self._device), torch.cuda.use_mem_pool(self._memory):
            return (lambda: None), run(*inputs)


def _weights(runtime: Any) -> Sequence[Any]:
    """A call's arguments with the weights in their places, and nothing in those of activations."""
    program = runtime.program
    own = [given for given in program.split.inputs if given.constant is None and not given.merged]
    weights = {index: weight() for index, weight in runtime.bound.items()}
    return with_merged([weights.get(index) for index in range(len(own))], program.merge.layouts)


def _expected(program: Program, bucket: int, known: Verdicts) -> Verdicts:
    """Which segments will run unpadded: those settled, seen by looking, or unfit in another bucket."""
    here = {key: fault for key, fault in known.items() if key[1] == bucket}
    if program.unpaddable or probe_size(program, bucket, bucket) is None:
        return here
    unfit = {key: fault for (key, _), fault in known.items() if fault is not None}
    numbers = [s.key for s in program.compiled.segments.values() if s.facts.size_is_a_number]
    unfit |= dict.fromkeys(numbers, "size_is_a_number")
    return {(key, bucket): fault for key, fault in unfit.items()} | here
