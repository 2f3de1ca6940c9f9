"""`piecewise::all_reduce_add_norm`: a sum over ranks, added to a residual, and the RMS norm of the result."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, dependent_launches, kernels_serve
from piecewise_graph.ranks.collectives import all_reduce, memory_for
from piecewise_graph.ranks.exchange import Ranks
from piecewise_graph.ranks.peer_memory import WORDS, PeerMemory, prepare

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "all_reduce_add_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, str group) "
    "-> (Tensor, Tensor)"
)
_LARGEST = 1 << 20  # bytes of a sum over 2 ranks that is normalised by the same launch
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
    columns = rows.shape[-1] if rows.dim() else 0
    # A dynamic size is not asked: that would fix it.
    return rows.dtype in WORDS and isinstance(columns, int) and 0 < columns <= _COLUMNS


def block_of(columns: int) -> int:
    """Cells of a program that adds up rows of so many columns: an element or more for each of its threads.

    With fewer, threads would hold copies of others' elements, and each would look for itself what has come.
    """
    return max(256, 1 << (columns - 1).bit_length())


def prepare_norms(ranks: Ranks, group: Any, like: Tensor, timeout: float) -> None:
    """Make the memory that rows of `like`'s kind are summed and normalised through; see `prepare`.

    Both variants of the kernel run once: a capture that is their first use would have to load them.
    """
    memory = prepare(ranks, group, like, timeout, block_of(int(like.shape[-1])), _LARGEST)
    if memory is not None:
        row = torch.zeros(1, int(like.shape[-1]), dtype=like.dtype, device=memory.cells.device)
        for way in (memory, None):
            _launch(row, row, row[0], 1.0, way)
        memory.settle()


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
