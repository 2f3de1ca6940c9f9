"""`piecewise::all_reduce_add_norm`: a sum over ranks, added to a residual, and the RMS norm of the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.added_norm import add_norm, block_of, launch, serves
from piecewise_graph.kernels.launch import kernels_serve
from piecewise_graph.ranks.collectives import all_reduce, memory_for
from piecewise_graph.ranks.exchange import Ranks
from piecewise_graph.ranks.peer_memory import PeerMemory, prepare

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define(
    "all_reduce_add_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, str group) "
    "-> (Tensor, Tensor)"
)
_LARGEST = 1 << 20  # bytes of a sum over 2 ranks that is normalised by the same launch


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


def prepare_norms(ranks: Ranks, group: Any, like: Tensor, timeout: float) -> None:
    """Make the memory that rows of `like`'s kind are summed and normalised through; see `prepare`.

    Both variants of the kernel run once: a capture that is their first use would have to load them.
    """
    memory = prepare(ranks, group, like, timeout, block_of(int(like.shape[-1])), _LARGEST)
    if memory is not None:
        row = torch.zeros(1, int(like.shape[-1]), dtype=like.dtype, device=memory.cells.device)
        _launch(row, row, row[0], 1.0, memory)
        add_norm(row, row, row[0], 1.0)
        memory.settle()


def _all_reduce_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    columns = x.shape[-1]
    served = kernels_serve(x) and serves(x) and x.numel()
    memory = memory_for(group, x.dtype, block_of(columns)) if served else None
    if memory is None or x.numel() // columns > len(memory.turns):
        return add_norm(all_reduce(x, group), residual, weight, epsilon)
    return _launch(x, residual, weight, epsilon, memory)


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, memory: PeerMemory
) -> tuple[Tensor, Tensor]:
    """x is this rank's part of the sum."""
    return launch(x, residual, weight, epsilon, sent=tuple(memory.arguments()), ranks=len(memory.peers))


_library.impl("all_reduce_add_norm", _all_reduce_add_norm, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::all_reduce_add_norm", lib=_library)
def _(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)
