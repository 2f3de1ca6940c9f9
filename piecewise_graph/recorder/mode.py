"""The two ways to capture a forward: one graph per segment, or one graph in all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_graph.compiler.program import Program
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.recorder.record import record_segments
from piecewise_graph.recorder.record_full import record_forward
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.recorder.workspace import Workspace

log = logging.getLogger(__name__)

Record = Callable[[Workspace, Sequence[Any], int, "Sequence[Any] | None"], ReplayTape]


@dataclass(frozen=True)
class Mode:
    """PIECEWISE or FULL.

    Attributes:
        name: as reports show it.
        one_graph: splitting ops are captured too, and nothing runs between graphs.
        record: (workspace, arguments, bucket, outputs of a forward at the bucket's size) -> tape.
    """

    name: str
    one_graph: bool
    record: Record

    def unsupported(self, program: Program) -> str | None:
        """Why no forward of the trace can be captured so, or None."""
        if not self.one_graph:
            return None
        if not all(call.op.capturable for call in program.split.op_calls):
            return "op_not_capturable"
        return "mixed_devices" if program.split.has_other_devices else None

    def exact_only(self, program: Program, proofs: PaddingProofs, sizes: Iterable[int]) -> dict[int, str]:
        """Buckets that serve their exact size only, and why, as far as the proofs are known."""
        found = {size: proofs.exact_only(program, size, one_graph=self.one_graph) for size in sizes}
        return {size: reason for size, reason in found.items() if reason is not None}


def record_pieces(
    workspace: Workspace, args: Sequence[Any], bucket: int, at_bucket: Sequence[Any] | None
) -> ReplayTape:
    """One graph per segment; one in all where no op has to stay outside.

    At an exact size torch's own attention need not: no row is padding, and it reads no forward context. A
    decode step with a static cache is one launch then.

    Args:
        args, at_bucket: see `record_forward`.
    """
    if _fits_one_graph(workspace, bucket):
        try:
            return record_forward(workspace, args, bucket, at_bucket)
        except torch.OutOfMemoryError:  # graphs of its segments would take as much
            raise
        except Exception as error:  # whatever it was: its segments may be captured
            log.info("%d tokens: not captured as one graph: %s", bucket, error)
    return record_segments(workspace, args, bucket)


def _fits_one_graph(workspace: Workspace, bucket: int) -> bool:
    """The bucket serves its own size only, and one graph can hold all that a forward of it does."""
    program, proofs = workspace.program, workspace.proofs
    padded = program.token is not None and proofs.exact_only(program, bucket, one_graph=False) is None
    waits = any(segment.facts.host_sync for segment in program.compiled.values())
    alone = program.split.is_cut_at_attention and not program.split.has_other_devices
    return not padded and not waits and alone


PIECEWISE = Mode("piecewise", False, record_pieces)
FULL = Mode("full", True, record_forward)
