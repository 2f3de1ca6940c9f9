"""A residual, what is added to it, and the RMS norm of the sum, by one launch.

(RMS norm: Zhang and Sennrich, arXiv 1910.07467.)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, Planned, dependent_launches, kernels_serve

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COLUMNS = 16384  # that a program holds in its registers


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`hidden = residual + x` and `weight * hidden / sqrt(mean(hidden ** 2) + epsilon)`.

    Args:
        x, residual: `[..., columns]`; weight: `[columns]`; all of one dtype.

    Returns:
        (hidden, its norm), contiguous, each of x's shape and dtype.
    """
    alike = x.shape == residual.shape and weight.shape == x.shape[-1:]
    if not (alike and kernels_serve(x) and serves(x) and x.numel()):  # torch spreads or refuses other shapes
        return reference(x, residual, weight, epsilon)
    return launch(x, residual, weight, epsilon)


def serves(rows: Tensor) -> bool:
    """Whether the kernel takes rows of this kind."""
    columns = rows.shape[-1] if rows.dim() else 0
    # A dynamic size is not asked: that would fix it.
    return rows.dtype in _DTYPES and isinstance(columns, int) and 0 < columns <= _COLUMNS


def reference(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """`add_norm` in torch."""
    hidden = (residual + x).contiguous()
    wide = hidden.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden, weight * unit.to(hidden.dtype)


def launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    sent: tuple[Any, ...] = (),
    ranks: int = 1,
) -> tuple[Tensor, Tensor]:
    """`add_norm` on operands that the kernel takes; see `planned` for the others."""
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    planned(x, residual, weight, hidden, normed, epsilon, sent=sent, ranks=ranks).bind()()
    return hidden, normed


def planned(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
    normed: Tensor,
    epsilon: float,
    *,
    sent: tuple[Any, ...] = (),
    ranks: int = 1,
) -> Planned:
    """The launch, on contiguous tensors; x is a row in the making, see `peer_sum.add_and_norm`.

    Args:
        sent: from `cells` to `patience`, what x is summed through over `ranks`; where those are 1, nothing.
    """
    columns, dependent = x.shape[-1], dependent_launches(x.device)
    through = sent or (*[x] * 5, 0, 0)  # which are not looked at
    block = block_of(columns)
    return Planned(
        _launcher(4 if block <= 4096 else 8, dependent),
        (x.numel() // columns, 1, 1),
        (x, residual, weight, hidden, normed, *through, epsilon),
        (ranks, columns, block, x.is_cuda, dependent),
    )


def block_of(columns: int) -> int:
    """Cells of a program that adds up rows of so many columns: an element or more for each of its threads.

    With fewer, threads would hold copies of others' elements, and each would look for itself what has come.
    """
    return max(256, 1 << (columns - 1).bit_length())


@cache
def _launcher(warps: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.peer_sum import add_and_norm

    return Launcher(add_and_norm, num_warps=warps, launch_pdl=dependent)
