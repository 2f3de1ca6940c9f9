"""Device time of one attention call over a paged KV cache, and host time of one in a replayed tape.

    python -m benchmarks.bench_attention

The shape is Llama-3-8B's (32 query heads, 8 KV heads, head_dim 128, bf16). A graph of many calls walks over
layers of K and V that are together larger than the L2 cache; sides take turns. Ours write the batch's K and V
into the cache as well, and so does vLLM's; the libraries called directly leave that to the caller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.attention_sides import KV_HEADS, LIBRARIES, SIDES, Point, Setup, Side, make_setup
from benchmarks.common import RESULTS, Mark, table, write
from piecewise_graph.custom_ops.attention import AttentionBatch, attention
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.recorder.tape import LateCall

MARKED = [(requests, context) for context in (128, 1024, 8192) for requests in (1, 4, 16, 32)]
LIMIT = 1.25  # of the fastest of the libraries
HOST_LIMIT = 8.0  # us of the first launch of a call; each further one may cost 6
_COLUMNS = ("kind", "requests", "rows", "context", "page_size", "side", "us", "tb_per_s", "error")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="substring of the kinds to time")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_attention.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_attention needs a CUDA device", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    marks: list[Mark] = []
    command = "python -m benchmarks.bench_attention"
    with torch.inference_mode():
        for point in (point for point in _points() if options.only in point.kind):
            found = _time_point(point, options.rounds)
            rows += found
            marks += _mark(point, found)
            torch.cuda.empty_cache()
        host = _host_row()
    rows.append(host)
    limit = HOST_LIMIT + 6 * (host["launches"] - 1)
    marks.append(Mark("host us per attention call of a replayed tape, triton", host["us"], limit))
    write(options.out, command, rows, marks)
    print(table([row for row in rows if "us" in row and "side" in row], _COLUMNS[:-1]))
    return 0


def _points() -> Iterator[Point]:
    for requests, context in MARKED:
        yield Point("decode", requests, 1, context)
    for page_size in (1, 64):
        for requests, context in ((1, 1024), (32, 8192)):
            yield Point("decode other pages", requests, 1, context, page_size)
    for requests, context in ((1, 128), (32, 128), (16, 1024)):
        yield Point("decode, bound 8192", requests, 1, context, bound=8192)
    for requests, context in ((40, 4096), (3, 1500)):  # numbers that do not divide well
        yield Point("decode odd", requests, 1, context)
    for requests, context in ((1, 1024), (1, 8192), (16, 1024), (16, 8192)):
        yield Point("verify", requests, 8, context)
    for context in (512, 4096):
        yield Point("prefill", 1, context, context)
    yield Point("prefill chunk", 1, 512, 8192)


def _time_point(point: Point, rounds: int) -> list[dict[str, Any]]:
    setup = make_setup(point)
    rows, graphs, kept, expected = [], {}, [], None
    for name, make in SIDES.items():
        row: dict[str, Any] = {
            "kind": point.kind, "requests": point.requests, "rows": point.rows, "context": point.context,
            "page_size": point.page_size, "side": name,
        }  # fmt: skip
        rows.append(row)
        try:
            side = make(setup)
            result = _result(setup, side)
            graphs[name] = _graph(setup, side)
            kept.append(side)  # and with it what the graph reads
        except Exception as error:  # a package that is missing, or that cannot do this
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            continue
        if name != "torch sdpa":  # which attends to other tokens
            expected = result if expected is None else expected
            row["difference"] = float((result - expected).norm() / expected.norm())
    times = _device_times(graphs, setup.layers, rounds)
    for row in rows:
        if row["side"] in times:
            row["us"], row["quartiles_us"] = times[row["side"]]
            row["tb_per_s"] = point.bytes_read / row["us"] / 1e6
    for row in rows:
        print(*(row.get(column, "-") for column in _COLUMNS), sep="  ", flush=True)
    return rows


def _result(setup: Setup, side: Side) -> Tensor:
    setup.out.fill_(float("nan"))
    found = side(0)
    torch.cuda.synchronize()
    return (setup.out if found is None else found).float().clone()


def _graph(setup: Setup, side: Side) -> torch.cuda.CUDAGraph:
    """One graph of a call per layer."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for layer in range(min(setup.layers, 3)):
            side(layer)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(setup.layers):
            side(layer)
    return graph


def _device_times(
    graphs: dict[str, torch.cuda.CUDAGraph], calls: int, rounds: int
) -> dict[str, tuple[float, list[float]]]:
    """Median and quartiles of microseconds per call, the sides taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in graphs}
    repeat = dict.fromkeys(graphs, 1)
    for turn in range(-2, rounds):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
            graph.replay()  # the clock starts on a busy device: launching is no part of it
            begin.record()
            for _ in range(repeat[name]):
                graph.replay()
            end.record()
            end.synchronize()
            milliseconds = begin.elapsed_time(end) / repeat[name]
            if turn < 0:
                repeat[name] = max(round(3 / milliseconds), 1)
            else:
                taken[name].append(milliseconds * 1e3 / calls)
    quartiles = {name: statistics.quantiles(each, n=4) for name, each in taken.items()}
    return {name: (middle, [low, high]) for name, (low, middle, high) in quartiles.items()}


def _mark(point: Point, rows: list[dict[str, Any]]) -> list[Mark]:
    times = {row["side"]: row["us"] for row in rows if "us" in row}
    libraries = [time for side, time in times.items() if side in LIBRARIES]
    if point.kind != "decode" or not libraries:
        return []
    name = f"decode, {point.requests} x {point.context}: triton / fastest library"
    return [Mark(name, times["piecewise triton"] / min(libraries), LIMIT)]


class _Layers(torch.nn.Module):
    """Attention calls with a little between them."""

    def __init__(self, layers: int, implementation: str) -> None:
        super().__init__()
        self.layers, self.implementation = layers, implementation

    def forward(self, q: Tensor) -> Tensor:
        for layer in range(self.layers):
            k, v = q[:, :KV_HEADS] * 2, q[:, -KV_HEADS:] * 3
            q = attention(q + 1, k, v, layer=layer, implementation=self.implementation) * 2
        return q


def _host_row() -> dict[str, Any]:
    """Host microseconds per attention call of a tape: the same batch again, and a new one each time."""
    setup = make_setup(Point("host", 4, 1, 128))
    layers = min(setup.layers, 32)
    compiled = pg.compile(_Layers(layers, "triton"), token_dim={"q": 0}, capture_sizes=[4])
    with pg.forward_context(attention=setup.batch):
        for _ in range(3):
            compiled(setup.q)
        tape = state_of(compiled).traces[0].all_tapes()[0].buckets[4].tape  # type: ignore[union-attr]
        bound = tape.bind(4)
        pairs = zip(tape.entries, bound.calls, strict=True)
        calls = [call for entry, call in pairs if isinstance(entry, LateCall)]
        same = _host_time(calls)
    fresh = statistics.median(_fresh_times(setup.batch, calls))
    with _launches(calls, setup.batch) as launches:
        row = {"kind": "host", "calls": len(calls), "us": same, "us_new_batch": fresh, "launches": launches}
    print(row, flush=True)
    return row


def _host_time(calls: list[Callable[[], Any]]) -> float:
    taken = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for call in calls:
            call()
        taken.append((time.perf_counter() - began) / len(calls) * 1e6)
    return statistics.median(taken)


def _fresh_times(batch: AttentionBatch, calls: list[Callable[[], Any]]) -> Iterator[float]:
    import dataclasses

    names = [field.name for field in dataclasses.fields(batch) if field.init]
    for _ in range(30):
        fresh = AttentionBatch(**{name: getattr(batch, name) for name in names})
        torch.cuda.synchronize()
        with pg.forward_context(attention=fresh):
            began = time.perf_counter()
            for call in calls:
                call()
            yield (time.perf_counter() - began) / len(calls) * 1e6


@contextmanager
def _launches(calls: list[Callable[[], Any]], batch: AttentionBatch) -> Iterator[int]:
    """Kernels that one attention call launches."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with pg.forward_context(attention=batch), torch.cuda.graph(graph):
        calls[0]()
    from cuda.bindings import runtime

    _, _, count = runtime.cudaGraphGetNodes(graph.raw_cuda_graph())
    yield int(count)


if __name__ == "__main__":
    raise SystemExit(main())
