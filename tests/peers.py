"""Ranks that write to each other's memory on a CPU: processes that map the files of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def on_files(folder: str) -> Iterator[None]:
    """Memory of ranks that are processes of one CPU: each maps the files of all."""
    files: dict[int, Path] = {}

    def shareable(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        own = Path(folder) / f"{len(files)}-{distributed.get_rank()}"
        own.write_bytes(bytes(size * dtype.itemsize))
        memory = torch.from_file(str(own), shared=True, size=size, dtype=dtype)
        files[memory.data_ptr()] = own
        return memory

    def addresses(memory: Tensor, group: Any) -> list[int]:
        distributed.barrier(group)
        number, _ = files[memory.data_ptr()].name.split("-")
        kind = {"size": memory.numel(), "dtype": memory.dtype}
        cells = [
            torch.from_file(f"{folder}/{number}-{rank}", shared=True, **kind)
            for rank in distributed.get_process_group_ranks(group)
        ]
        cells[group.rank()] = memory
        _mapped.extend(cells)
        return [each.data_ptr() for each in cells]

    with (
        mock.patch("piecewise_graph._torch.shareable_memory", shareable),
        mock.patch("piecewise_graph._torch.addresses_of_peers", addresses),
    ):
        yield


def summing(folder: str, function: Callable[..., Any], *args: Any) -> Any:
    """`function` where ranks can write to each other's memory, of 64 KiB."""
    with (
        on_files(folder),
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
