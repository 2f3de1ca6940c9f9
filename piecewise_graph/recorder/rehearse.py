"""One uncaptured forward before a capture: it answers the call, proves padding, and warms the kernels up.

Note [Rehearsal]
A capture executes nothing, so it needs no live data, but three things must have happened before it: the code
of every segment ran once (it may compile, time and load kernels then), every distinct segment was shown to
tolerate padding, and every splitting op did what its schema says. The rehearsal does all three in one
forward. Splitting ops run exactly once in it, so that a KV cache is not written twice. The outputs of the
rehearsal are the answer of the call.

Once that is done for one bucket of a trace, others are captured at once, and the call is answered by the
first replay. So are the graphs of a second static KV cache, of which a trace of fixed sizes has its own. What
is new in them is loaded in the capture (cuBLAS has kernels for each size); where a capture does not bear
that, it fails, and the bucket is rehearsed and captured again.

Note [The padded forward]
A batch prepared for full graphs describes all rows of the bucket, padding included. Its ops therefore always
receive padded rows, even when no graph runs: at the first call of a bucket, or after a failed capture. Such a
call runs the segments one by one on padded inputs. A segment that must not be padded runs on the live rows,
and its results are padded again. Where that is impossible (results that are views of one another), the
forward begins anew at its exact size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program, as_returned, run_steps
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.errors import SplittingOpError
from piecewise_graph.ranks.collectives import alone
from piecewise_graph.recorder.padding import UNPROVEN, Trial, padding_reason, probe_size
from piecewise_graph.recorder.padding_proofs import trial_key
from piecewise_graph.recorder.static_buffers import narrow
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.sizes import overwrite
from piecewise_graph.splitter.split_graph import Opaque, OpCall, Ref, SegmentStep, Size
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments
from piecewise_graph.telemetry import counters

# A larger argument (a whole KV cache) is not cloned to see whether an op wrote it.
_WATCHED_BYTES = 256 * 2**20

Prove = Callable[[SegmentStep, CompiledSegment, list[Any]], bool]


@dataclass(frozen=True)
class Rehearsal:
    """What one uncaptured forward returned.

    Attributes:
        outputs: at the call's size, owned by the caller.
        at_bucket: the same at the bucket's size; None where no forward of that size ran.
        samples: what one segment of each structure was given, by the structure's key; copies, weights apart.
    """

    outputs: list[Any]
    at_bucket: Sequence[Any] | None
    samples: Mapping[str, Sequence[Any]]


def is_rehearsed(workspace: Workspace, bucket: int) -> bool:
    """Once a forward was rehearsed: all code that a graph of `bucket` would hold has run and was tried."""
    program = workspace.program
    if program.token is None:
        return True  # there is one size, and no padding
    computing = [step for step in program.split.segments if program.compiled[step.index].facts.computes]
    keys = [trial_key(program, step, bucket) for step in computing if step.padded]
    return all(key is not None and key in workspace.proofs for key in keys)


class _CannotPad(Exception):
    """The forward has to begin anew at its exact size. Never reaches a user."""


def rehearse(
    workspace: Workspace, args: Sequence[Any], num_tokens: int, bucket: int, *, padded: bool, watch_ops: bool
) -> Rehearsal:
    """Run one forward uncaptured, proving and warming what `bucket` needs (Note [Rehearsal]).

    Args:
        padded: splitting ops get the bucket's rows; only where it `pads`.
        watch_ops: see whether splitting ops write what they do not declare, and keep samples (once per trace
            is enough).

    Raises:
        SplittingOpError: an op broke its schema's or its fake's promise.
    """
    counters.add("rehearsals")
    samples = _Samples(workspace.program, wanted=watch_ops)
    at_bucket = run_padded(workspace, args, num_tokens, bucket, samples) if padded else None
    if at_bucket is not None:
        return Rehearsal(live_rows(workspace, at_bucket, args, num_tokens), at_bucket, samples.taken)
    outputs = _run_exact(workspace, args, num_tokens, bucket, watch_ops, samples)
    return Rehearsal(outputs, outputs if num_tokens == bucket else None, samples.taken)


class _Samples:
    """Copies of what one segment of each structure is given, beside the weights."""

    def __init__(self, program: Program, wanted: bool) -> None:
        self._program, self._wanted = program, wanted
        self.taken: dict[str, Sequence[Any]] = {}

    def take(self, step: SegmentStep, segment: CompiledSegment, given: Sequence[Any]) -> None:
        if self._wanted and segment.facts.computes and segment.key not in self.taken:
            self.taken[segment.key] = [
                value.clone()
                if isinstance(value, Tensor) and self._may_change(item, place, segment)
                else value
                for place, (item, value) in enumerate(zip(step.inputs, given, strict=True))
            ]

    def _may_change(self, item: Ref | Size | Opaque, place: int, segment: CompiledSegment) -> bool:
        inputs = self._program.split.inputs
        is_weight = isinstance(item, Ref) and item.slot < len(inputs) and inputs[item.slot].bound
        return not is_weight or place in segment.facts.written


def pads(workspace: Workspace, num_tokens: int, bucket: int) -> bool:
    """Splitting ops of an uncaptured forward can get the bucket's rows (Note [The padded forward])."""
    program = workspace.program
    exact_only = workspace.proofs.exact_only(program, bucket, one_graph=False)
    return not program.unpaddable and (bucket == num_tokens or exact_only is None)


def run_padded(
    workspace: Workspace, args: Sequence[Any], num_tokens: int, bucket: int, samples: _Samples | None = None
) -> Sequence[Any] | None:
    """Run one forward uncaptured at the bucket's size (Note [The padded forward]).

    Args:
        samples: takes some of what segments are given.

    Returns:
        the padded outputs in the order of the graph's; None where the forward has to begin anew at its exact
        size.
    """
    program, proofs = workspace.program, workspace.proofs
    workspace.inputs.copies(bucket, num_tokens).fill(args)
    prove = _prover(workspace, num_tokens, bucket)

    def run_segment(step: SegmentStep, segment: CompiledSegment, values: list[Any]) -> Sequence[Tensor]:
        prove(step, segment, values)
        if samples is not None:
            samples.take(step, segment, values)
        if num_tokens == bucket or proofs.is_harmless(program, step, bucket):
            return segment.at(bucket)(*values)
        if step.padded and (segment.facts.entangled_outputs or not segment.facts.computes):
            raise _CannotPad
        return _run_on_live_rows(Trial(program, step, segment, num_tokens, bucket), values)

    try:
        return run_steps(
            program,
            workspace.static_arguments(args, bucket),
            program.sizes_at(bucket),
            run_segment=run_segment,
        )
    except _CannotPad:
        return None


def live_rows(workspace: Workspace, padded: Sequence[Any], args: Sequence[Any], num_tokens: int) -> list[Any]:
    """Outputs of a padded forward at the call's size, owned by the caller."""
    program = workspace.program
    sizes, ours = program.sizes_at(num_tokens), workspace.inputs.storages()

    def live(slot: int, value: Any) -> Any:
        rows = narrow(value, program.split.spec(slot), program, num_tokens)
        return rows.clone() if _torch.storage_id(rows) in ours else rows

    return as_returned(program, padded, args, sizes, live)


def _run_exact(
    workspace: Workspace,
    args: Sequence[Any],
    num_tokens: int,
    bucket: int,
    watch_ops: bool,
    samples: _Samples,
) -> list[Any]:
    program, proofs = workspace.program, workspace.proofs
    prove = _prover(workspace, num_tokens, bucket)
    warmed: set[str] = set()

    def run_segment(step: SegmentStep, segment: CompiledSegment, inputs: list[Any]) -> Sequence[Tensor]:
        tried = prove(step, segment, inputs)
        samples.take(step, segment, inputs)
        cold = num_tokens < bucket and segment.facts.computes and segment.key not in warmed
        if cold and not tried and proofs.reason(program, step, bucket) is None:
            with alone():
                Trial(program, step, segment, num_tokens, bucket).warm_up(inputs)
        warmed.add(segment.key)
        return segment.at(num_tokens)(*inputs)

    run_op = _watched_op if watch_ops else None
    return run_steps(program, args, program.sizes_at(num_tokens), run_segment=run_segment, run_op=run_op)


def _prover(workspace: Workspace, num_tokens: int, bucket: int) -> Prove:
    """What settles, segment by segment, whether padding to `bucket` is harmless; says whether it ran it."""
    program, proofs = workspace.program, workspace.proofs
    probe = None if program.unpaddable else probe_size(program, num_tokens, bucket)

    def prove(step: SegmentStep, segment: CompiledSegment, inputs: list[Any]) -> bool:
        key, proved = trial_key(program, step, bucket), step.index not in program.unproved
        if probe is None or key is None or key in proofs or (proved and not segment.facts.computes):
            return False
        trial = Trial(program, step, segment, probe, bucket)
        try:
            with alone():
                reason = padding_reason(trial, inputs, proved=proved)
        except (RuntimeError, ValueError, IndexError, AssertionError):
            # The model cannot run at this size (a batch norm of one row). The caller did nothing wrong.
            reason = "proof_failed"
        found = program.ranks.answers(f"try the padding of segment {step.index} to {bucket} tokens", reason)
        reason = next(filter(None, found), None)
        if reason != UNPROVEN:
            proofs.add(key, reason)
        return True

    return prove


def _run_on_live_rows(trial: Trial, inputs: Sequence[Any]) -> list[Tensor]:
    """Run a segment on the live rows of padded inputs, and pad its results with zeros.

    What it writes in place reaches `inputs`. Its outputs have to be no views of one another.
    """
    program, num_tokens, bucket = trial.program, trial.size, trial.bucket
    live, exact, results = trial.run_exact(inputs)
    for index in trial.segment.facts.written:
        overwrite(live[index], exact[index])
    padded = [spec.empty(program.sizes_at(bucket)).zero_() for spec in trial.outputs]
    for spec, rows, result in zip(trial.outputs, padded, results, strict=True):
        overwrite(narrow(rows, spec, program, num_tokens), result)
    return padded


def _watched_op(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a splitting op and see that it writes nothing but what its schema declares."""
    declared = written_arguments(call.target)
    named = list(bind_arguments(call.target, args, kwargs))
    shared = {_torch.storage_id(v) for name, v in named if name in declared and isinstance(v, Tensor)}
    watched = {
        name: (value, value.clone())
        for name, value in named
        if isinstance(value, Tensor)
        and _torch.storage_id(value) not in shared
        and value.nbytes <= _WATCHED_BYTES
    }
    result = call.target(*args, **kwargs)
    for name, (value, before) in watched.items():
        if not _unchanged(value, before):
            raise SplittingOpError.undeclared_write(call.op.name, name)
    return result


def _unchanged(value: Tensor, before: Tensor) -> bool:
    """The same numbers, and NaN in the same places."""
    if torch.equal(value, before):
        return True
    return bool(((value == before) | ((value != value) & (before != before))).all())
