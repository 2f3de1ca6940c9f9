"""Ranks that write to each other's memory on a CPU: processes that map the files of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import INTERPRETED
from torch import Tensor, distributed, nn
from torch.nn import functional

from piecewise_graph.ranks import peer_memory
from piecewise_graph.ranks.exchange import Ranks, ranks_of_groups

needs_kernels_of_a_cpu = pytest.mark.skipif(not INTERPRETED, reason="these ranks have no GPUs")
LARGEST, WIDTH = 64 << 10, 8
_mapped: list[Tensor] = []  # what lies behind addresses


def on_files(folder: str) -> Callable[..., tuple[Tensor, list[int]]]:
    """Memory of ranks that are processes of one CPU: each maps the files of all."""

    def memory(group: Any, size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, list[int]]:
        paths = [Path(folder) / f"{dtype}-{size}-{rank}" for rank in range(group.size())]
        paths[group.rank()].write_bytes(bytes(size * dtype.itemsize))
        distributed.barrier(group)
        cells = [torch.from_file(str(path), shared=True, size=size, dtype=dtype) for path in paths]
        _mapped.extend(cells)
        return cells[group.rank()], [each.data_ptr() for each in cells]

    return memory


def summing(folder: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function` where ranks can write to each other's memory, of 64 KiB."""
    with (
        mock.patch("piecewise_graph._torch.memory_of_peers", on_files(folder)),
        mock.patch.object(peer_memory, "_LARGEST", LARGEST),
    ):
        return function(*args)


def prepared(dtype: torch.dtype) -> tuple[Ranks, peer_memory.PeerMemory | None]:
    group: Any = distributed.group.WORLD
    ranks = ranks_of_groups([group.group_name], 20.0)
    peer_memory.prepare(ranks, group, torch.empty(0, dtype=dtype), 20.0)
    return ranks, peer_memory.peer_memory(group, dtype)


def rows_of(rank: int, shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(100 * seed + rank))
    x[..., ::3] = -0.0  # the value that is never sent
    return x.to(dtype)


class Summed(nn.Module):
    """Each rank multiplies by a weight of its own, and all sum; twice."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(distributed.get_rank())
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = functional.linear(x, weight)
            distributed.all_reduce(x)
            x = x.relu()
        return x
