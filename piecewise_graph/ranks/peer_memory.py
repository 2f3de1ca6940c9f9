"""Memory that the ranks of one host write to directly, for sums of a few rows (kernels/peer_sum.py).

Note [Agreed before]
To make it is an exchange among the ranks, which a forward is not the place for. Who builds a program for
several ranks makes it before (`prepare`), by the same calls on all ranks. It is there on all or on none.

Note [One order]
All sums over one memory follow each other on the device, as calls of one thread on one stream do, or on
streams that wait for each other. Two streams at once would take each other's turns.

Note [How large]
Every rank writes all of its rows to every other one, which costs a link more the more ranks there are. For
large sums a library's all-reduce cuts the rows into parts. bench_tensor_parallel.json has the times of both.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from piecewise_graph import _torch
from piecewise_graph.kernels.launch import Launcher, dependent_launches, kernels_serve
from piecewise_graph.ranks.exchange import Ranks

T = TypeVar("T")
BLOCK, _WARPS = 512, 4  # elements that a program adds up: 8 bytes of each rank per thread
WORDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_LARGEST = 8 << 20  # bytes of a sum, over 2 ranks; less over more (Note [How large])

_memories: dict[tuple[Any, torch.dtype, int], PeerMemory | None] = {}


@dataclass(frozen=True)
class PeerMemory:
    """What kernels of peer_sum.py need, for one group of ranks, one dtype, and programs of one size.

    Attributes:
        block: elements of a program.
        patience: milliseconds that a sum waits for a rank.
    """

    rank: int
    block: int
    cells: Tensor
    peers: Tensor
    turns: Tensor
    late: Tensor
    told: Tensor
    patience: int

    def serves(self, x: Tensor) -> bool:
        """Whether there are cells for as many elements."""
        return x.device == self.cells.device and 0 < x.numel() <= len(self.turns) * self.block

    def arguments(self) -> list[Any]:
        """Of a launch, from `cells` to `told`; then `rank` and `patience`."""
        return [self.cells, self.peers, self.turns, self.late, self.told, self.rank, self.patience]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the ranks' `x`: contiguous, in x's dtype, equal on all ranks."""
        x, total = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        size, block, dependent = x.numel(), self.block, dependent_launches(x.device)
        constants = (len(self.peers), block, size % block == 0, x.is_cuda, dependent)
        _launcher(dependent)((-(-size // block), 1, 1), [x, total, size, *self.arguments()], *constants)
        return total

    def settle(self) -> None:
        """Wait for the sums that were launched: later ones may come on another stream (Note [One order])."""
        if self.cells.is_cuda:
            torch.cuda.synchronize(self.cells.device)

    def __str__(self) -> str:
        largest = len(self.turns) * self.block * self.cells.element_size()
        kind = "sums" if self.block == BLOCK else f"sums and norms of {self.block} columns"
        return f"{kind} up to {largest / 2**20:.1f} MiB"

    def late_rank(self) -> int | None:
        """A rank that this one has waited for in vain."""
        found = int(self.told[0])
        return found - 1 if found else None


def peer_memory(group: Any, dtype: torch.dtype, block: int = BLOCK) -> PeerMemory | None:
    """That of a process group; None where there is none."""
    return _memories.get((group, dtype, block))


def prepare(
    ranks: Ranks, group: Any, like: Tensor, timeout: float, block: int = BLOCK, largest: int | None = None
) -> PeerMemory | None:
    """Make the memory for sums of `like`'s dtype over a process group, where all its ranks can.

    Collective: all of `ranks` call it alike.

    Args:
        ranks: who decide. A group of others, or of only some of them, has no such memory.
        timeout: seconds that a sum waits for a rank, if no other call has made the group's memory.
        block: elements of a program.
        largest: bytes of a sum over 2 ranks (Note [How large]).

    Returns:
        the memory if this call has made it, else None.
    """
    key, made = (group, like.dtype, block), None
    if not ranks.several or tuple(distributed.get_process_group_ranks(group)) != ranks.members:
        return None
    if key not in _memories:
        made = _made_by_all(ranks, group, like, timeout, block, largest or _LARGEST)
        _memories[key] = made  # only now: an exchange that failed is to be tried again by all
        if made is not None and block == BLOCK:
            # Each variant of the kernel: a capture that is its first use would have to load it.
            for size in (block, 1):
                made.sum(torch.zeros(size, dtype=like.dtype, device=made.cells.device))
            made.settle()
    if (memory := _memories[key]) is not None:
        ranks.watch(f"{str(like.dtype).removeprefix('torch.')} {memory}", memory.late_rank)
    return made


def _made_by_all(
    ranks: Ranks, group: Any, like: Tensor, timeout: float, block: int, largest: int
) -> PeerMemory | None:
    """On all ranks or on none, in steps: who cannot go on says so before the others wait for it."""
    places = ranks.answers("write to each other's memory", _host_and_device(like))
    if None in places or len({place[0] for place in places if place}) > 1:
        return None
    programs = largest // (ranks.count - 1) // like.element_size() // block
    size, word = programs * 3 * ranks.count * block, WORDS[like.dtype]
    cells = _or_none(lambda: _torch.shareable_memory(size, word, like.device))
    if not ranks.all("have memory that others write to", cells is not None) or cells is None:
        return None
    cells.fill_(torch.iinfo(word).min)  # the bits of -0.0
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    addresses = _or_none(lambda: _torch.addresses_of_peers(cells, group))
    if not ranks.all("reach each other's memory", addresses is not None) or addresses is None:
        return None
    apart = [(there - cells.data_ptr()) // like.element_size() for there in addresses]
    turns = torch.zeros(programs, dtype=torch.int32, device=like.device)
    peers, flags = torch.tensor(apart, device=like.device), _flags(group, like.device)
    return PeerMemory(ranks.rank, block, cells, peers, turns, *flags, int(timeout * 1000))


def _or_none(make: Callable[[], T]) -> T | None:
    """What a step gives; None where there is no room, no peer access, or a container that forbids it."""
    try:
        return make()
    except RuntimeError:
        return None


@cache
def _flags(group: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """`late` and `told` of all memories of a group: who has waited in vain for one waits for no other."""
    late = torch.zeros(1, dtype=torch.int32, device=device)
    return late, torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")


def _host_and_device(like: Tensor) -> tuple[str, int] | None:
    """Where this rank's memory lies; None where no kernel can add it up."""
    if not kernels_serve(like) or like.dtype not in WORDS or find_spec("triton") is None:
        return None
    return socket.gethostname(), like.device.index or 0


@cache
def _launcher(dependent: bool) -> Launcher:
    from piecewise_graph.kernels.peer_sum import sum_over_peers

    return Launcher(sum_over_peers, num_warps=_WARPS, launch_pdl=dependent)
