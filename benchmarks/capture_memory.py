"""Resident memory that captured and released graphs leave behind: ours beside a bare torch.cuda.CUDAGraph.

    python -m benchmarks.capture_memory

Each cycle captures seven graphs, replays them and frees everything. The growth of resident memory per cycle
tells whether a leak is the library's or lies under it:

    bare             seven torch.cuda.CUDAGraph of one kernel each, in a MemPool that is dropped
    bare, one pool   the same in one MemPool for all cycles
    ours             a model of two layers, its two buckets, GraphPool.release()
    capture_call     six calls of GraphPool.capture_call, GraphPool.release()

A GPU is needed. The device's memory is the same after each cycle; only the host's is looked at.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, table, without_out, write

GRAPHS = 7  # of the model or the calls six, and the one that keeps a GraphPool's memory alive
SLACK = 1.1  # what ours may leave, times what bare graphs leave


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def bare(x: Tensor, memory: torch.cuda.MemPool | None) -> Callable[[], None]:
    stream = torch.cuda.Stream()

    def cycle() -> None:
        pool = memory or torch.cuda.MemPool()
        graphs = []
        with torch.cuda.stream(stream):
            for _ in range(GRAPHS):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool.id, capture_error_mode="thread_local")
                y = x + 1
                graph.capture_end()
                graphs.append((graph, y))
            for graph, _ in graphs:
                graph.replay()
        torch.cuda.synchronize()
        del graph, y
        graphs.clear()
        del pool
        gc.collect()
        torch.cuda.empty_cache()

    return cycle


class Layers(nn.Module):
    """Two layers, three segments."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            q = linear(x)[None, None]
            x = x + nn.functional.scaled_dot_product_attention(q, q, q)[0, 0]
        return x


def ours(device: torch.device) -> Callable[[], None]:
    pool = pg.GraphPool()
    model = Layers().to(device)
    compiled = pg.compile(model, compiler="eager", capture_sizes=[4, 8], max_tokens=8, pool=pool)
    inputs = [torch.randn(count, 8, device=device) for count in (8, 3, 3)]

    def cycle() -> None:
        for x in inputs:
            compiled(x)
        pool.release()

    return cycle


def captured_calls(x: Tensor) -> Callable[[], None]:
    pool = pg.GraphPool()
    y = torch.empty_like(x)

    def cycle() -> None:
        calls = [
            pool.capture_call(lambda: torch.add(x, 1, out=y), device=x.device) for _ in range(GRAPHS - 1)
        ]
        for call in calls:
            call()
        pool.release()

    return cycle


def growth(cycle: Callable[[], None], cycles: int) -> dict[str, float]:
    """Bytes of resident memory per cycle, over each half."""
    for _ in range(10):
        cycle()
    marks = []
    for half in (0, cycles // 2, cycles - cycles // 2):
        for _ in range(half):
            cycle()
        gc.collect()
        marks.append(resident_bytes())
    first, second = marks[1] - marks[0], marks[2] - marks[1]
    return {
        "first_half_bytes_per_cycle": first / (cycles // 2),
        "second_half_bytes_per_cycle": second / (cycles - cycles // 2),
        "bytes_per_graph": (first + second) / cycles / GRAPHS,
    }


@torch.no_grad()
def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--out", type=Path, default=RESULTS / "capture_memory.json")
    options = parser.parse_args(given)
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.zeros(64, device=device)
    sides = {
        "bare": bare(x, None),
        "bare, one pool": bare(x, torch.cuda.MemPool()),
        "ours": ours(device),
        "capture_call": captured_calls(x),
    }
    rows: list[dict[str, Any]] = []
    for name, cycle in sides.items():
        rows.append({"side": name, "cycles": options.cycles, **growth(cycle, options.cycles)})
        print(rows[-1], flush=True)
    per_graph = {row["side"]: row["bytes_per_graph"] for row in rows}
    limit = max(SLACK * per_graph["bare"], 64.0)
    marks = [
        Mark(f"{name}: resident bytes per captured graph, against bare ones", per_graph[name], limit)
        for name in ("ours", "capture_call")
    ]
    command = " ".join(["python -m benchmarks.capture_memory", *without_out(given)])
    write(options.out, command, rows, marks)
    print(table(rows, tuple(rows[0])))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
