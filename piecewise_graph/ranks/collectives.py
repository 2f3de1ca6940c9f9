"""Collectives as ops that a segment may hold.

Note [Ops of our own]
Those of torch for graphs (`_c10d_functional`) return at once and have a second op that waits. On a GPU their
work goes to another stream, with events before and after it. A decode step of 32 layers has 64 of them, each
of a few KiB: these run on the caller's stream, and are done when what follows them there begins. They return
new memory, so that the segments that hold them write nothing.

Note [Alone]
What one rank does by itself (a proof, a trial of padding, a plan) may run a segment with collectives in it,
while no other rank does. There a collective is the identity, or repeats what this rank holds: it treats all
rows alike, which is all that such a run asks of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, distributed

from piecewise_graph import _torch
from piecewise_graph.ranks.peer_memory import BLOCK, PeerMemory, peer_memory

_library = torch.library.Library("piecewise", "FRAGMENT")
_library.define("all_reduce(Tensor x, str group) -> Tensor")
_library.define("all_gather(Tensor x, int dim, int size, str group) -> Tensor")

_alone: ContextVar[bool] = ContextVar("piecewise_graph_alone", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Inside, collectives exchange nothing (Note [Alone])."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


def all_reduce(x: Tensor, group: str) -> Tensor:
    """The sum of the ranks' `x`.

    Args:
        x: of one shape and dtype on all ranks.
        group: name of the process group.

    Returns:
        a contiguous tensor of x's shape and dtype, the same on all ranks.
    """
    return torch.ops.piecewise.all_reduce(x, group)


def memory_for(group: str, dtype: torch.dtype, block: int = BLOCK) -> PeerMemory | None:
    """Memory that the ranks of a group write to; None where there is none, and inside of `alone`."""
    return None if _alone.get() else peer_memory(_torch.process_group(group), dtype, block)


def _all_reduce(x: Tensor, group: str) -> Tensor:
    memory = memory_for(group, x.dtype)
    if memory is not None and memory.serves(x):
        return memory.sum(x)
    result = x.clone(memory_format=torch.contiguous_format)
    if not _alone.get():
        distributed.all_reduce(result, group=_torch.process_group(group))
    return result


_library.impl("all_reduce", _all_reduce, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::all_reduce", lib=_library)
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The ranks' `x` one after another.

    Args:
        x: a rank's part, as `torch.chunk` cuts it: all of one size but the last ones, which may be smaller.
        dim: along which.
        size: of the result there.
        group: name of the process group.

    Returns:
        a contiguous tensor, the same on all ranks.
    """
    return torch.ops.piecewise.all_gather(x, dim, size, group)


def _all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    ranks: Any = _torch.process_group(group)
    count, dim = ranks.size(), dim % x.dim()
    longest = -(-size // count)
    part = x.movedim(dim, 0)
    if part.shape[0] < longest:
        part = torch.cat([part, part.new_zeros(longest - part.shape[0], *part.shape[1:])])
    part = part.contiguous()
    whole = part.new_empty(count * longest, *part.shape[1:])
    if _alone.get():
        whole.view(count, *part.shape).copy_(part)
    else:
        _torch.gather(whole, part, ranks)
    return whole[:size].movedim(0, dim).contiguous()


_library.impl("all_gather", _all_gather, "CompositeExplicitAutograd")


@torch.library.register_fake("piecewise::all_gather", lib=_library)
def _(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    dim %= x.dim()
    return x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
