"""Launches of the kernels for a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecewise_graph.kernels.early_reads import may_read_early
from piecewise_graph.kernels.launch import Launcher, Planned, dependent_launches
from piecewise_graph.kernels.linear.kernel_configs import (
    ALIGNMENT,
    PLAIN,
    RING_TOKENS,
    KernelConfig,
    ring_rows,
)

MEMBERS = 3  # at most, of a launch
GLUON = ("3.6.", "3.7.")  # versions of Triton whose Gluon compiles ring_kernels.py
_ELEMENTS = 1024  # of a program


class Norm(NamedTuple):
    """What a linear scales rows by (Note [Deferred norm] in linear_kernels.py).

    Attributes:
        squares: float32 `[blocks, tokens]`; the sum of a column is that of a row's squares.
        epsilon: added to their mean.
    """

    squares: Tensor
    epsilon: float


def linears_few(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    config: KernelConfig,
    norm: Norm | None = None,
) -> list[Tensor]:
    """`linear_op.linear_few` for each of some weights, three per launch; `config` names blocks that fit.

    Args:
        biases: all of them or none.
        norm: x's rows are scaled by it; None = they are not.
    """
    rows, outputs = _rows(x), [_output(x, len(weight), config) for weight in weights]
    for start in range(0, len(outputs), MEMBERS):
        part = slice(start, start + MEMBERS)
        _launch(rows, weights[part], biases[part], outputs[part], config, norm, gated=False)
    return outputs


def swiglu_few(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    config: KernelConfig,
    norm: Norm | None = None,
) -> Tensor:
    """`linear_op.swiglu` by one launch; `config` names blocks that fit, and one split."""
    out = _output(x, len(weights[0]), config)
    _launch(_rows(x), weights, biases, [out], config, norm, gated=True)
    return out


def added_few(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, config: KernelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """`residual + linear(x, weight, bias)`, that times `gain`, and squares for a `Norm`, by one launch."""
    (tokens, columns), rows = (x := _rows(x)).shape, len(weight)
    config = _fitting(config, x, [weight])
    residual, gain = residual.contiguous(), gain.contiguous()
    hidden, scaled = torch.empty_like(residual), torch.empty_like(residual)
    blocks = blocks_of(config, rows)
    squares = x.new_empty((blocks, tokens), dtype=torch.float32)
    launcher, constants = _added_variant(config, x.device, tokens, columns, bias is not None)
    given = gain if bias is None else bias.contiguous()  # gain is not read for it
    tensors = (x, weight, given, residual, gain, hidden, scaled, squares)
    args = (*tensors, int(may_read_early([weight])), tokens, rows, columns)
    launcher((blocks, 1, 1), args, *constants)
    return hidden, scaled, squares


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` of contiguous tensors of one shape."""
    out = torch.empty_like(gate)
    _silu_times(gate, up, out).bind()()
    return out


def compile_silu_times_ahead(like: Tensor) -> None:
    """Have the kernel of `silu_times` compiled in another thread; `like` is like its operands."""
    _silu_times(like, like, like).compile_ahead()


def _silu_times(gate: Tensor, up: Tensor, out: Tensor) -> Planned:
    dependent, grid = dependent_launches(gate.device), (-(-gate.numel() // _ELEMENTS), 1, 1)
    return Planned(_elementwise(dependent), grid, (gate, up, out, gate.numel()), (_ELEMENTS, dependent))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def _output(x: Tensor, rows: int, config: KernelConfig) -> Tensor:
    shape = *x.shape[:-1], rows
    if config.splits == 1:
        return x.new_empty(shape)
    return x.new_empty((config.splits, *shape), dtype=torch.float32)


def _launch(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    outputs: Sequence[Tensor],
    config: KernelConfig,
    norm: Norm | None,
    gated: bool,
) -> None:
    (tokens, columns), rows = x.shape, [len(weight) for weight in weights]
    weights = [weight.contiguous() for weight in weights]
    config = _fitting(config, x, weights)
    blocks = sum(blocks_of(config, n) for n in ([2 * rows[0]] if gated else rows))
    given = [bias.contiguous() for bias in biases if bias is not None] or weights  # which are not read then
    tiles = -(-tokens // config.tile) if config.tile else 1
    squares, epsilon = norm or (x, 0.0)  # x stands in for what is not read
    summed = len(squares) if norm else 0
    launcher, constants = _variant(config, x.device, tokens, columns, biases[0] is not None, gated, summed)
    tensors = (x, *_three(weights), *_three(given), *_three(outputs), squares)
    numbers = (int(may_read_early(weights)), tokens, *_three(rows), columns, summed, epsilon)
    launcher((blocks * tiles, config.splits, 1), (*tensors, *numbers), *constants)


def _fitting(config: KernelConfig, x: Tensor, weights: Sequence[Tensor]) -> KernelConfig:
    """`config`, or blocks without rings for what rings cannot serve: 16 bytes at a time are copied there."""
    if not config.ring:
        return config
    tokens, columns = x.shape
    few = tokens <= RING_TOKENS and config.splits == 1 and has_rings(x.device)
    aligned = columns % ALIGNMENT == 0 and all(each.data_ptr() % 16 == 0 for each in (x, *weights))
    return config if few and aligned else PLAIN._replace(splits=config.splits)


@cache
def has_rings(device: torch.device) -> bool:
    """Whether kernels with rings can be launched: on Hopper, by a Triton whose Gluon they are written in."""
    if not dependent_launches(device) or torch.cuda.get_device_capability(device)[0] != 9:
        return False  # the products of a warpgroup are Hopper's
    import triton

    return bool(triton.__version__.startswith(GLUON))


def compile_ahead(
    config: KernelConfig,
    like: Tensor,
    tokens: int,
    columns: int,
    has_bias: bool,
    gated: bool,
    summed: int = 0,
) -> None:
    """Have the kernel compiled in another thread that serves `tokens` rows of `columns`.

    Args:
        like: a tensor of the dtype, and on the device, of all operands.
        summed: blocks whose squares the norm of x's rows is made of; 0 = there is no norm.
    """
    launcher, constants = _variant(config, like.device, tokens, columns, has_bias, gated, summed)
    squares = like.float() if summed else like
    launcher.ahead((*[like] * (1 + 3 * MEMBERS), squares, *[1] * (4 + MEMBERS), 1.0), *constants)


def compile_added_ahead(
    config: KernelConfig, like: Tensor, tokens: int, columns: int, has_bias: bool
) -> None:
    """The same for `added_few`."""
    launcher, constants = _added_variant(config, like.device, tokens, columns, has_bias)
    launcher.ahead((*[like] * 7, like.float(), *[1] * 4), *constants)


def _variant(
    config: KernelConfig,
    device: torch.device,
    tokens: int,
    columns: int,
    has_bias: bool,
    gated: bool,
    summed: int,
) -> tuple[Launcher, tuple[Any, ...]]:
    """The launcher, and the kernel's constexprs."""
    dependent, even = dependent_launches(device), _is_even(config, columns)
    if config.ring:
        form = has_bias, gated, _power_of_two(summed)
        return _ring_launcher(config.warps, added=False), (*_ring_blocks(config, tokens), even, *form)
    constants = (
        config.block_n, config.block_k, config.splits, config.parts, config.ahead, _tokens(config, tokens),
        even, columns % ALIGNMENT == 0, has_bias, gated, bool(config.tile), _power_of_two(summed), dependent,
    )  # fmt: skip
    return _launcher(config.warps, config.stages, dependent), constants


def _added_variant(
    config: KernelConfig, device: torch.device, tokens: int, columns: int, has_bias: bool
) -> tuple[Launcher, tuple[Any, ...]]:
    dependent, even = dependent_launches(device), _is_even(config, columns)
    if config.ring:
        return _ring_launcher(config.warps, added=True), (*_ring_blocks(config, tokens), even, has_bias)
    constants = (
        config.block_n, config.block_k, config.parts, config.ahead, _tokens(config, tokens),
        even, columns % ALIGNMENT == 0, has_bias, dependent,
    )  # fmt: skip
    return _added_launcher(config.warps, config.stages, dependent), constants


def _ring_blocks(config: KernelConfig, tokens: int) -> tuple[int, ...]:
    """The first constexprs of kernels with rings."""
    return config.block_n, config.block_k, config.parts, config.stages, _tokens(config, tokens)


def blocks_of(config: KernelConfig, rows: int) -> int:
    """Blocks of a weight of so many rows."""
    return -(-rows // config.block_n)


def squares_held(config: KernelConfig, rows: int, tokens: int) -> int:
    """Numbers that each program after a norm holds, where `config` serves the linear of `rows` before it."""
    return _power_of_two(blocks_of(config, rows)) * _tokens(config, tokens)


def _is_even(config: KernelConfig, columns: int) -> bool:
    step = config.block_k * config.parts * config.splits
    return columns % step == 0 and (not config.ring or columns >= step * config.stages)


def _tokens(config: KernelConfig, tokens: int) -> int:
    """Rows of x that a program computes."""
    if config.ring:
        return ring_rows(tokens)
    return config.tile or (1 if tokens == 1 else max(16, _power_of_two(tokens)))


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`; 0 for 0."""
    return 1 << (number - 1).bit_length() if number else 0


def _three(values: Sequence[Any]) -> list[Any]:
    """With the last one in place of those that are missing."""
    return [*values, *[values[-1]] * (MEMBERS - len(values))]


@cache
def _launcher(warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear.linear_kernels import few_rows

    return Launcher(few_rows, num_warps=warps, num_stages=stages, launch_pdl=dependent)


@cache
def _added_launcher(warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear.added_kernels import few_rows_added

    return Launcher(few_rows_added, num_warps=warps, num_stages=stages, launch_pdl=dependent)


@cache
def _ring_launcher(warps: int, *, added: bool) -> Launcher:
    from piecewise_graph.kernels.linear.ring_kernels import few_rows_added_by_ring, few_rows_by_ring

    kernel = few_rows_added_by_ring if added else few_rows_by_ring
    return Launcher(kernel, num_warps=warps, launch_pdl=True)


@cache
def _elementwise(dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear.linear_kernels import silu_times

    return Launcher(silu_times, num_warps=4, launch_pdl=dependent)
