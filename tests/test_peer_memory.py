"""Sums over ranks that write to each other's memory: right, in turn, and never a wait without an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreter import INTERPRETED, assert_passes_interpreted, starts_the_interpreter
from ranks import only_on, values
from torch import Tensor, distributed, nn
from torch.fx import GraphModule
from torch.nn import functional
from traced import trace
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import piecewise_graph as pg
from piecewise_graph.compiler.summed_norms import with_summed_norms
from piecewise_graph.errors import RankError
from piecewise_graph.ranks import peer_memory
from piecewise_graph.ranks.collectives import all_reduce, alone
from piecewise_graph.ranks.exchange import Ranks, ranks_of_groups
from piecewise_graph.ranks.summed_norm import all_reduce_add_norm, block_of, reference

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


def _sums(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> int:
    """How many programs have run, when each sum was what it should be."""
    _, memory = prepared(dtype)
    assert memory is not None
    rank, count, name = (
        distributed.get_rank(),
        distributed.get_world_size(),
        distributed.group.WORLD.group_name,
    )
    for seed, shape in enumerate(shapes):
        apart = rows_of(rank, shape, seed, dtype).t().contiguous().t()  # rows do not follow each other
        found, served = all_reduce(apart, str(name)), memory.serves(apart)
        each = [rows_of(other, shape, seed, dtype).float() for other in range(count)]
        whole = sum(each[1:], each[0]).to(dtype)
        off = 0.0 if served else 0.01  # a library adds in an order of its own, and rounds each sum
        torch.testing.assert_close(found, whole, rtol=off, atol=off)
        assert found.is_contiguous()
    return int(memory.turns.sum())


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


def _compiled(model: nn.Module) -> Any:
    return pg.compile(
        model, token_dim={"x": 0}, compiler="eager", capture_sizes=[4, 8], max_tokens=8, rank_timeout=20.0
    )


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


class Normed(Summed):
    """Sums, each added to what came before and normalised as in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaRMSNorm(WIDTH).requires_grad_(False)
        self.norm.weight.copy_(torch.arange(1.0, WIDTH + 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for weight in self.weights:
            y = functional.linear(x, weight)
            distributed.all_reduce(y)
            hidden = hidden + y
            x = self.norm(hidden)
        return x


def _normed(counts: Sequence[int]) -> int:
    """Rows that the fused op has added up and normalised, when each answer was that of the model."""
    model = Normed()
    compiled = pg.compile(model, token_dim={"x": 0}, capture_sizes=[4, 8], max_tokens=8, rank_timeout=60.0)
    with torch.no_grad():
        for tokens in counts:
            x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    memory = peer_memory.peer_memory(distributed.group.WORLD, torch.float32, WIDTH)
    return 0 if memory is None else int(memory.turns.sum())


@needs_kernels_of_a_cpu
@pytest.mark.slow
def test_a_sum_is_added_and_normalised_by_one_op(tmp_path: Path) -> None:
    counts = [3, 8, 3]
    for turns in values(2, summing, str(tmp_path), _normed, counts):
        assert turns >= 2 * sum(counts)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


# What becomes of `y`, a sum over ranks: whether it is one op with what follows.
FOLLOWING: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], bool]] = {
    "hidden is read on": (lambda y, x, w: norm(h := x + y, w) + h, True),
    "and added again": (lambda y, x, w: [norm(h := y + x, w), h * 2], True),
    "sum is read twice": (lambda y, x, w: [norm(x + y, w), y * 2], False),
    "weight is computed": (lambda y, x, w: norm(x + y, 1 + w), False),
    "residual is one row": (lambda y, x, w: norm(x[:1] + y, w), False),
    "rows of other size": (lambda y, x, w: norm((x + y)[:, :4], w[:4]), False),
    "mean of columns": (lambda y, x, w: norm((x + y).t(), w[:1]), False),
    "float64": (lambda y, x, w: norm(x.double() + y.double(), w.double()), False),
    "hidden is written": (lambda y, x, w: [norm(h := x + y, w), h.add_(1)], True),
    "hidden is written before": (lambda y, x, w: norm((h := x + y).add_(1), w) * h, False),
    "a view is written before": (lambda y, x, w: [(h := x + y)[1:].add_(1), norm(h, w)], False),
}


@needs_kernels_of_a_cpu
@pytest.mark.parametrize("following", FOLLOWING)
def test_which_sums_are_one_op_with_what_follows(following: str) -> None:
    function, is_one = FOLLOWING[following]

    def model(x: Tensor, other: Tensor, weight: Tensor) -> Any:
        return function(torch.ops.piecewise.all_reduce.default(x * 2, "group"), other, weight)

    def passed(gm: GraphModule) -> tuple[bool, bool, Any, Any]:
        made = with_summed_norms(gm)
        fused = any("all_reduce_add_norm" in str(node.target) for node in made.graph.nodes)
        args = [torch.randn(3, WIDTH) for _ in range(2)] + [torch.randn(WIDTH)]
        left = any(node.target is torch.ops.piecewise.all_reduce.default for node in made.graph.nodes)
        return fused, left, gm(*map(torch.clone, args)), made(*map(torch.clone, args))

    args = torch.randn(3, WIDTH), torch.randn(3, WIDTH), torch.randn(WIDTH)
    with alone():
        ((fused, left, expected, found),) = trace(model, *args, look=passed).seen
    assert (fused, left) == (is_one, not is_one)
    torch.testing.assert_close(found, expected)


def _norms(shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None:
    ranks, _ = prepared(dtype)
    rank, count, group = distributed.get_rank(), distributed.get_world_size(), distributed.group.WORLD
    for seed, shape in enumerate(shapes):
        like, block = torch.empty(shape, dtype=dtype), block_of(shape[-1])
        peer_memory.prepare(ranks, group, like, 20.0, block, 16 * block * dtype.itemsize)
        residual = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        weight = torch.linspace(-1, 2, shape[-1]).to(dtype)
        x = rows_of(rank, shape, seed, dtype)
        found = all_reduce_add_norm(x, residual, weight, 1e-5, str(group.group_name))
        total = sum(rows_of(other, shape, seed, dtype).float() for other in range(count)).to(dtype)
        torch.testing.assert_close(found, reference(total, residual, weight, 1e-5))
        memory = peer_memory.peer_memory(group, dtype, block)
        assert memory is not None and int(memory.turns.sum()) == (shape[0] if 0 < shape[0] <= 16 else 0)
        memory.turns.zero_(), memory.cells.fill_(torch.iinfo(memory.cells.dtype).min)
        distributed.barrier()


@needs_kernels_of_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_any_size_are_added_and_normalised(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [[3, 64], [16, 16], [1, 100], [17, 64], [0, 64], [2, 1], [5, 1000]]
    values(2, summing, str(tmp_path), _norms, shapes, dtype)


def _refused_on_one(folder: str) -> Any:
    def refuses(original: Any, *args: Any) -> Any:
        original(*args)
        raise RuntimeError("no peer access")

    with (
        mock.patch("piecewise_graph._torch.memory_of_peers", on_files(folder)),
        only_on(1, "piecewise_graph._torch.memory_of_peers", refuses),
    ):
        return _served([3, 3, 8])


@needs_kernels_of_a_cpu
def test_where_one_rank_has_no_such_memory_a_library_sums(tmp_path: Path) -> None:
    for turns, counted, page in values(2, _refused_on_one, str(tmp_path)):
        assert "by kernels" not in page
        assert turns == 0 and counted["replays"] == 1 and not counted["fallbacks"]


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
    heard = []
    for call in (lambda: compiled(x), lambda: compiled(torch.ones(2, WIDTH)), lambda: pg.explain(compiled)):
        try:
            call()
            heard.append("")
        except RankError as error:
            heard.append(str(error))
    return heard


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
    assert_passes_interpreted(__file__)
