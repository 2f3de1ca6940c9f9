"""Launches of the kernels for a few rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, dependent_launches
from piecewise_graph.kernels.linear.kernel_configs import KernelConfig


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, config: KernelConfig) -> Tensor:
    """See linear_op.linear_few; `config` names blocks that fit."""
    rows, columns = weight.shape
    flat = x.reshape(-1, columns).contiguous()
    tokens = flat.shape[0]
    shape = (config.splits, *x.shape[:-1], rows) if config.splits > 1 else (*x.shape[:-1], rows)
    out = x.new_empty(shape, dtype=torch.float32 if config.splits > 1 else x.dtype)
    even = columns % (config.block_k * config.splits) == 0 and rows % config.block_n == 0
    dependent = dependent_launches(x.device)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    one_row = tokens == 1
    _launcher(one_row, config.warps, config.stages, dependent)(
        (-(-rows // config.block_n), config.splits, 1),
        (flat, weight, weight if bias is None else bias, out, tokens, rows, columns),
        config.block_n,
        config.block_k,
        config.splits,
        1 if one_row else max(16, 1 << (tokens - 1).bit_length()),
        even,
        bias is not None,
        dependent,
    )
    return out


@cache
def _launcher(one_row: bool, warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear import linear_kernels

    kernel: Any = linear_kernels.one_row if one_row else linear_kernels.few_rows
    return Launcher(kernel, num_warps=warps, num_stages=stages, launch_pdl=dependent)
