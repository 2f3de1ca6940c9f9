"""Program x bucket -> ReplayTape: the whole forward as one graph, splitting ops included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import run_steps
from piecewise_graph.graph_pool import clean_cublas
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.splitter.split_graph import Ref


def record_forward(
    workspace: Workspace, args: Sequence[Any], bucket: int, at_bucket: Sequence[Any] | None
) -> ReplayTape:
    """Capture the whole forward. Call inside `pool.session()`, after a rehearsal at the bucket's size.

    Args:
        args: the call's arguments; only bound ones (weights) are used.
        at_bucket: outputs of the rehearsal at the bucket's size; a CPU's stand-in begins with them.
    """
    program, proofs = workspace.program, workspace.proofs
    static = workspace.static_arguments(args, bucket)
    slots = {ref.slot: None for ref in program.split.outputs if isinstance(ref, Ref)}
    made = [slot for slot in slots if slot >= len(program.split.inputs)]

    def tensors(outputs: Sequence[Any]) -> list[Tensor]:
        pairs = zip(program.split.outputs, outputs, strict=True)
        by_slot = {ref.slot: value for ref, value in pairs if isinstance(ref, Ref)}
        return [by_slot[slot] for slot in made]

    def forward() -> list[Tensor]:
        return tensors(run_steps(program, static, program.sizes_at(bucket)))

    with clean_cublas(program.device):
        warm = None if at_bucket is None else tensors(at_bucket)
        written = [static[index] for index in program.static_writes]
        replay, outputs = workspace.pool.capture(forward, (), warm=warm, written=written)
    values = workspace.input_values(args, bucket)
    aliases = [_torch.weak_alias(output) if output.is_cuda else output for output in outputs]
    padded = proofs.exact_only(program, bucket, one_graph=True) is None
    return ReplayTape(
        program,
        bucket,
        (replay,),
        values | dict(zip(made, aliases, strict=True)),
        workspace.inputs,
        proven=padded and proofs.complete(program, bucket),
        unpadded={},
        keep=tuple(values.values()),
        graphs=1,
    )
