"""WithoutGraphs: how calls of one trace are answered by its compiled segments and ops, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecewise_graph.compiler.program import in_layout, run_steps
from piecewise_graph.context import ForwardContext
from piecewise_graph.kernels.early_reads import written
from piecewise_graph.recorder.rehearse import live_rows, pads, rehearse, run_padded
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.runtime.captured_context import check_tokens
from piecewise_graph.runtime.dispatch import bucket_of
from piecewise_graph.sizes import Sizes


class Rehearsals:
    """Of one program: it has one runtime per static KV cache, and what one has shown holds for the next.

    Attributes:
        done: a forward has shown what captures rely on (Note [Rehearsal] in recorder/rehearse.py).
    """

    done = False


class WithoutGraphs:
    """Runs forwards of one trace without graphs.

    Args:
        buckets: ascending.
        invalid: those that the trace is not valid for.
        not_full: why no forward of the trace can be one graph, or None.
        rehearsals: of the workspace's program.
    """

    def __init__(
        self,
        workspace: Workspace,
        buckets: Sequence[int],
        invalid: frozenset[int],
        not_full: str | None,
        rehearsals: Rehearsals,
    ) -> None:
        self._workspace, self._program = workspace, workspace.program
        self._buckets, self._invalid, self._not_full = buckets, invalid, not_full
        self.rehearsals = rehearsals

    def run(
        self, args: Sequence[Any], sizes: Sizes, num_tokens: int, reason: str, context: ForwardContext
    ) -> list[Any]:
        """A call's outputs.

        Args:
            args: of the call, in the order of Dynamo's graph.
            reason: why no graph serves it.

        Raises:
            SplittingOpError: see `rehearse`, `run_steps`.
            RankError: an earlier sum over ranks has waited in vain.
        """
        program, workspace = self._program, self._workspace
        program.ranks.check()
        laid_out = in_layout(program, args, sizes)
        # Inside of the caller's own capture nothing may be proven: a proof waits for the device.
        looks = reason != "captured_by_caller"
        bucket = bucket_of(num_tokens, self._buckets, self._invalid) if looks else None
        if bucket is not None and self.pads(num_tokens, bucket, context):
            padded = run_padded(workspace, laid_out, num_tokens, bucket)
            if padded is not None:
                return live_rows(workspace, padded, laid_out, num_tokens)
        if bucket is not None and reason == "not_captured" and not self.rehearsals.done:
            return self._rehearsal(laid_out, num_tokens, bucket)
        with written(program.written_tensors(laid_out)):
            return run_steps(program, laid_out, sizes)

    def _rehearsal(self, laid_out: Sequence[Any], num_tokens: int, bucket: int) -> list[Any]:
        """The first forward of a trace that pg.capture will capture: the capture need not run one."""
        found = rehearse(self._workspace, laid_out, num_tokens, bucket, padded=False, watch_ops=True)
        self.rehearsals.done = True
        return found.outputs

    def pads(self, num_tokens: int, bucket: int, context: ForwardContext) -> bool:
        """An uncaptured forward runs on padded rows, because its batch describes them."""
        cannot = self._not_full or self._program.blocked or num_tokens == 0
        if cannot or not context.full_graph or not pads(self._workspace, num_tokens, bucket):
            return False
        check_tokens(context, num_tokens)
        return True
