"""The proof that padding cannot change live rows.

Note [Proof instead of analysis]
Whether a segment mixes tokens cannot be read off its ops: a cumsum along the token dimension is harmless
to live rows, `x[:, -1:]` is not, `x / T` depends on the padded size alone. So each distinct segment is run
at an exact size k, and padded from k to the bucket with two different tails; live rows must agree. The
tails: NaN, which reaches whatever it touches, and scaled copies of live rows. k is at most half the bucket,
so that a dependence on the size itself shows as a factor of two.

All of that is done twice. Once on the first live inputs that the segment sees. They may hide a dependence
(zeros divided by T, equal rows averaged, a gate that is still zero), so once more with every float, weights
included, drawn at random. Integers and booleans are only ever drawn from the range of live values, because
an illegal index would kill a CUDA context; for the same reason floats stay live where the segment casts
floats to integers. Where that leaves nothing to tell rows apart (all ids are 0), nothing is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler import CompiledSegment
from piecewise_graph.program import Program
from piecewise_graph.shapes import TensorSpec, evaluate, overwrite
from piecewise_graph.split_graph import Ref, SegmentStep, Size
from piecewise_graph.static_inputs import narrow

MakeTail = Callable[[Tensor], Tensor]

# Relative to the largest live value: how far two runs may differ by rounding (another tile shape,
# another order of expert tokens). A leak of NaN, or of the size, is far above.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class Unproven(Exception):
    """The inputs at hand prove nothing about padding. Never reaches a user."""


def probe_size(program: Program, num_tokens: int, bucket: int) -> int | None:
    """A token count below `bucket` at which the trace is valid; None where there is none to try."""
    low = program.contract.ranges[0][0] if program.contract.ranges else 1
    for size in (max(low or 1, bucket // 2), num_tokens):
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

    Raises:
        Unproven: the live inputs cannot tell one row from another.
    """
    trial = _Trial(program, step, segment, size, bucket)
    if trial.has_derived_sizes():
        return "derived_size"
    live = trial.narrowed(inputs)
    synthetic = trial.synthetic(live)
    return trial.fault(live) or trial.fault(synthetic)


def warm_up(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    inputs: Sequence[Any],
    num_tokens: int,
    bucket: int,
) -> None:
    """Run a segment once at the bucket's size, so that its capture loads and allocates nothing new."""
    trial = _Trial(program, step, segment, num_tokens, bucket)
    segment.run(*trial.padded(trial.narrowed(inputs), bucket, _copies))


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


class _Trial:
    """One segment, run at `size` tokens and padded from there to `bucket`."""

    def __init__(
        self, program: Program, step: SegmentStep, segment: CompiledSegment, size: int, bucket: int
    ) -> None:
        self.program, self.step, self.segment = program, step, segment
        self.size, self.bucket = size, bucket
        specs = program.split.specs
        self.specs = [specs[item.slot] if isinstance(item, Ref) else None for item in step.inputs]
        self.outputs = [specs[slot] for slot in step.outputs]

    def has_derived_sizes(self) -> bool:
        return any(
            spec is not None and spec.is_derived(self.program.token) for spec in self.specs + self.outputs
        )

    def fault(self, values: Sequence[Any]) -> str | None:
        """Compare the exact run with the padded ones, on inputs of `size` tokens."""
        expected = self.segment.run(*self.padded(values, self.size, _copies))
        casts = self.segment.facts.floats_become_integers
        for make_tail in (_copies,) if casts else (_nans, _scaled_copies):
            found = self.segment.run(*self.padded(values, self.bucket, make_tail))
            for index, (spec, want, got) in enumerate(zip(self.outputs, expected, found, strict=True)):
                assert spec is not None
                if index in self.segment.facts.uninitialised:
                    continue
                if not agree(want, narrow(got, spec, self.program, self.size)):
                    return "mixes_tokens"
        return None

    def narrowed(self, inputs: Sequence[Any]) -> list[Any]:
        """The first `size` tokens of live inputs."""
        return [
            value if spec is None else narrow(value, spec, self.program, self.size)
            for spec, value in zip(self.specs, inputs, strict=True)
        ]

    def synthetic(self, values: Sequence[Any]) -> list[Any]:
        """Random inputs in place of live ones (Note [Proof instead of analysis])."""
        drawn = []
        telling = False
        counted = False
        for index, (spec, value) in enumerate(zip(self.specs, values, strict=True)):
            per_token = spec is not None and bool(spec.token_dims(self.program.token))
            new = (
                value
                if spec is None or not (per_token or value.is_floating_point())
                else self._draw(value, index)
            )
            counted |= per_token
            telling |= per_token and bool((new != new.flatten()[0]).any())
            drawn.append(new)
        if counted and not telling and self.size > 1:
            raise Unproven
        return drawn

    def _draw(self, value: Tensor, seed: int) -> Tensor:
        if value.is_floating_point() and self.segment.facts.floats_become_integers:
            return value
        generator = torch.Generator(value.device).manual_seed(seed)
        if value.is_floating_point():
            fan_in = value.shape[-1] if value.ndim > 1 else 1  # keeps products of weights near 1
            noise = torch.randn(value.shape, generator=generator, device=value.device)
            return (noise * fan_in**-0.5).to(value.dtype)
        if value.dtype == torch.bool:
            return torch.rand(value.shape, generator=generator, device=value.device) < 0.5
        low, high = int(value.min()), int(value.max())
        low = min(low, 0) if low == high else low
        return torch.randint(
            low, high + 1, value.shape, generator=generator, device=value.device, dtype=value.dtype
        )

    def padded(self, values: Sequence[Any], size: int, make_tail: MakeTail) -> list[Any]:
        """Inputs as a call of `size` tokens has them, in storage of their own where the segment may write."""
        made: list[Any] = []
        sizes = self.program.sizes_at(size)
        for index, (item, spec, value) in enumerate(zip(self.step.inputs, self.specs, values, strict=True)):
            if spec is None:
                made.append(evaluate(item.expr, sizes) if isinstance(item, Size) else value)
            elif spec.token_dims(self.program.token):
                made.append(spec.empty(sizes))
                overwrite(made[-1], self._grow(value, spec, size - self.size, make_tail))
            else:
                made.append(value.clone() if index in self.segment.facts.written else value)
        return made

    def _grow(self, tensor: Tensor, spec: TensorSpec, extra: int, make_tail: MakeTail) -> Tensor:
        """Append `extra` rows made from live ones in every token dimension."""
        for dim in spec.token_dims(self.program.token) if extra else ():
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
