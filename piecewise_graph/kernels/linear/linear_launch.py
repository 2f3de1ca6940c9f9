"""Launches of the kernels for a few rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, dependent_launches
from piecewise_graph.kernels.linear.plans import Plan


def linear_few(x: Tensor, weight: Tensor, bias: Tensor | None, plan: Plan) -> Tensor:
    """See ops.linear_few; `plan` names blocks that fit."""
    rows, columns = weight.shape
    flat = x.reshape(-1, columns).contiguous()
    tokens = flat.shape[0]
    shape = (plan.splits, *x.shape[:-1], rows) if plan.splits > 1 else (*x.shape[:-1], rows)
    out = x.new_empty(shape, dtype=torch.float32 if plan.splits > 1 else x.dtype)
    even = columns % (plan.block_k * plan.splits) == 0 and rows % plan.block_n == 0
    dependent = dependent_launches(x.device)
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    launcher = _launcher(tokens == 1, plan.warps, plan.stages, dependent)
    launcher(
        (-(-rows // plan.block_n), plan.splits, 1),
        (flat, weight, weight if bias is None else bias, out, tokens, rows),
        columns,
        plan.block_n,
        plan.block_k,
        plan.splits,
        1 if tokens == 1 else max(16, 1 << (tokens - 1).bit_length()),
        even,
        bias is not None,
        dependent,
        bool(plan.trigger),
    )
    return out


@cache
def _launcher(one_row: bool, warps: int, stages: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.linear import linear_kernels

    kernel: Any = linear_kernels.one_row if one_row else linear_kernels.few_rows
    return Launcher(kernel, num_warps=warps, num_stages=stages, launch_pdl=dependent)
