"""The proof that padding cannot change live rows.

Note [Proof instead of analysis]
Whether a segment mixes tokens cannot be read off its ops: a cumsum along the token dimension is harmless
to live rows, `x[:, -1:]` is not, `x / T` depends on the padded size alone. So each distinct segment is
run three times on the first live inputs it sees: at an exact size k, and padded from k to the bucket with
two different tails. Live rows must agree. The tails: NaN, which reaches whatever it touches; then values
drawn from live rows, scaled. Integers and booleans are always drawn from live values, because an illegal
index would kill a CUDA context, and so are floats where the segment casts floats to integers. k is at
most half the bucket, so that a dependence on the size itself shows as a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler import CompiledSegment
from piecewise_graph.program import Program
from piecewise_graph.shapes import TensorSpec, evaluate, overwrite
from piecewise_graph.split_graph import Ref, SegmentStep
from piecewise_graph.static_inputs import narrow

MakeTail = Callable[[Tensor], Tensor]

# Relative to the largest live value: how far two runs may differ by rounding (another tile shape,
# another order of expert tokens). A leak of NaN, or of the size, is far above.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def probe_size(program: Program, num_tokens: int, bucket: int) -> int | None:
    """A token count below `bucket` at which the trace is valid; None where there is none to try."""
    low = program.contract.ranges[0][0] if program.contract.ranges else 1
    for size in (max(low, bucket // 2), num_tokens):
        fits = 0 < size < bucket and size <= num_tokens
        if fits and program.contract.size_violation(program.sizes_at(size)) is None:
            return size
    return None


def padding_fault(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    inputs: Sequence[Any],
    size: int,
    bucket: int,
) -> str | None:
    """Why `segment` must not be padded from `size` to `bucket`; None when live rows agree.

    Args:
        inputs: its live inputs, of at least `size` tokens.
    """
    outputs = [program.split.specs[slot] for slot in step.outputs]
    if any(
        spec is not None and spec.is_derived(program.token) for spec in [*_specs(program, step), *outputs]
    ):
        return "derived_size"
    expected = segment.run(*_resized(program, step, segment, inputs, size, size, _copies))
    for make_tail in (_copies,) if segment.facts.floats_become_integers else (_nans, _scaled_copies):
        padded = segment.run(*_resized(program, step, segment, inputs, size, bucket, make_tail))
        for spec, want, got in zip(outputs, expected, padded, strict=True):
            assert spec is not None
            if not agree(want, narrow(got, spec, program, size)):
                return "mixes_tokens"
    return None


def warm_up(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    inputs: Sequence[Any],
    num_tokens: int,
    bucket: int,
) -> None:
    """Run a segment once at the bucket's size, so that its capture loads and allocates nothing new."""
    segment.run(*_resized(program, step, segment, inputs, num_tokens, bucket, _copies))


def agree(want: Tensor, got: Tensor) -> bool:
    """Equal within rounding; what is not finite must be so in both."""
    if want.shape != got.shape or want.dtype not in TOLERANCE:
        return torch.equal(want, got)
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return False
    want, difference = want[finite].double(), want[finite].double() - got[finite].double()
    if want.numel() == 0:
        return True
    return bool(difference.abs().max() <= TOLERANCE[got.dtype] * want.abs().max().clamp(min=1e-6))


def _specs(program: Program, step: SegmentStep) -> list[TensorSpec | None]:
    return [program.split.specs[item.slot] for item in step.inputs if isinstance(item, Ref)]


def _resized(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    inputs: Sequence[Any],
    live: int,
    size: int,
    make_tail: MakeTail,
) -> list[Any]:
    """A segment's inputs with the first `live` tokens, padded to `size`."""
    resized: list[Any] = []
    for index, (item, value) in enumerate(zip(step.inputs, inputs, strict=True)):
        if not isinstance(item, Ref):
            resized.append(evaluate(item.expr, program.sizes_at(size)))
            continue
        spec = program.split.specs[item.slot]
        assert spec is not None
        if spec.token_dims(program.token):
            grown = _grow(narrow(value, spec, program, live), spec, program, size - live, make_tail)
            resized.append(spec.empty(program.sizes_at(size)))
            overwrite(resized[-1], grown)
        else:
            resized.append(value.clone() if index in segment.facts.written else value)
    return resized


def _grow(tensor: Tensor, spec: TensorSpec, program: Program, extra: int, make_tail: MakeTail) -> Tensor:
    """Append `extra` rows made from live ones in every token dimension."""
    for dim in spec.token_dims(program.token) if extra else ():
        rows = torch.arange(extra, device=tensor.device) % tensor.shape[dim]
        tail = make_tail(tensor.index_select(dim, rows.flip(0)))
        tensor = torch.cat([tensor, tail], dim)
    return tensor


def _copies(rows: Tensor) -> Tensor:
    return rows


def _nans(rows: Tensor) -> Tensor:
    return rows.fill_(float("nan")) if rows.is_floating_point() else rows


def _scaled_copies(rows: Tensor) -> Tensor:
    return rows * -3.0 + 1.0 if rows.is_floating_point() else rows
