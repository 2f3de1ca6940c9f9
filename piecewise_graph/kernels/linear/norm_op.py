"""`piecewise::linear_norm_linears`: a linear, a residual, the RMS norm of their sum, and linears of that.

For few rows it is two launches (Note [Deferred norm] in linear_kernels.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from piecewise_graph.kernels.added_norm import add_norm, planned
from piecewise_graph.kernels.linear import linear_launch, linear_op
from piecewise_graph.kernels.linear.kernel_configs import KernelConfig

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "linear_norm_linears(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor gain, float epsilon, "
    "Tensor[] weights, Tensor?[] biases, bool gated) -> Tensor[]"
)
_DTYPES = (torch.bfloat16,)  # float16 could overflow where rows are not scaled yet
_SQUARES = 8192  # that a program holds in its registers


class _Configs(NamedTuple):
    """Blocks of the linear that the residual is added to, and of those after the norm."""

    added: KernelConfig
    after: KernelConfig


def _linear_norm_linears(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    epsilon: float,
    weights: list[Tensor],
    biases: list[Tensor | None],
    gated: bool,
) -> list[Tensor]:
    """`hidden = residual + linear(x, weight, bias)`, and linears of `gain * hidden / rms(hidden)`.

    Args:
        x: `[..., columns]`; weight: `[rows, columns]`; bias: `[rows]` or None.
        residual: `[..., rows]`; gain: `[rows]`. All are of one dtype.
        epsilon: added to the mean of squares.
        weights, biases: as of `linears`; as of `swiglu` where `gated`.

    Returns:
        hidden, and what `linears` or `swiglu` returns; all contiguous, in x's dtype.
    """
    configs = _configs(x, weight, bias, residual, gain, weights, biases, gated)
    if configs is None:
        results = linear_op.linears(x, [weight], [bias])
        hidden, normed = add_norm(results.pop(), residual, gain, epsilon)
        if gated:
            return [hidden, linear_op.swiglu(normed, weights, biases)]
        return [hidden, *linear_op.linears(normed, weights, biases)]
    hidden, scaled, squares = linear_launch.added_few(x, weight, bias, residual, gain, configs.added)
    operands = scaled, weights, biases, configs.after, linear_launch.Norm(squares, epsilon)
    if gated:
        return [hidden, linear_launch.swiglu_few(*operands)]
    return [hidden, *linear_launch.linears_few(*operands)]


def _configs(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    gated: bool,
) -> _Configs | None:
    """For operands that both kernels read. Whatever else there is, torch computes or refuses it."""
    alike = x.dtype == residual.dtype == gain.dtype and gain.shape == weight.shape[:1]
    alike = alike and residual.shape == (*x.shape[:-1], *weight.shape[:1])
    if not alike or (gated and [each.shape for each in weights] != [weights[0].shape] * 2):
        return None
    added = linear_op.config_for(x, [weight], [bias])
    after = linear_op.config_for(residual, weights, biases, gated=gated)
    return _deferring(residual, added, after, len(weight), residual.numel() // max(len(weight), 1))


def _deferring(
    like: Tensor, added: KernelConfig | None, after: KernelConfig | None, rows: int, tokens: int
) -> _Configs | None:
    """Where both linears have kernels of ours for few rows of x; the weight of the first one has `rows`."""
    if like.dtype not in _DTYPES or added is None or after is None or added.tile or after.tile:
        return None
    held = linear_launch.squares_held(added, rows, tokens)
    return _Configs(added, after) if held <= _SQUARES else None


def compile_ahead(
    like: Tensor,
    sizes: Iterable[int],
    weight: Sequence[int],
    rows: Sequence[int],
    *,
    has_biases: tuple[bool, bool],
    gated: bool,
) -> None:
    """Have the kernels compiled in other threads that `linear_norm_linears` will use for some sizes.

    The kernel of a norm is always among them: with more rows than ours serve, it is not two launches.

    Args:
        like: a tensor of the dtype, and on the device, of all operands.
        sizes: rows of x.
        weight: the shape of the first one. rows: of each of the others.
        has_biases: of the first linear, of the others.
    """
    count, columns = weight
    row, apart = like.new_empty(1, count), list[int]()
    for tokens in filter(None, sizes):
        added = linear_op.chosen(like, tokens, [count], columns, False)
        after = linear_op.chosen(like, tokens, rows, count, gated)
        configs = _deferring(like, added, after, count, tokens)
        if configs is None:
            apart.append(tokens)
        else:
            summed = linear_launch.blocks_of(configs.added, count)
            linear_launch.compile_added_ahead(configs.added, like, tokens, columns, has_biases[0])
            linear_launch.compile_ahead(configs.after, like, tokens, count, has_biases[1], gated, summed)
    linear_op.compile_ahead(like, apart, [count], columns, has_bias=has_biases[0], gated=False)
    linear_op.compile_ahead(like, apart, rows, count, has_bias=has_biases[1], gated=gated)
    planned(row, row, row[0], row, row, 1.0).compile_ahead()


_library.impl("linear_norm_linears", _linear_norm_linears, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::linear_norm_linears", lib=_library)
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    gain: Tensor,
    epsilon: float,
    weights: list[Tensor],
    biases: list[Tensor | None],
    gated: bool,
) -> list[Tensor]:
    results = weights[:1] if gated else weights
    shapes = [residual.shape, *((*residual.shape[:-1], each.shape[0]) for each in results)]
    return [residual.new_empty(shape) for shape in shapes]
