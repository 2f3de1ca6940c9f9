"""Trials of padding: a segment is run at an exact size and padded; live rows must agree.

Note [Trials]
That padding is harmless is proved by structure (analysis/). A proved segment gets one trial per compiled
code, on the weights and rows of a live call, because a compiler may be wrong: once at k tokens, once padded
from k to the bucket, with NaN in the tails of floats. k is at most half the bucket, so that a dependence on
the size itself shows, and of a large bucket an eighth: what the trial holds at once is little more than what
the forward after it needs.

With `padding="tried"`, trials stand in for the missing proof of a segment, in each bucket. They may be
fooled. Three run on the live inputs: with the tails that a replay has (zeros in integers, NaN in floats),
with zeros, and with copies of live rows. These may hide a dependence: zeros divided by T, equal rows
averaged, a gate that is still zero. So two run on random inputs, weights included, whose integers and
booleans are drawn from the lower half of their live range with tails from the upper half, and the other way
round: no minimum, maximum or `any` survives both. Integers never leave the live range (or 0 to it), because
an illegal index would kill a CUDA context; for the same reason floats stay live where a segment casts
floats to integers. Where that leaves nothing to tell rows apart (all ids are 0), nothing is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.compiler.agreement import TOLERANCE, agree
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.recorder.static_buffers import narrow
from piecewise_graph.sizes import TensorSpec, evaluate, overwrite
from piecewise_graph.splitter.split_graph import Ref, SegmentStep, Size

MakeTail = Callable[[Tensor, int, int], Tensor]  # of (live values, dimension, rows to append)

_ENOUGH_ROWS = 16  # that a trial compares, where half the bucket is as many

UNPROVEN = "padding_unproven"  # the inputs at hand prove nothing


def probe_size(program: Program, num_tokens: int, bucket: int) -> int | None:
    """A token count below `bucket` at which the trace is valid; None where there is none to try."""
    low = program.contract.ranges[0][0] if program.contract.ranges else 1
    few = min(bucket // 2, max(bucket // 8, _ENOUGH_ROWS))
    for size in (max(low or 1, few), num_tokens):
        fits = 0 < size < bucket and size <= num_tokens
        if fits and program.contract.size_violation(program.sizes_at(size)) is None:
            return size
    return None


def padding_reason(trial: Trial, inputs: Sequence[Any], *, proved: bool) -> str | None:
    """Why the trial's segment must not be padded; None when live rows agree, UNPROVEN when no row can tell.

    Args:
        inputs: its live inputs, of at least the trial's size.
        proved: one trial against a miscompile; else all of them (Note [Trials]).
    """
    if trial.has_derived_sizes():
        return None if proved else "derived_size"
    live = trial.narrowed(inputs)
    if proved:
        return "mixes_tokens" if trial.disagrees(live, [_nan_tail] * len(live)) else None
    if trial.segment.facts.size_is_a_number:
        return "size_is_a_number"
    if not trial.tells_rows_apart(live):
        return UNPROVEN
    for make_tail in (_nan_tail, _zero_tail, _scaled_tail):
        if trial.disagrees(live, [make_tail] * len(live)):
            return "mixes_tokens"
    for upper, float_tail in ((False, _nan_tail), (True, _scaled_tail)):
        if trial.disagrees(*trial.drawn(live, upper, float_tail)):
            return "mixes_tokens"
    return None


class Trial:
    """One segment, run at `size` tokens and padded from there to `bucket`."""

    def __init__(
        self, program: Program, step: SegmentStep, segment: CompiledSegment, size: int, bucket: int
    ) -> None:
        self.program, self.step, self.segment = program, step, segment
        self.size, self.bucket = size, bucket
        split = program.split
        self.specs = [split.specs[item.slot] if isinstance(item, Ref) else None for item in step.inputs]
        self.outputs = [split.spec(slot) for slot in step.outputs]

    def has_derived_sizes(self) -> bool:
        return any(
            spec is not None and spec.is_derived(self.program.token) for spec in self.specs + self.outputs
        )

    def warm_up(self, inputs: Sequence[Any]) -> None:
        """Run the segment once at the bucket's size, so that its capture loads and allocates nothing new."""
        live = self.narrowed(inputs)
        self.segment.at(self.bucket)(*self.padded(live, self.bucket, [_copies] * len(live)))

    def run_exact(self, inputs: Sequence[Any]) -> tuple[list[Any], list[Any], Sequence[Tensor]]:
        """The live rows of `inputs`, copies of them, and what the segment returns for the copies."""
        live = self.narrowed(inputs)
        exact = self.padded(live, self.size, [_copies] * len(live))
        return live, exact, self.segment.at(self.size)(*exact)

    def disagrees(self, values: Sequence[Any], tails: Sequence[MakeTail]) -> bool:
        """Live rows of the padded run differ from the exact one's, on inputs of `size` tokens."""
        exact, padded = self.padded(values, self.size, tails), self.padded(values, self.bucket, tails)
        expected = self.segment.at(self.size)(*exact)
        found = self.segment.at(self.bucket)(*padded)
        for index in self.segment.facts.written:
            spec = self.specs[index]
            if spec is not None and not agree(
                exact[index], narrow(padded[index], spec, self.program, self.size)
            ):
                return True
        for index, (spec, want, got) in enumerate(zip(self.outputs, expected, found, strict=True)):
            known = index not in self.segment.facts.uninitialised
            if known and not agree(want, narrow(got, spec, self.program, self.size)):
                return True
        return False

    def narrowed(self, inputs: Sequence[Any]) -> list[Any]:
        """The first `size` tokens of live inputs."""
        return [
            value if spec is None else narrow(value, spec, self.program, self.size)
            for spec, value in zip(self.specs, inputs, strict=True)
        ]

    def tells_rows_apart(self, live: Sequence[Any]) -> bool:
        """Some per-token input has more than one legal value (true where there is none at all)."""
        counting = [value for value, per_token in self._tensors(live) if per_token]
        return not counting or any(_legal_range(value) != (0, 0) for value in counting)

    def drawn(
        self, live: Sequence[Any], upper: bool, float_tail: MakeTail
    ) -> tuple[list[Any], list[MakeTail]]:
        """Random inputs and weights, and their tails (Note [Trials])."""
        values, tails = list(live), [float_tail] * len(live)
        for index, (spec, value) in enumerate(zip(self.specs, live, strict=True)):
            if spec is None:
                continue
            per_token = bool(spec.token_dims(self.program.token))
            if value.is_floating_point():
                if not self.segment.facts.floats_become_integers:
                    values[index] = _random_floats(value, seed=index)
            elif per_token:
                low, high = _legal_range(value)
                middle = (low + high + 1) // 2
                halves = (low, middle - 1), (middle, high)
                values[index] = _random_integers(value, *halves[upper], seed=index)
                tail_low, tail_high = halves[not upper]
                tails[index] = partial(_random_tail, low=tail_low, high=tail_high, seed=index)
        return values, tails

    def _tensors(self, live: Sequence[Any]) -> Iterator[tuple[Tensor, bool]]:
        for spec, value in zip(self.specs, live, strict=True):
            if spec is not None:
                yield value, bool(spec.token_dims(self.program.token))

    def padded(self, values: Sequence[Any], size: int, tails: Sequence[MakeTail]) -> list[Any]:
        """Inputs as a call of `size` tokens has them, in storage of their own where the segment may write."""
        made: list[Any] = []
        sizes = self.program.sizes_at(size)
        for index, (item, spec, value) in enumerate(zip(self.step.inputs, self.specs, values, strict=True)):
            if spec is None:
                made.append(evaluate(item.expr, sizes) if isinstance(item, Size) else value)
            elif spec.token_dims(self.program.token):
                made.append(spec.empty(sizes))
                casts = self.segment.facts.floats_become_integers and value.is_floating_point()
                make_tail = _copies if casts else tails[index]
                overwrite(made[-1], self._grow(value, spec, size - self.size, make_tail))
            else:
                made.append(value.clone() if index in self.segment.facts.written else value)
        return made

    def _grow(self, tensor: Tensor, spec: TensorSpec, extra: int, make_tail: MakeTail) -> Tensor:
        """Append `extra` rows in every token dimension."""
        for dim in spec.token_dims(self.program.token) if extra else ():
            tensor = torch.cat([tensor, make_tail(tensor, dim, extra)], dim)
        return tensor


def _filled(value: float, tensor: Tensor, dim: int, extra: int) -> Tensor:
    return tensor.new_full([extra if i == dim else size for i, size in enumerate(tensor.shape)], value)


def _nan_tail(tensor: Tensor, dim: int, extra: int) -> Tensor:
    return _filled(float("nan") if tensor.is_floating_point() else 0, tensor, dim, extra)


def _zero_tail(tensor: Tensor, dim: int, extra: int) -> Tensor:
    return _filled(0, tensor, dim, extra)


def _copies(tensor: Tensor, dim: int, extra: int) -> Tensor:
    """Live rows, the last one next to the first: what wraps around meets other neighbours than at `size`."""
    rows = torch.arange(extra, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, rows.flip(0))


def _scaled_tail(tensor: Tensor, dim: int, extra: int) -> Tensor:
    rows = _copies(tensor, dim, extra)
    return rows * -3.0 + 1.0 if rows.is_floating_point() else rows


def _random_tail(tensor: Tensor, dim: int, extra: int, *, low: int, high: int, seed: int) -> Tensor:
    return _random_integers(_zero_tail(tensor, dim, extra), low, high, seed)


def _legal_range(value: Tensor) -> tuple[int, int]:
    """Integers that the model takes for certain: up to a live one, every one is. (0, 0) when only 0 is."""
    if value.is_floating_point() or value.dtype == torch.bool:
        return 0, 1
    low, high = int(value.min()), int(value.max())
    return min(low, 0), max(high, 0)


def _random_integers(like: Tensor, low: int, high: int, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    drawn = torch.randint(low, max(low, high) + 1, like.shape, generator=generator, device=like.device)
    return drawn.to(like.dtype)


def _random_floats(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    fan_in = like.shape[-1] if like.ndim > 1 else 1  # keeps products of weights near 1
    noise = torch.randn(like.shape, generator=generator, device=like.device, dtype=_noise_dtype(like))
    return (noise * fan_in**-0.5).to(like.dtype)


def _noise_dtype(like: Tensor) -> torch.dtype:
    return like.dtype if like.dtype in TOLERANCE else torch.float32  # float8 cannot be drawn
