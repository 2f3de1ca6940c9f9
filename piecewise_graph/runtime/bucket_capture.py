"""The capture of one bucket: its call is answered, and the bucket recorded along the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecewise_graph.context import ForwardContext
from piecewise_graph.errors import CaptureError
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.kernels.early_reads import unwritten
from piecewise_graph.ranks.exchange import Ranks
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.padding import UNPROVEN
from piecewise_graph.recorder.rehearse import is_rehearsed, rehearse
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.recorder.uncapturable import uncapturable_nodes
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.runtime.captured_context import CapturedContext, unwritten_in_forward
from piecewise_graph.runtime.replay import CapturedBucket
from piecewise_graph.runtime.tapes import TapeSet

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What became of the capture; exactly one of the last three is set.

    Attributes:
        outputs: the call's answer, whatever became of the capture.
        captured: the bucket.
        reason: why the bucket is not captured for this size: it would have to be padded.
        failure: what went wrong; it costs this bucket, not the call.
        uncapturable: names of the trace's nodes that made it fail, as far as they are known, and why.
    """

    outputs: list[Any]
    captured: CapturedBucket | None = None
    reason: str | None = None
    failure: str | None = None
    uncapturable: Mapping[str, str] = field(default_factory=dict)


def on_all_ranks(ranks: Ranks, bucket: int, capture: Callable[[], Outcome]) -> Outcome:
    """The outcome of `capture`, or a failure of the bucket where that of another rank is not the same.

    Raises:
        RankError: the ranks capture other buckets, or one of them failed to answer the call; all raise.
    """
    ranks.same("which bucket to capture", bucket)
    with ranks.together(f"capture {bucket} tokens", sums=True):
        outcome = capture()
    kind = outcome.reason or ("failed" if outcome.failure is not None else "captured")
    answers = ranks.answers(f"end the capture of {bucket} tokens", (kind, outcome.failure or kind))
    if all(other == kind for other, _ in answers):
        return outcome
    return Outcome(outcome.outputs, failure=CaptureError.on_another_rank([told for _, told in answers]))


def capture_bucket(
    workspace: Workspace,
    tapes: TapeSet,
    args: Sequence[Any],
    num_tokens: int,
    bucket: int,
    context: ForwardContext,
    *,
    padded: bool,
    watch_ops: bool,
    rehearsed: bool,
    planned: int | None,
) -> Outcome:
    """Answer a call of `num_tokens` tokens and record `bucket` in the mode of `tapes`.

    Args:
        context: of the call. A full graph is captured for the objects in it.
        padded, watch_ops: see `rehearse`.
        rehearsed: a forward of the trace was a rehearsal.
        planned: bytes that pg.plan expects; None where it says nothing.
    """
    program = workspace.program
    measured = _Measured(workspace.pool, tapes, planned)
    read = [tensor for _, tensor in program.bound_arguments(args)]
    if tapes.mode.one_graph:
        read += unwritten_in_forward(context)
    with workspace.pool.session(), unwritten(read, but=program.written_tensors(args)):
        if rehearsed and not (padded or tapes.mode.one_graph) and is_rehearsed(workspace, bucket):
            tape = _recorded_unrehearsed(workspace, tapes, args, num_tokens, bucket)
            made_on_all = program.ranks.all(f"capture {bucket} tokens without a rehearsal", tape is not None)
            if tape is not None and made_on_all:
                captured = CapturedBucket(tape, measured.record(tape), None)
                return Outcome(tape.run_first(args, num_tokens), captured=captured)
        rehearsal = rehearse(workspace, args, num_tokens, bucket, padded=padded, watch_ops=watch_ops)
        reason = _exact_only(workspace, tapes, bucket)
        if reason is not None and bucket != num_tokens:
            return Outcome(rehearsal.outputs, reason=reason)
        try:
            held = CapturedContext.of(context) if tapes.mode.one_graph else None
            tape = tapes.mode.record(workspace, args, bucket, rehearsal.at_bucket)
        except torch.OutOfMemoryError as error:
            failure = CaptureError.out_of_memory(bucket, str(error), planned)
            return Outcome(rehearsal.outputs, failure=failure)
        except Exception as error:  # whatever it was: the call itself has its answer
            # The search runs segments, collectives included, which another rank may have no reason for.
            found = {} if program.ranks.several else uncapturable_nodes(program, rehearsal.samples)
            return Outcome(rehearsal.outputs, failure=CaptureError.failed(error), uncapturable=found)
    return Outcome(rehearsal.outputs, captured=CapturedBucket(tape, measured.record(tape), held))


def _recorded_unrehearsed(
    workspace: Workspace, tapes: TapeSet, args: Sequence[Any], num_tokens: int, bucket: int
) -> ReplayTape | None:
    """The tape of a bucket whose code has run in other buckets; None where it has to be rehearsed."""
    if bucket != num_tokens and _exact_only(workspace, tapes, bucket) is not None:
        return None
    try:
        return tapes.mode.record(workspace, args, bucket, None)
    except Exception as error:  # whatever it was: nothing has run yet, and a rehearsal may avoid it
        log.info("%d tokens are captured again, after a rehearsal: %s", bucket, error)
        return None


class _Measured:
    """What a capture takes, from here on."""

    def __init__(self, pool: GraphPool, tapes: TapeSet, planned: int | None) -> None:
        self._pool, self._tapes, self._planned = pool, tapes, planned
        self._bytes, self._began = pool.bytes(), time.perf_counter()

    def record(self, tape: ReplayTape) -> BucketRecord:
        """The record of a capture that ended now."""
        held = self._pool.bytes()
        record = BucketRecord(
            tape.bucket,
            tape.graphs,
            held - self._bytes,
            mode=self._tapes.name,
            seconds=time.perf_counter() - self._began,
            planned_bytes=self._planned,
            unpadded=dict(tape.unpadded),
            pool_bytes=held,
        )
        log.info(
            "captured %d tokens, %s: %d graphs, %d bytes, %.1f ms", tape.bucket, self._tapes.name,
            tape.graphs, record.graph_bytes, record.seconds * 1e3,
        )  # fmt: skip
        return record


def _exact_only(workspace: Workspace, tapes: TapeSet, bucket: int) -> str | None:
    """Why `bucket` would serve its exact size only."""
    program, proofs = workspace.program, workspace.proofs
    reason = tapes.mode.exact_only(program, proofs, [bucket]).get(bucket)
    return UNPROVEN if reason is None and not proofs.complete(program, bucket) else reason
