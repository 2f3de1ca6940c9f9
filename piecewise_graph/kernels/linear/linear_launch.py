"""Launches of the kernels for a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, Planned, dependent_launches
from piecewise_graph.kernels.linear.kernel_configs import ALIGNMENT, KernelConfig

MEMBERS = 3  # at most, of a launch
_ELEMENTS = 1024  # of a program


def linears_few(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], config: KernelConfig
) -> list[Tensor]:
    """`linear_op.linear_few` for each of some weights, three per launch; `config` names blocks that fit.

    Args:
        biases: all of them or none.
    """
    rows, outputs = _rows(x), [_output(x, len(weight), config) for weight in weights]
    for start in range(0, len(outputs), MEMBERS):
        part = slice(start, start + MEMBERS)
        _launch(rows, weights[part], biases[part], outputs[part], config, gated=False)
    return outputs


def swiglu_few(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], config: KernelConfig
) -> Tensor:
    """`linear_op.swiglu` by one launch; `config` names blocks that fit, and one split."""
    out = _output(x, len(weights[0]), config)
    _launch(_rows(x), weights, biases, [out], config, gated=True)
    return out


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
    gated: bool,
) -> None:
    (tokens, columns), rows = x.shape, [len(weight) for weight in weights]
    blocks = sum(-(-n // config.block_n) for n in ([2 * rows[0]] if gated else rows))
    weights = [weight.contiguous() for weight in weights]
    given = [bias.contiguous() for bias in biases if bias is not None] or weights  # which are not read then
    tiles = -(-tokens // config.tile) if config.tile else 1
    launcher, constants = _variant(config, x.device, tokens, columns, biases[0] is not None, gated)
    launcher(
        (blocks * tiles, config.splits, 1),
        (x, *_three(weights), *_three(given), *_three(outputs), tokens, *_three(rows), columns),
        *constants,
    )


def compile_ahead(
    config: KernelConfig, like: Tensor, tokens: int, columns: int, has_bias: bool, gated: bool
) -> None:
    """Have the kernel compiled in another thread that serves `tokens` rows of `columns`.

    Args:
        like: a tensor of the dtype, and on the device, of all operands.
    """
    launcher, constants = _variant(config, like.device, tokens, columns, has_bias, gated)
    launcher.ahead((*[like] * (1 + 3 * MEMBERS), *[1] * (2 + MEMBERS)), *constants)


def _variant(
    config: KernelConfig, device: torch.device, tokens: int, columns: int, has_bias: bool, gated: bool
) -> tuple[Launcher, tuple[Any, ...]]:
    """The launcher, and the kernel's constexprs."""
    even = columns % (config.block_k * config.parts * config.splits) == 0
    dependent = dependent_launches(device)
    constants = (
        config.block_n, config.block_k, config.splits, config.parts, config.ahead,
        config.tile or (1 if tokens == 1 else max(16, 1 << (tokens - 1).bit_length())),
        even, columns % ALIGNMENT == 0, has_bias, gated, bool(config.tile), dependent,
    )  # fmt: skip
    return _launcher(config.warps, config.stages, dependent), constants


def _three(values: Sequence[Any]) -> list[Any]:
    """With the last one in place of those that are missing."""
    return [*values, *[values[-1]] * (MEMBERS - len(values))]


@cache
def _launcher(warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear.linear_kernels import few_rows

    return Launcher(few_rows, num_warps=warps, num_stages=stages, launch_pdl=dependent)


@cache
def _elementwise(dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear.linear_kernels import silu_times

    return Launcher(silu_times, num_warps=4, launch_pdl=dependent)
