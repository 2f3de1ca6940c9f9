"""FULL mode: a forward as one graph, splitting ops included.

Note [What a full graph remembers]
A captured op has read the forward context once, at capture: the addresses of its tensors and every number in
it are part of the graph. So a full graph belongs to the very objects that were in the context then, and keeps
them alive. A replay under other objects would answer for the old ones; it is refused by name.

Note [The padded forward]
A batch that full graphs are captured with describes the bucket's rows, padding included, and so must the rows
that its ops get, whether or not a graph runs them. Calls that no graph serves (the first one of a bucket, one
after a capture that failed) run the segments one by one on padded inputs; a segment that must not be padded
runs on the live rows, its results padded again. Where that is not possible (results that are views of one
another), the forward begins anew at its exact size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.buckets import bucket_for
from piecewise_graph.compiler.program import Program, run_steps
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.recorder.padding import probe_size, run_unpadded
from piecewise_graph.recorder.record import (
    Verdicts,
    capturing,
    input_values,
    is_proven,
    prove,
    unpaddable_sizes,
)
from piecewise_graph.recorder.static_buffers import StaticInputs, narrow
from piecewise_graph.recorder.tape import ReplayTape
from piecewise_graph.sizes import evaluate
from piecewise_graph.splitter.split_graph import Ref, SegmentStep, Size


class CannotPad(Exception):
    """A forward has to begin anew at its exact size. Never reaches a user."""


def full_fault(program: Program) -> str | None:
    """Why no forward of this trace can be one graph, or None."""
    capturable = all(call.op.capturable for call in program.split.op_calls)
    return None if capturable else "op_not_capturable"


def exact_sizes(program: Program, verdicts: Verdicts, sizes: Iterable[int]) -> dict[int, str]:
    """Buckets whose full graph serves their exact size only, and why, as far as is known."""
    keys = [segment.key for segment in program.compiled.segments.values()]
    faults = {size: [program.unpaddable, *(verdicts.get((key, size)) for key in keys)] for size in sizes}
    found = {size: next((why for why in reasons if why), None) for size, reasons in faults.items()}
    return {size: why for size, why in found.items() if why is not None}


def padded_size(program: Program, verdicts: Verdicts, sizes: Sequence[int], num_tokens: int) -> int | None:
    """Rows that ops of an uncaptured forward get where a batch describes a bucket's; None: the live."""
    if program.blocked or full_fault(program) or program.unpaddable or num_tokens == 0:
        return None
    bucket = bucket_for(num_tokens, sizes)
    if bucket in (None, num_tokens):
        return bucket
    return None if unpaddable_sizes(program, verdicts, [bucket]) else bucket


def run_padded(
    program: Program,
    args: Sequence[Any],
    num_tokens: int,
    bucket: int,
    inputs: StaticInputs,
    verdicts: Verdicts,
) -> list[Any]:
    """Run one forward uncaptured at the bucket's size (Note [The padded forward]), proving what is unproven.

    Returns:
        the forward's outputs, padded, in the order of the graph's.

    Raises:
        CannotPad: a segment may not be padded, nor run on live rows by itself.
    """
    inputs.plan(bucket, num_tokens).fill(args)
    static = static_arguments(program, args, bucket, inputs)
    probe = None if program.unpaddable else probe_size(program, num_tokens, bucket)

    def run_segment(step: SegmentStep, segment: CompiledSegment, values: list[Any]) -> Sequence[Tensor]:
        key = segment.key, bucket
        if probe is not None and key not in verdicts:
            prove(program, step, segment, values, probe, bucket, verdicts)
        if num_tokens == bucket or verdicts.get(key, "padding_unproven") is None:
            return segment.at(bucket)(*values)
        if segment.facts.entangled_outputs or not segment.facts.computes:
            raise CannotPad
        return run_unpadded(program, step, segment, values, num_tokens, bucket)

    return run_steps(program, static, program.sizes_at(bucket), run_segment=run_segment)


def record_full(
    program: Program,
    args: Sequence[Any],
    bucket: int,
    pool: GraphPool,
    inputs: StaticInputs,
    verdicts: Verdicts,
    padded: Sequence[Any],
) -> ReplayTape:
    """Capture the whole forward as one graph. Call inside `pool.session()`, after `run_padded`.

    Args:
        padded: what `run_padded` returned for this bucket.
    """
    static = static_arguments(program, args, bucket, inputs)
    slots = [slot for slot in _output_slots(program) if slot >= len(program.split.inputs)]

    def tensors(outputs: Sequence[Any]) -> list[Tensor]:
        pairs = zip(program.split.outputs, outputs, strict=True)
        by_slot = {ref.slot: value for ref, value in pairs if isinstance(ref, Ref)}
        return [by_slot[slot] for slot in slots]

    def forward() -> list[Tensor]:
        return tensors(run_steps(program, static, program.sizes_at(bucket)))

    with capturing(program.device):
        replay, outputs = pool.capture(forward, (), warm=tensors(padded))
    values = input_values(program, args, bucket, inputs)
    aliases = [_torch.weak_alias(output) if output.is_cuda else output for output in outputs]
    return ReplayTape(
        program,
        bucket,
        (replay,),
        values | dict(zip(slots, aliases, strict=True)),
        inputs,
        proven=is_proven(program, verdicts, bucket) and not exact_sizes(program, verdicts, [bucket]),
        unpadded={},
        keep=tuple(values.values()),
        graphs=1,
    )


def static_arguments(program: Program, args: Sequence[Any], bucket: int, inputs: StaticInputs) -> list[Any]:
    """A call's arguments with every activation replaced by its padded static buffer."""
    values, sizes = input_values(program, args, bucket, inputs), program.sizes_at(bucket)
    given = program.split.inputs[: len(args)]
    return [
        sizes[item.symbol] if item.symbol in sizes else values.get(index, args[index])
        for index, item in enumerate(given)
    ]


def _output_slots(program: Program) -> list[int]:
    return list(dict.fromkeys(ref.slot for ref in program.split.outputs if isinstance(ref, Ref)))


def live_rows(
    program: Program, padded: Sequence[Any], args: Sequence[Any], num_tokens: int, inputs: StaticInputs
) -> list[Any]:
    """Outputs of a padded forward as its caller should see them, and owns them."""
    sizes, ours = program.sizes_at(num_tokens), inputs.storages()
    found: list[Any] = []
    for item, value in zip(program.split.outputs, padded, strict=True):
        if isinstance(item, Size):
            found.append(evaluate(item.expr, sizes))
        elif not isinstance(item, Ref):
            found.append(value)
        elif item.slot < len(args):
            found.append(args[item.slot])
        else:
            live = narrow(value, program.split.spec(item.slot), program, num_tokens)
            found.append(live.clone() if _torch.storage_id(live) in ours else live)
    return found
