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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.errors import CaptureError
from piecewise_graph.graph_pool import GraphPool, Run, Tensors
from piecewise_graph.ranks.collectives import alone
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.padding import probe_size
from piecewise_graph.recorder.padding_proofs import Key, PaddingProofs, trial_key
from piecewise_graph.recorder.record import record_segments
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.sizes import kept


@dataclass(frozen=True)
class TraceToPlan:
    """One trace, as planning needs it.

    Attributes:
        number: of the trace in pg.explain.
        make_args: a call's arguments, merged weights included; None for activations.
        sizes: the buckets that the trace can serve, ascending.
        largest: its largest bucket; static inputs have room for it.
    """

    number: int
    program: Program
    make_args: Callable[[], Sequence[Any]]
    sizes: Sequence[int]
    largest: int
    proofs: PaddingProofs


@dataclass(frozen=True)
class Plan:
    """What capturing will take. `str()` is for people.

    Attributes:
        buckets: in the order of their capture, largest first.
        dropped: bucket -> why it is not among them: over the budget, or it could not be tried out.
        sizes: the token counts that were asked for, largest first.
        traces: how many the model had then.
        ranks: bytes of graphs and of buffers, by rank; empty where one process runs the model.
    """

    buckets: tuple[BucketRecord, ...]
    dropped: dict[int, str]
    sizes: tuple[int, ...]
    traces: int
    ranks: tuple[tuple[int, int], ...] = ()

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
        lines = [f"{len(self.buckets)} buckets will take {_taken(self.pool_bytes, self.buffer_bytes)}"]
        lines += [f"  rank {rank}: {_taken(*both)}" for rank, both in enumerate(self.ranks)]
        lines += ["  bucket  graphs  pool MiB  buffer MiB  trace"] if self.buckets else []
        lines += [
            f"  {b.tokens:6d}  {b.graphs:6d}  {b.graph_bytes / 2**20:8.1f}  {b.buffer_bytes / 2**20:10.1f}"
            f"  {b.trace:5d}"
            for b in self.buckets
        ]
        return "\n".join(
            lines + [f"  not captured: {size} tokens: {why}" for size, why in self.dropped.items()]
        )


def _taken(pool_bytes: int, buffer_bytes: int) -> str:
    return f"{pool_bytes / 2**20:.1f} MiB of graphs, {buffer_bytes / 2**20:.1f} MiB of buffers"


def largest_to_drop(needs: Iterable[int], budget: int) -> list[int]:
    """Needs of the buckets to drop so that the rest fits `budget`.

    Args:
        needs: bytes per bucket, largest bucket first: of it and all smaller ones. Read as far as necessary.
    """
    return list(takewhile(lambda need: need > budget, needs))


@torch.no_grad()
def make_plan(
    traces: Sequence[TraceToPlan], sizes: Iterable[int], *, budget: int | None, all_traces: int
) -> Plan:
    """Plan `sizes` for the traces of one model (Note [Plan]).

    Args:
        budget: bytes that the graphs may take; the largest buckets that do not fit are dropped.
        all_traces: how many traces the model has, those that are never captured included.
    """
    order = sorted(set(sizes), reverse=True)
    dropped: dict[int, str] = {}
    tried: dict[int, list[BucketRecord]] = {}

    def need(first: int) -> int:
        tried[first] = _try_out(traces, order[first:], dropped)
        return sum(bucket.graph_bytes for bucket in tried[first])

    left_out = 0
    if budget is not None:
        needs = largest_to_drop(map(need, range(len(order))), budget)
        left_out = len(needs)
        for size, needed in zip(order, needs, strict=False):
            dropped[size] = CaptureError.over_budget(size, needed, budget)
    buckets = tried[left_out] if left_out in tried else _try_out(traces, order[left_out:], dropped)
    return Plan(tuple(buckets), dropped, tuple(order), all_traces)


def _try_out(
    traces: Sequence[TraceToPlan], order: Sequence[int], failed: dict[int, str]
) -> list[BucketRecord]:
    """Lay the tapes of these buckets in one trial pool; `failed` gets those that cannot run."""
    found: list[BucketRecord] = []
    if not traces:
        return found
    pool = _TrialPool(traces[0].program.device)
    trials = [_TrialTrace(trace, pool) for trace in traces]
    for size in order:
        for trial in trials:
            if size in trial.trace.sizes:
                try:
                    with alone():
                        found.append(trial.run(size))
                except Exception as error:  # the plan of the other buckets is still worth having
                    failed[size] = CaptureError.not_planned(error)
    return found


class _TrialTrace:
    """One trace with buffers of its own."""

    def __init__(self, trace: TraceToPlan, pool: GraphPool) -> None:
        self.trace = trace
        self._proofs = PaddingProofs()
        self._workspace = Workspace.empty(trace.program, pool, self._proofs, trace.largest)
        self._tapes: list[ReplayTape] = []  # a CPU's stand-ins live in them

    def run(self, size: int) -> BucketRecord:
        workspace, trace = self._workspace, self.trace
        graphs, owned = workspace.pool.bytes(), workspace.bytes()
        for key, reason in _expected(trace, size).items():
            self._proofs.add(key, reason)
        tape = record_segments(workspace, trace.make_args(), size, ops_run=False)
        self._tapes.append(tape)
        return BucketRecord(
            size,
            tape.graphs,
            workspace.pool.bytes() - graphs,
            trace=trace.number,
            buffer_bytes=workspace.bytes() - owned,
        )


class _TrialPool(GraphPool):
    """Segments run where they would be captured, in memory that goes when the pool does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        if device.type == "cuda":
            with torch.cuda.device(device):  # a MemPool gives back the memory of the device it was made on
                self._memory = torch.cuda.MemPool()

    def capture(
        self, run: Run, inputs: Sequence[object], *, warm: Tensors | None = None, written: Tensors = ()
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        if self._memory is None:
            return super().capture(run, inputs, warm=warm, written=written)
        with kept(written), torch.cuda.device(self._device), torch.cuda.use_mem_pool(self._memory):
            return (lambda: None), run(*inputs)


def _expected(trace: TraceToPlan, bucket: int) -> dict[Key, str | None]:
    """What trials found or will find: those settled, seen by looking, or unfit in another bucket."""
    program, here = trace.program, trace.proofs.at(bucket)
    if program.unpaddable or probe_size(program, bucket, bucket) is None:
        return here
    expected: dict[Key, str | None] = {}
    unfit = trace.proofs.failed()
    for step in program.split.segments:
        key, segment = trial_key(program, step, bucket), program.compiled[step.index]
        if key is not None and segment.key in unfit:
            expected[key] = unfit[segment.key]
        elif key is not None and step.index in program.unproved and segment.facts.size_is_a_number:
            expected[key] = "size_is_a_number"
    return expected | here
