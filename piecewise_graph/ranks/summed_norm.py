"""`piecewise::all_reduce_add_norm`: a sum over ranks, added to a residual, and the RMS norm of the result."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, dependent_launches, kernels_serve
from piecewise_graph.ranks.collectives import all_reduce, memory_for
from piecewise_graph.ranks.peer_memory import WORDS, PeerMemory

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "all_reduce_add_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, str group) "
    "-> (Tensor, Tensor)"
)
LARGEST_TO_NORM = 1 << 20  # bytes of a sum over 2 ranks that is normalised by the same launch
_COLUMNS = 16384  # that a program holds in its registers


def all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """`hidden = residual + all_reduce(x)` and `weight * hidden / sqrt(mean(hidden ** 2) + epsilon)`.

    Args:
        x, residual: `[..., columns]`; weight: `[columns]`; all of one dtype.
        group: name of the process group.

    Returns:
        (hidden, its norm), contiguous, each of x's shape and dtype.
    """
    found: tuple[Tensor, Tensor] = torch.ops.piecewise.all_reduce_add_norm(
        x, residual, weight, epsilon, group
    )
    return found


def serves(rows: Tensor) -> bool:
    """Whether the kernel takes rows of this kind."""
    return rows.dim() > 0 and rows.dtype in WORDS and 0 < int(rows.shape[-1]) <= _COLUMNS


def block_of(columns: int) -> int:
    """Cells of a program that adds up rows of so many columns."""
    return 1 << (columns - 1).bit_length()


def _all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    if not (kernels_serve(x) and serves(x) and x.numel()):
        return reference(all_reduce(x, group), residual, weight, epsilon)
    columns = x.shape[-1]
    memory = memory_for(group, x.dtype, block_of(columns))
    if memory is None or x.numel() // columns > len(memory.turns):
        return _launch(all_reduce(x, group), residual, weight, epsilon, None)
    return _launch(x, residual, weight, epsilon, memory)


def reference(total: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The same in torch, of the sum."""
    hidden = (residual + total).contiguous()
    wide = hidden.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return hidden, weight * unit.to(hidden.dtype)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, memory: PeerMemory | None
) -> tuple[Tensor, Tensor]:
    """With `memory`, x is this rank's part; without, the sum."""
    columns, dependent = x.shape[-1], dependent_launches(x.device)
    x, residual = x.contiguous(), residual.contiguous()
    hidden, normed = torch.empty_like(x), torch.empty_like(x)
    # Without memory these are not looked at.
    sent: list[Any] = [x] * 5 + [0, 0] if memory is None else memory.arguments()
    block, count = block_of(columns), 1 if memory is None else len(memory.peers)
    args = [x, residual, weight.contiguous(), hidden, normed, *sent, epsilon]
    launch = _launcher(4 if block <= 4096 else 8, dependent)
    launch((x.numel() // columns, 1, 1), args, count, columns, block, x.is_cuda, dependent)
    return hidden, normed


@cache
def _launcher(warps: int, dependent: bool) -> Launcher:
    from piecewise_graph.kernels.peer_sum import add_and_norm

    return Launcher(add_and_norm, num_warps=warps, launch_pdl=dependent)


_library.impl("all_reduce_add_norm", _all_reduce_add_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::all_reduce_add_norm", lib=_library)
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
