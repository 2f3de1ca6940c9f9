"""The two ways to capture a forward: one graph per segment, or one graph in all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from piecewise_graph.compiler.program import Program
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.recorder.record import record_segments
from piecewise_graph.recorder.record_full import record_forward
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.recorder.workspace import Workspace

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
        capturable = not self.one_graph or all(call.op.capturable for call in program.split.op_calls)
        return None if capturable else "op_not_capturable"

    def exact_only(self, program: Program, proofs: PaddingProofs, sizes: Iterable[int]) -> dict[int, str]:
        """Buckets that serve their exact size only, and why, as far as the proofs are known."""
        found = {size: proofs.exact_only(program, size, one_graph=self.one_graph) for size in sizes}
        return {size: reason for size, reason in found.items() if reason is not None}


PIECEWISE = Mode("piecewise", False, record_segments)
FULL = Mode("full", True, record_forward)
