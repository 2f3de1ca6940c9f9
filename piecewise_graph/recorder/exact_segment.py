"""A segment that runs between graphs, at the exact size.

Note [Compiled strides]
Inductor compiles a segment for the strides that its inputs have in the trace, as expressions of the token
count, and its code asserts them. The first n tokens of a `[1, heads, bucket, d]` tensor have the strides of
the bucket, not those of n tokens. Such a view is copied to a buffer of the compiled layout before the call,
and back after it where the segment writes it. A view whose strides do not depend on the token count
(`[tokens, heads, d]`) is passed as it is. Every view begins where its buffer does, so alignment is kept; what
is not aligned there, Inductor's code copies by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.recorder.static_buffers import FlatBuffers
from piecewise_graph.sizes import TensorSpec, each_once, same_layout
from piecewise_graph.splitter.split_graph import Ref, SegmentStep


@dataclass(frozen=True)
class ExactSegment:
    """One segment between the graphs of one bucket.

    Attributes:
        specs: of its inputs; None for integers.
        buffers: input index -> where its live rows are laid out; free between calls.
    """

    program: Program
    segment: CompiledSegment
    specs: Sequence[TensorSpec | None]
    buffers: Mapping[int, Tensor]

    @classmethod
    def of(
        cls, program: Program, step: SegmentStep, segment: CompiledSegment, bucket: int, scratch: FlatBuffers
    ) -> ExactSegment:
        """The segment of `step`, with buffers for the inputs whose strides depend on the token count.

        Args:
            scratch: lends the buffers. Give them back when the results have theirs: a result may be a view.
        """
        specs = [program.split.specs[item.slot] if isinstance(item, Ref) else None for item in step.inputs]
        sizes = program.sizes_at(bucket)
        buffers = {
            index: scratch.take(spec, spec.shape_at(sizes), spec.stride_at(sizes), spec.storage_numel(sizes))
            for index, spec in enumerate(specs)
            if spec is not None and spec.strides_vary(program.token)
        }
        return cls(program, segment, specs, buffers)

    def bind(self, *inputs: Any, num_tokens: int) -> Callable[[], Sequence[Tensor]]:
        """The call on `inputs`, views of `num_tokens` live rows, laid out as the code was compiled for."""
        run = self.segment.run
        given, before, after = list(inputs), [], []
        sizes = self.program.sizes_at(num_tokens)
        for index, (spec, live) in enumerate(zip(self.specs, inputs, strict=True)):
            if spec is None or same_layout(live, strides := spec.stride_at(sizes)):
                continue
            shape, buffer = spec.shape_at(sizes), self.buffers.get(index)
            given[index] = spec.empty(sizes) if buffer is None else buffer.as_strided(shape, strides)
            before.append(each_once(given[index], live))
            if index in self.segment.facts.written:
                after.append(each_once(live, given[index]))
        call = partial(run, *given)
        return partial(_surrounded, call, _copies(before), _copies(after)) if before else call


Copies = tuple[list[Tensor], list[Tensor]]


def _copies(pairs: Sequence[tuple[Tensor, Tensor]]) -> Copies:
    return [to for to, _ in pairs], [origin for _, origin in pairs]


def _surrounded(call: Callable[[], Sequence[Tensor]], before: Copies, after: Copies) -> Sequence[Tensor]:
    torch._foreach_copy_(*before)
    results = call()
    if after[0]:
        torch._foreach_copy_(*after)
    return results
