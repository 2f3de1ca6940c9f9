"""Launches of the kernels for a few rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, dependent_launches
from piecewise_graph.kernels.linear.kernel_configs import KernelConfig

MEMBERS = 3  # at most, of a launch


def linears_few(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], config: KernelConfig
) -> list[Tensor]:
    """`linear_op.linear_few` for each of some weights, three per launch; `config` names blocks that fit.

    Args:
        biases: all of them or none.
    """
    columns = x.shape[-1]
    flat = x.reshape(-1, columns).contiguous()
    outputs = [_output(x, len(weight), config) for weight in weights]
    given = [
        [tensor.contiguous() for tensor in tensors if tensor is not None] for tensors in (weights, biases)
    ]
    for start in range(0, len(outputs), MEMBERS):
        part = slice(start, start + MEMBERS)
        _launch(flat, given[0][part], given[1][part], outputs[part], config)
    return outputs


def _output(x: Tensor, rows: int, config: KernelConfig) -> Tensor:
    shape = *x.shape[:-1], rows
    if config.splits == 1:
        return x.new_empty(shape)
    return x.new_empty((config.splits, *shape), dtype=torch.float32)


def _launch(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], outputs: list[Tensor], config: KernelConfig
) -> None:
    (tokens, columns), rows = x.shape, [len(weight) for weight in weights]
    even = columns % (config.block_k * config.splits) == 0 and all(n % config.block_n == 0 for n in rows)
    dependent, one_row = dependent_launches(x.device), tokens == 1
    _launcher(one_row, config.warps, config.stages, dependent)(
        (sum(-(-n // config.block_n) for n in rows), config.splits, 1),
        (x, *_three(weights), *_three(biases or weights), *_three(outputs), tokens, *_three(rows), columns),
        config.block_n,
        config.block_k,
        config.splits,
        1 if one_row else max(16, 1 << (tokens - 1).bit_length()),
        even,
        bool(biases),
        dependent,
    )


def _three(values: list[Any]) -> list[Any]:
    """With the last one in place of those that are missing."""
    return values + values[-1:] * (MEMBERS - len(values))


@cache
def _launcher(one_row: bool, warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear import linear_kernels

    kernel: Any = linear_kernels.one_row if one_row else linear_kernels.few_rows
    return Launcher(kernel, num_warps=warps, num_stages=stages, launch_pdl=dependent)
