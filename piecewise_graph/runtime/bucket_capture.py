"""The capture of one bucket: the call is answered uncaptured, and its bucket recorded along the way."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecewise_graph.context import ForwardContext
from piecewise_graph.errors import CaptureError
from piecewise_graph.recorder.bucket_record import BucketRecord
from piecewise_graph.recorder.padding import UNPROVEN
from piecewise_graph.recorder.rehearse import rehearse
from piecewise_graph.recorder.uncapturable import uncapturable_nodes
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.runtime.captured_context import CapturedContext
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
    planned: int | None,
) -> Outcome:
    """Answer a call of `num_tokens` tokens and record `bucket` in the mode of `tapes`.

    Args:
        context: of the call. A full graph is captured for the objects in it.
        padded, watch_ops: see `rehearse`.
        planned: bytes that pg.plan expects; None where it says nothing.
    """
    before, began = workspace.pool.bytes(), time.perf_counter()
    with workspace.pool.session():
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
            found = uncapturable_nodes(workspace.program, rehearsal.samples)
            return Outcome(rehearsal.outputs, failure=CaptureError.failed(error), uncapturable=found)
    held_now = workspace.pool.bytes()
    record = BucketRecord(
        bucket,
        tape.graphs,
        held_now - before,
        mode=tapes.name,
        seconds=time.perf_counter() - began,
        planned_bytes=planned,
        unpadded=dict(tape.unpadded),
        pool_bytes=held_now,
    )
    log.info(
        "captured %d tokens, %s: %d graphs, %d bytes, %.1f ms", bucket, tapes.name, tape.graphs,
        record.graph_bytes, record.seconds * 1e3,
    )  # fmt: skip
    return Outcome(rehearsal.outputs, captured=CapturedBucket(tape, record, held))


def _exact_only(workspace: Workspace, tapes: TapeSet, bucket: int) -> str | None:
    """Why `bucket` would serve its exact size only."""
    program, proofs = workspace.program, workspace.proofs
    reason = tapes.mode.exact_only(program, proofs, [bucket]).get(bucket)
    return UNPROVEN if reason is None and not proofs.complete(program, bucket) else reason
