"""The metadata of a speculative round: launches, device time, host time, and the torch reference beside it.

    python -m benchmarks.bench_metadata

    pytest benchmarks/bench_metadata.py --benchmark-json=FILE   # the promised rounds, with pytest-benchmark

32 requests with contexts of 1k to 8k tokens. Device time is that of a CUDA graph which holds many rounds one
after another, so gaps between kernels count; host time is that of a bound launch. A chain's round is
draft_steps, build_tree and accept_greedy; a tree's has select_branches per level, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.common import RESULTS, Mark, table, write
from piecewise_graph.custom_ops import metadata as md

REQUESTS = 32
MAX_CONTEXT = 8192
VOCAB = 128256
LIMIT_US, LIMIT_LAUNCHES = 15.0, 3
_COLUMNS = ("what", "page_size", "nodes", "topk", "launches", "device_us", "host_us", "reference_us", "ratio")


@dataclass(frozen=True)
class Call:
    """An op and its arguments, which it keeps alive."""

    op: md.MetadataOp
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, op: md.MetadataOp, *args: Any, **kwargs: Any) -> Call:
        return cls(op, args, kwargs)

    def bound(self) -> Callable[[], None]:
        return self.op.bind(*self.args, **self.kwargs)

    def reference(self) -> None:
        self.op.reference(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Case:
    """What is timed together."""

    what: str
    page_size: int
    nodes: int
    topk: int
    calls: Sequence[Call] = field(repr=False)
    promised: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_metadata.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "bench_metadata needs a CUDA device: without one the ops are their torch reference",
            file=sys.stderr,
        )
        return 1
    rows, marks = [], []
    for case in cases():
        row = measure(case)
        rows.append(row)
        print(row, flush=True)
        if case.promised:
            name = f"{case.what}, page size {case.page_size}, N = {case.nodes}"
            marks.append(Mark(f"{name}: kernels per round", row["launches"], LIMIT_LAUNCHES))
            marks.append(Mark(f"{name}: device us per round", row["device_us"], LIMIT_US))
    write(options.out, "python -m benchmarks.bench_metadata", rows, marks)
    print(table(rows, _COLUMNS))
    return 0


def cases() -> list[Case]:
    found = []
    for page_size in (1, 16):
        batch = make_batch(page_size)
        found += [
            Case("greedy chain round", page_size, n, 1, chain_round(batch, n), True) for n in (4, 8, 32)
        ]
        found += [Case(call.op.name, page_size, 32, 1, [call]) for call in chain_round(batch, 32)]
    single = make_batch(1)
    found += [Case("greedy tree round", 1, n, k, tree_round(single, k, 5, n)) for k, n in ((4, 16), (8, 32))]
    _, _, select, *_, build, accept = tree_round(single, 8, 5, 32)
    found += [Case(call.op.name, 1, 32, 8, [call]) for call in (select, build, accept)]
    found += [Case(call.op.name, 1, 4, 1, [call]) for call in sampling(single, 4)]
    found.append(Case("extend_batch", 16, 1, 1, [decode(make_batch(16))]))
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("nodes", [4, 8, 32])
def test_greedy_chain_round(benchmark: Any, nodes: int, page_size: int) -> None:
    launches = [call.bound() for call in chain_round(make_batch(page_size), nodes)]

    def round_of_launches() -> None:
        for launch in launches:
            launch()
        torch.cuda.synchronize()

    benchmark.extra_info["launches"] = len(launches)
    benchmark(round_of_launches)


def make_batch(page_size: int) -> md.Batch:
    """A page table as it looks after a while: pages in no order."""
    generator = torch.Generator().manual_seed(0)
    pages = (MAX_CONTEXT + 256) // page_size
    entries = torch.randperm(REQUESTS * pages, generator=generator).view(REQUESTS, pages) + 1
    block_table = torch.cat([torch.zeros(1, pages, dtype=torch.int64), entries]).int().cuda()
    requests = torch.randperm(REQUESTS, generator=generator).int() + 1
    lens = torch.randint(1024, MAX_CONTEXT, (REQUESTS,), generator=generator).int()
    return md.Batch(requests.cuda(), lens.cuda(), block_table, page_size)


def chain_round(batch: md.Batch, nodes: int) -> list[Call]:
    steps, size = nodes - 1, batch.size
    tree = md.Tree.allocate(batch, nodes=nodes)
    drafts = torch.randint(0, 2, (size, steps), device="cuda")
    target = torch.randint(0, 2, (size * nodes,), device="cuda")
    accepted = md.Accepted.allocate(batch, nodes=nodes, steps=steps)
    return [
        Call.of(md.draft_steps, batch, md.DraftSteps.allocate(batch, steps=steps, topk=1)),
        Call.of(md.build_tree, batch, batch.ints(size), drafts, tree),
        Call.of(md.accept_greedy, batch, tree.tokens, target, accepted),
    ]


def tree_round(batch: md.Batch, topk: int, steps: int, nodes: int) -> list[Call]:
    """Accepted paths permute the table in every round, as they do in a loop; lengths stay."""
    size = batch.size
    batch = md.Batch(batch.requests, batch.seq_lens, batch.table.clone(), batch.page_size)
    levels = md.DraftSteps.allocate(batch, steps=steps, topk=topk)
    branches = md.Branches.allocate(batch, steps=steps, topk=topk)
    tree = md.Tree.allocate(batch, nodes=nodes)
    calls = [Call.of(md.draft_steps, batch, levels)]
    for level in range(steps):
        shape = (size, topk if level else 1, topk)
        tokens = torch.randint(0, 4, shape, device="cuda")
        probs = torch.rand(shape, device="cuda")
        calls.append(Call.of(md.select_branches, batch.requests, level, probs, tokens, branches))
    listed = {"scores": branches.all_scores, "parents": branches.all_parents}
    target = torch.randint(0, 4, (size * nodes,), device="cuda")
    accepted = md.Accepted.allocate(batch, nodes=nodes, steps=steps)
    calls.append(Call.of(md.build_tree, batch, batch.ints(size), branches.all_tokens, tree, **listed))
    calls.append(Call.of(md.accept_greedy, batch, tree.tokens, target, accepted, mask=tree.mask))
    return calls


def decode(batch: md.Batch) -> Call:
    rows = md.ExtendRows.allocate(batch, batch.size)
    return Call.of(md.extend_batch, batch, batch.ints(batch.size) + 1, rows)


def sampling(batch: md.Batch, nodes: int) -> list[Call]:
    def probs(rows: int) -> Tensor:
        return torch.randn(batch.size, rows, VOCAB, device="cuda").softmax(-1)

    tokens = torch.randint(0, VOCAB, (batch.size * nodes,), device="cuda").int()
    uniforms = torch.rand(batch.size, nodes, device="cuda")
    accepted = md.Accepted.allocate(batch, nodes=nodes, steps=nodes - 1)
    target = probs(nodes)
    return [
        Call.of(md.accept_chain, batch, tokens, target, probs(nodes - 1), uniforms, accepted),
        Call.of(md.accept_tree, batch, tokens, target, uniforms, accepted),
    ]


def measure(case: Case) -> dict[str, Any]:
    bound = [call.bound() for call in case.calls]
    device = device_us(bound, rounds=100)
    slow = device_us([call.reference for call in case.calls], rounds=3)
    return {
        "what": case.what,
        "requests": REQUESTS,
        "page_size": case.page_size,
        "nodes": case.nodes,
        "topk": case.topk,
        "launches": (case.promised and kernels_of(bound)) or len(bound),
        "device_us": device,
        "host_us": host_us(bound),
        "reference_us": slow,
        "ratio": slow / device,
    }


def device_us(calls: Sequence[Callable[[], None]], *, rounds: int) -> float:
    """Per round of `calls`, in a graph of many rounds: the median of several replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    taken = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) * 1000 / rounds)
    return sorted(taken)[len(taken) // 2]


def host_us(bound: Sequence[Callable[[], None]]) -> float:
    """Per launch; few enough at a time that the queue of the device never fills up."""
    taken = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(max(100 // len(bound), 1)):
            for launch in bound:
                launch()
        taken.append((time.perf_counter() - began) / (max(100 // len(bound), 1) * len(bound)))
    torch.cuda.synchronize()
    return sorted(taken)[len(taken) // 2] * 1e6


def kernels_of(bound: Sequence[Callable[[], None]]) -> int:
    """Device activities of one round, as the profiler counts them; 0 where it may not look."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for launch in bound:
            launch()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.device_type.name == "CUDA")


if __name__ == "__main__":
    raise SystemExit(main())
