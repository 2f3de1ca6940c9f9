"""Memory that the ranks of one host write to directly, for sums of a few rows (kernels/peer_sum.py).

Note [Agreed before]
To make it is an exchange among the ranks, which a forward is not the place for. Who builds a program for
several ranks makes it before (`prepare`), by the same calls on all ranks. It is there on all or on none.

Note [How large]
Every rank writes all of its rows to every other one, which costs a link more the more ranks there are. For
large sums a library's all-reduce cuts the rows into parts. bench_tensor_parallel.json has the times of both.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.kernels.launch import Launcher, dependent_launches, kernels_serve
from piecewise_graph.ranks.exchange import Ranks

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
) -> None:
    """Make the memory for sums of `like`'s dtype over a process group, where all its ranks can.

    Collective: all of `ranks` call it alike.

    Args:
        ranks: who decide. A group of only some of them has no such memory.
        timeout: seconds that a sum waits for a rank.
        block: elements of a program.
        largest: bytes of a sum over 2 ranks (Note [How large]).
    """
    key = group, like.dtype, block
    if key in _memories or group.size() != ranks.count:
        return
    _memories[key] = None
    here = _host_and_device(like)
    places = ranks.answers("write to each other's memory", here)
    if None in places or len({place[0] for place in places if place}) > 1:
        return
    try:
        made = _made(ranks, group, like, timeout, block, largest or _LARGEST)
    except RuntimeError:  # no peer access, or a container that forbids to share memory
        made = None
    if ranks.all("have memory that others write to", made is not None) and made is not None:
        _memories[key] = made
        kind = str(like.dtype).removeprefix("torch.")
        ranks.watch(f"{kind} {made}", made.late_rank)


def _host_and_device(like: Tensor) -> tuple[str, int] | None:
    """Where this rank's memory lies; None where no kernel can add it up."""
    if not kernels_serve(like) or like.dtype not in WORDS or find_spec("triton") is None:
        return None
    return socket.gethostname(), like.device.index or 0


def _made(ranks: Ranks, group: Any, like: Tensor, timeout: float, block: int, largest: int) -> PeerMemory:
    word, size = WORDS[like.dtype], like.element_size()
    programs = largest // (ranks.count - 1) // size // block
    cells, addresses = _torch.memory_of_peers(group, programs * 3 * ranks.count * block, word, like.device)
    cells.fill_(torch.iinfo(word).min)  # the bits of -0.0
    count = partial(torch.zeros, dtype=torch.int32, device=like.device)
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
    return PeerMemory(
        ranks.rank,
        block,
        cells,
        torch.tensor([(there - cells.data_ptr()) // size for there in addresses], device=like.device),
        count(programs),
        count(1),
        torch.zeros(1, dtype=torch.int32, pin_memory=like.is_cuda),
        int(timeout * 1000),
    )


@cache
def _launcher(dependent: bool) -> Launcher:
    from piecewise_graph.kernels.peer_sum import sum_over_peers

    return Launcher(sum_over_peers, num_warps=_WARPS, launch_pdl=dependent)
