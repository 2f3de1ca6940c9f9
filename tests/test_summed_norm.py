"""A sum over ranks, its residual and their norm as one op: which graphs have it, and that it is right.

test_peer_memory.py runs this file in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import WIDTH, Summed, needs_kernels_of_a_cpu, prepared, rows_of, summing
from ranks import values
from torch import Tensor, distributed
from torch.fx import GraphModule
from torch.nn import functional
from traced import trace
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import piecewise_graph as pg
from piecewise_graph.compiler.summed_norms import with_summed_norms
from piecewise_graph.kernels.added_norm import block_of, reference
from piecewise_graph.ranks import peer_memory
from piecewise_graph.ranks.collectives import alone
from piecewise_graph.ranks.summed_norm import all_reduce_add_norm


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
    memory = peer_memory.peer_memory(distributed.group.WORLD, torch.float32, block_of(WIDTH))
    return 0 if memory is None else int(memory.turns.sum())


@needs_kernels_of_a_cpu
@pytest.mark.slow
def test_a_sum_is_added_and_normalised_by_one_op(tmp_path: Path) -> None:
    counts = [3, 8, 3]
    for turns in values(2, summing, str(tmp_path), _normed, counts):
        assert turns >= 2 * sum(counts)


def norm(x: Tensor, weight: Tensor, then: Callable[[], object] | None = None, **mean: Any) -> Tensor:
    wide = x.to(torch.float32)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True, **mean) + 1e-5)
    if then is not None:
        then()
    return weight * (wide * root).to(x.dtype)


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
    "mean in float64": (lambda y, x, w: norm(x + y, w, dtype=torch.float64), False),
    "rows apart": (lambda y, x, w: norm(x.t().contiguous().t() + y, w), False),
    "weight is written": (lambda y, x, w: norm(x + y, w, then=lambda: w.add_(1)), False),
    "residual is written": (lambda y, x, w: norm(x + y, w, then=lambda: x.add_(1)), False),
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
@pytest.mark.parametrize("is_residual", [False, True])
def test_what_is_summed_may_be_written_before_it_is_added(is_residual: bool) -> None:
    """By whatever name, the residual's too: the op would read it afterwards."""

    def model(x: Tensor, other: Tensor, weight: Tensor) -> Tensor:
        y = x * 2
        summed = torch.ops.piecewise.all_reduce.default(y, "group")
        if is_residual:
            other = y.add_(other)
        else:
            y.zero_()
        return norm(other + summed, weight)

    def fused(gm: GraphModule) -> bool:
        return any("all_reduce_add_norm" in str(node.target) for node in with_summed_norms(gm).graph.nodes)

    with alone():
        args = torch.randn(3, WIDTH), torch.randn(3, WIDTH), torch.randn(WIDTH)
        assert trace(model, *args, look=fused).seen == [False]


@needs_kernels_of_a_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_of_any_size_are_added_and_normalised(tmp_path: Path, dtype: torch.dtype) -> None:
    shapes = [[3, 64], [16, 16], [1, 100], [17, 64], [0, 64], [2, 1], [5, 1000]]
    values(2, summing, str(tmp_path), _norms, shapes, dtype)
