"""Device time of one attention call over a paged KV cache, and host time of one in a replayed tape.

    python -m benchmarks.bench_attention
    pytest benchmarks/bench_attention.py --benchmark-json=FILE   # our kernel alone, with pytest-benchmark

The shape is Llama-3-8B's (32 query heads, 8 KV heads, head_dim 128, bf16). A graph of many calls walks over
layers of K and V that are together larger than the L2 cache; sides take turns. Ours write the batch's K and V
into the cache as well, which the libraries called directly leave to the caller.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, table, write
from piecewise_graph.custom_ops.attention import AttentionBatch, attention
from piecewise_graph.custom_ops.attention.call import AttentionCall
from piecewise_graph.custom_ops.attention.implementations import load, serve
from piecewise_graph.custom_ops.kv_cache import PagedKVCache
from piecewise_graph.frontend.lookup import state_of
from piecewise_graph.recorder.tape import LateCall

HEADS, KV_HEADS, HEAD_DIM, DTYPE = 32, 8, 128, torch.bfloat16
OURS = ("triton", "flash_attn", "flashinfer")
MARKED = [(requests, context) for context in (128, 1024, 8192) for requests in (1, 4, 16, 32)]
LIMIT = 1.25  # of the fastest of the libraries
HOST_LIMIT = 8.0  # us of the first launch of a call; each further one may cost 6
_ROTATED = 192 << 20  # bytes of K and V that a graph walks over, several times the L2
_COLUMNS = ("kind", "requests", "rows", "context", "page_size", "side", "us", "tb_per_s", "error")

Side = Callable[[int], Any]  # one attention call of a layer


@dataclass(frozen=True)
class Point:
    """A batch to be timed: `requests` of `rows` new tokens each, `context` tokens long with them.

    Attributes:
        bound: what the host knows about the lengths, as where a graph serves all of them.
    """

    kind: str
    requests: int
    rows: int
    context: int
    page_size: int = 16
    bound: int = 0

    @property
    def bytes_read(self) -> int:
        return 2 * self.requests * self.context * KV_HEADS * HEAD_DIM * DTYPE.itemsize


@dataclass(frozen=True)
class Setup:
    """Tensors of a point, the same for every side."""

    point: Point
    batch: AttentionBatch
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    layers: int


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("requests", "context"), MARKED)
def test_decode(benchmark: Any, requests: int, context: int) -> None:
    """A graph of one call per layer; `extra_info` says how many."""
    setup = _setup(Point("decode", requests, 1, context))
    side = _ours("triton", setup)
    graph = _graph(setup, side)

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    benchmark.extra_info["calls"] = setup.layers
    benchmark(replay)


def _setup(point: Point) -> Setup:
    torch.manual_seed(0)
    device, page_size = torch.device("cuda"), point.page_size
    pages = -(-point.context // page_size)
    layers = min(max(_ROTATED // point.bytes_read + 1, 4), 400)
    cache = PagedKVCache(
        num_layers=layers, num_pages=1 + pages * point.requests, page_size=page_size, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, dtype=DTYPE, device=device,
    )  # fmt: skip
    for cached in (*cache.k, *cache.v):
        cached.normal_()
    shuffled = torch.randperm(pages * point.requests, device=device) + 1
    block_table = shuffled.view(point.requests, pages).to(torch.int32)
    new = torch.arange(point.context - point.rows, point.context, device=device)
    slots = block_table[:, new // page_size] * page_size + new % page_size
    batch = AttentionBatch(
        cache,
        block_table=block_table,
        seq_lens=torch.full((point.requests,), point.context, dtype=torch.int32, device=device),
        qo_indptr=torch.arange(point.requests + 1, dtype=torch.int32, device=device) * point.rows,
        slot_mapping=slots.flatten().to(torch.int32),
        max_query_len=point.rows,
        max_seq_len=max(point.context, point.bound),
        query_len=point.rows,
        host_query_lens=(point.rows,) * point.requests,
        host_seq_lens=(point.context,) * point.requests,
    )
    total = point.requests * point.rows
    q = torch.randn(total, HEADS, HEAD_DIM, dtype=DTYPE, device=device)
    k, v = (torch.randn(total, KV_HEADS, HEAD_DIM, dtype=DTYPE, device=device) for _ in "kv")
    return Setup(point, batch, q, k, v, torch.empty_like(q), layers)


def _time_point(point: Point, rounds: int) -> list[dict[str, Any]]:
    setup = _setup(point)
    sides: dict[str, Callable[[Setup], Side]] = {f"piecewise {name}": partial(_ours, name) for name in OURS}
    sides |= {
        "flashinfer xqa": _flashinfer_xqa,
        "flashinfer planned": _flashinfer_planned,
        "flash_attn 4": _flash_attn,
        "torch sdpa": _sdpa,
    }
    rows, graphs, kept, expected = [], {}, [], None
    for name, make in sides.items():
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


def _ours(name: str, setup: Setup) -> Side:
    missing = load(name).missing
    if missing is not None:
        raise RuntimeError(missing)
    scale = HEAD_DIM**-0.5
    calls = [
        AttentionCall(setup.q, setup.k, setup.v, setup.out, layer, scale, implementation=name)
        for layer in range(setup.layers)
    ]
    return lambda layer: serve(setup.batch, calls[layer], captured=True)


def _flashinfer_xqa(setup: Setup) -> Side:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    point, cache, batch = setup.point, setup.batch.kv_cache, setup.batch
    if point.rows > 64:
        raise RuntimeError("decode and verify only")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    mask = None
    if point.rows > 1:
        bits = [(1 << (row + 1)) - 1 for row in range(point.rows)]
        words = torch.tensor(bits, dtype=torch.int64, device="cuda").to(torch.uint16).view(1, point.rows, 1)
        mask = torch.nn.functional.pad(words.to(torch.int32), (0, 1)).to(torch.uint16)
        mask = mask.expand(point.requests, -1, -1).contiguous()

    def call(layer: int) -> None:
        trtllm_batch_decode_with_kv_cache(
            setup.q, (cache.k[layer], cache.v[layer]), workspace, batch.block_table, batch.seq_lens,
            batch.max_seq_len, bmm1_scale=HEAD_DIM**-0.5, out=setup.out, kv_layout="NHD",
            q_len_per_req=point.rows, mask=mask, enable_pdl=False,
        )  # fmt: skip

    return call


def _flashinfer_planned(setup: Setup) -> Side:
    import flashinfer

    point, cache = setup.point, setup.batch.kv_cache
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    pages = setup.batch.block_table.shape[1]
    indptr = torch.arange(point.requests + 1, dtype=torch.int32) * pages
    last = torch.full((point.requests,), (point.context - 1) % point.page_size + 1, dtype=torch.int32)
    indices = setup.batch.block_table.flatten()
    if point.rows == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last.cuda(),
        )  # fmt: skip
        wrapper.plan(
            indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, point.page_size, q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )  # fmt: skip
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            setup.batch.qo_indptr.cpu(), indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, point.page_size,
            causal=True, q_data_type=DTYPE, kv_data_type=DTYPE,
        )  # fmt: skip
    return lambda layer: wrapper.run(setup.q, (cache.k[layer], cache.v[layer]), out=setup.out)


def _flash_attn(setup: Setup) -> Side:
    from flash_attn.cute import flash_attn_varlen_func

    point, cache, batch = setup.point, setup.batch.kv_cache, setup.batch

    def call(layer: int) -> Tensor:
        found = flash_attn_varlen_func(
            setup.q, cache.k[layer], cache.v[layer], cu_seqlens_q=batch.qo_indptr, seqused_k=batch.seq_lens,
            max_seqlen_q=point.rows, max_seqlen_k=point.context, page_table=batch.block_table,
            softmax_scale=HEAD_DIM**-0.5, causal=True,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return call


def _sdpa(setup: Setup) -> Side:
    """Over K and V in one piece per request; which tokens they are does not matter to its time."""
    point, cache = setup.point, setup.batch.kv_cache
    if 1 < point.rows < point.context:
        raise RuntimeError("it would need a mask")
    q = setup.q.view(point.requests, point.rows, HEADS, HEAD_DIM).transpose(1, 2)

    def dense(cached: Tensor) -> Tensor:
        tokens = cached.view(-1, KV_HEADS, HEAD_DIM)[: point.requests * point.context]
        return tokens.view(point.requests, point.context, KV_HEADS, HEAD_DIM).transpose(1, 2)

    def call(layer: int) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, dense(cache.k[layer]), dense(cache.v[layer]), is_causal=point.rows > 1, enable_gqa=True
        )

    return call


def _mark(point: Point, rows: list[dict[str, Any]]) -> list[Mark]:
    times = {row["side"]: row["us"] for row in rows if "us" in row}
    libraries = [
        time
        for side, time in times.items()
        if side in ("flashinfer xqa", "flashinfer planned", "flash_attn 4")
    ]
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
    setup = _setup(Point("host", 4, 1, 128))
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
