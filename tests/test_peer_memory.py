"""Sums over ranks that write to each other's memory: right, in turn, and never a wait without an end."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import assert_passes_interpreted, starts_the_interpreter
from peers import LARGEST, WIDTH, Summed, needs_kernels_of_a_cpu, on_files, prepared, rows_of, summing
from ranks import only_on, values
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import piecewise_graph as pg
from piecewise_graph.errors import RankError
from piecewise_graph.ranks import peer_memory
from piecewise_graph.ranks.collectives import all_reduce


def _sums(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
    """How many programs have run, when each sum was what it should be."""
    _, memory = prepared(dtype)
    assert memory is not None
    rank, count, name = (
        distributed.get_rank(),
        distributed.get_world_size(),
        distributed.group.WORLD.group_name,
    )
    before = int(memory.turns.sum())
    for seed, shape in enumerate(shapes):
        apart = rows_of(rank, shape, seed, dtype).t().contiguous().t()  # rows do not follow each other
        found, served = all_reduce(apart, str(name)), memory.serves(apart)
        each = [rows_of(other, shape, seed, dtype).float() for other in range(count)]
        whole = sum(each[1:], each[0]).to(dtype)
        off = 0.0 if served else 0.01  # a library adds in an order of its own, and rounds each sum
        torch.testing.assert_close(found, whole, rtol=off, atol=off)
        assert found.is_contiguous()
    return int(memory.turns.sum()) - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("count", [2, 3])
@needs_kernels_of_a_cpu
def test_sums_are_those_of_the_ranks(tmp_path: Path, count: int, dtype: torch.dtype) -> None:
    largest = LARGEST // (count - 1) // dtype.itemsize
    chance = torch.Generator().manual_seed(count)
    shapes = [
        torch.randint(0, high, (2,), generator=chance).tolist() for high in (3, 40, 90) for _ in range(6)
    ]
    shapes += [[4, 128], [1, 1], [1, largest], [2, largest]]
    served = [rows * columns for rows, columns in shapes if 0 < rows * columns <= largest // 512 * 512]
    turns = values(count, summing, str(tmp_path), _sums, shapes, dtype)
    assert turns == [sum(-(-elements // 512) for elements in served)] * count


def _compiled(model: nn.Module, **options: Any) -> Any:
    usual = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, "rank_timeout": 20.0}
    return pg.compile(model, token_dim={"x": 0}, **usual | options)


def _served(counts: Sequence[int]) -> tuple[int, dict[str, int], str]:
    """Programs that ran, the counters and the report, when each answer was that of the model."""
    model = Summed()
    compiled = _compiled(model)
    with torch.no_grad():
        for tokens in counts:
            x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
            torch.testing.assert_close(compiled(x), model(x))
    memory = peer_memory.peer_memory(distributed.group.WORLD, torch.float32)
    turns = 0 if memory is None else int(memory.turns.sum())
    return turns, pg.counters.snapshot(), str(pg.explain(compiled))


@needs_kernels_of_a_cpu
def test_sums_of_captured_segments_take_turns_too(tmp_path: Path) -> None:
    counts = [3, 3, 8, 2, 7, 3]
    for turns, counted, page in values(2, summing, str(tmp_path), _served, counts):
        assert "of 2; by kernels: float32 sums up to 0.1 MiB" in page
        assert counted["captures"] == 2 and counted["replays"] == 4 and not counted["fallbacks"]
        assert turns >= 2 * len(counts)  # of each call two sums, each of one program


def _refuses(original: Any, *args: Any) -> Any:
    if original.__name__ == "addresses":  # as in a collective, which all take part in
        original(*args)
    raise RuntimeError("no peer access")


def _refused_on_one(folder: str, step: str) -> Any:
    with on_files(folder), only_on(1, f"piecewise_graph._torch.{step}", _refuses):
        return _served([3, 3, 8])


@needs_kernels_of_a_cpu
@pytest.mark.parametrize("step", ["shareable_memory", "addresses_of_peers"])
def test_where_one_rank_has_no_such_memory_a_library_sums(tmp_path: Path, step: str) -> None:
    for turns, counted, page in values(2, _refused_on_one, str(tmp_path), step):
        assert "by kernels" not in page
        assert turns == 0 and counted["replays"] == 1 and not counted["fallbacks"]


@needs_kernels_of_a_cpu
def test_a_group_of_one_has_no_such_memory(tmp_path: Path) -> None:
    ((turns, counted, _),) = values(1, summing, str(tmp_path), _served, [3, 3, 8])
    assert turns == 0 and counted["replays"] == 1 and not counted["fallbacks"]


class Crossed(nn.Module):
    """Sums over rows of a mesh of ranks, then over its columns."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.groups = [mesh.get_group(dim) for dim in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = x * 1.0
            distributed.all_reduce(x, group=group)
        return x + 1


def _crossed() -> list[float]:
    compiled = _compiled(Crossed(init_device_mesh("cpu", (2, 2))))
    x = torch.full((4, WIDTH), float(distributed.get_rank()))
    return [float(compiled(x)[0, 0]) for _ in range(2)]


@needs_kernels_of_a_cpu
def test_groups_of_equal_size_do_not_share_memory(tmp_path: Path) -> None:
    assert values(4, summing, str(tmp_path), _crossed) == [[7.0, 7.0]] * 4


def _two_timeouts() -> list[str]:
    """What two models and a loop hear, with a timeout each, when the first one's sum has waited in vain."""
    model = Summed()
    found = [_compiled(model), _compiled(Summed(), rank_timeout=21.0)]
    x = torch.ones(4, WIDTH)
    for compiled in found:
        compiled(x)
    peer_memory.peer_memory(distributed.group.WORLD, torch.float32).told.fill_(2)  # type: ignore[union-attr]
    part = parallelize_module(nn.Linear(2, 2), init_device_mesh("cpu", (2,)), ColwiseParallel())
    calls = [partial(compiled, x) for compiled in found]
    return [_heard(ask) for ask in (*calls, pg.ranks_of(part, 22.0).check)]


@needs_kernels_of_a_cpu
def test_all_models_of_a_group_hear_of_a_sum_that_waited_in_vain(tmp_path: Path) -> None:
    for heard in values(2, summing, str(tmp_path), _two_timeouts):
        assert len(heard) == 3 and all("rows of rank 1 in vain" in each for each in heard)


def _heard(call: Callable[[], object]) -> str:
    try:
        call()
    except RankError as error:
        return str(error)
    return ""


def _left_alone() -> list[str]:
    """What rank 0 hears when rank 1 makes no second call."""
    model = Summed()
    compiled = _compiled(model)
    x = torch.ones(4, WIDTH)
    compiled(x), compiled(x)
    memory = next(iter(peer_memory._memories.values()))
    assert memory is not None
    # All wait for 20 seconds, by the clock that a GPU has. Here looks are counted, a few seconds of them.
    memory.__dict__["patience"] = 1
    if distributed.get_rank() == 1:
        return []
    compiled(x)
    calls = (lambda: compiled(x), lambda: compiled(torch.ones(2, WIDTH)), lambda: pg.explain(compiled))
    return [_heard(call) for call in calls]


@needs_kernels_of_a_cpu
def test_a_sum_waits_for_a_rank_no_longer_than_it_may(tmp_path: Path) -> None:
    (replayed, padded, explained), _ = values(2, summing, str(tmp_path), _left_alone)
    assert replayed == padded and "has waited for the rows of rank 1 in vain" in replayed and not explained


def _two_on_one_gpu(patience: int) -> list[peer_memory.PeerMemory]:
    """Memory of two ranks that are streams of one GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    words = torch.full((2, 8 * 3 * 2 * 512), torch.iinfo(torch.int16).min, dtype=torch.int16, device=device)
    offset = words.shape[1]
    count = partial(torch.zeros, dtype=torch.int32, device=device)
    return [
        peer_memory.PeerMemory(
            rank, 512, words[rank], torch.tensor([-rank * offset, (1 - rank) * offset], device=device),
            count(8), count(1), torch.zeros(1, dtype=torch.int32, pin_memory=True), patience,
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("columns", [512, 500])
def test_sums_of_graphs_of_a_gpu_take_turns(rows: int, columns: int) -> None:
    """In one call after another of the same graphs, each behind a kernel and before one that reads it."""
    gc.collect()  # a graph of another test that is destroyed while one is captured ends the capture
    ranks, streams = _two_on_one_gpu(20_000), [torch.cuda.Stream() for _ in range(2)]
    xs = [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in ranks]
    graphs, sums = [], []
    for memory, stream, x in zip(ranks, streams, xs, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            first = memory.sum(x + 1)
            sums.append(memory.sum(first * 0.5) + 1)
        graphs.append(graph)
    for call in range(7):
        for x in xs:
            x.normal_()
            x[:, call::3] = -0.0
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        both = ((xs[0] + 1).float() + (xs[1] + 1).float()).bfloat16() * 0.5
        wanted = (both.float() * 2).bfloat16() + 1
        assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], wanted)
        assert [memory.late_rank() for memory in ranks] == [None, None]


@pytest.mark.gpu
def test_a_gpu_waits_for_a_rank_no_longer_than_it_may() -> None:
    waiting, _ = _two_on_one_gpu(200)
    x = torch.randn(8, 512, device="cuda", dtype=torch.bfloat16)
    waiting.sum(x)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(10):  # the first one may have compiled
        waiting.sum(x)
    torch.cuda.synchronize()
    assert waiting.late_rank() == 1 and time.monotonic() - began < 0.1


@starts_the_interpreter
def test_kernels_on_a_cpu() -> None:
    """And those of test_summed_norm.py: their ranks are forked from one server, which takes long to start."""
    assert_passes_interpreted(__file__, str(Path(__file__).with_name("test_summed_norm.py")))
