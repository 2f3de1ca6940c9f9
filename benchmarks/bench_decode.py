"""A decode step of a Llama on paged KV against the time that reading its weights takes: FULL and PIECEWISE.

    python -m benchmarks.bench_decode

Random bf16 weights; attention (our op, at a context of 128 tokens per request) and logits included. No option
of `pg.compile` is set, unless asked for. The floor is bytes of weights over the read bandwidth (common.py).
Sides alternate in one process; device and host time of a frozen forward are told apart.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.bench_backend import SHAPES  # which also empties the compilers' caches
from benchmarks.common import RESULTS, Mark, alternate, read_bandwidth, table, without_out, write
from benchmarks.paged import PagedModel

FULL_LIMITS = {  # times the floor
    "8b": {1: 1.10, 4: 1.18, 16: 1.23, 32: 1.28},
    "1b": {1: 1.25, 4: 1.40, 16: 1.50, 32: 1.60},
}
CUT_LIMIT = 4.5  # microseconds


class Decode(PagedModel):
    """One model, frozen in both modes at several batch sizes."""

    def __init__(self, shape: str, batches: list[int], options: argparse.Namespace) -> None:
        super().__init__(SHAPES[shape], batches, options.implementation)
        began = time.perf_counter()
        self.compiled = pg.compile(
            self.model, capture_sizes=batches, max_tokens=max(batches), outputs="static", **options.extra
        )
        self.frozen = {full: self._freeze(full) for full in (True, False)}
        self.start_seconds = time.perf_counter() - began

    def _freeze(self, full: bool) -> Callable[..., Any]:
        pg.capture(self.compiled, self.inputs, context=partial(self.fields, full=full), progress=False)
        with self.context(self.counts[-1], full):
            return pg.freeze(self.compiled, **self.inputs(self.counts[-1]))

    def side(self, batch: int, full: bool) -> Callable[[], Any]:
        """A step whose inputs are written by the caller, as a serving loop does."""
        call, inputs = self.frozen[full], self.inputs(batch)
        with self.context(batch, full):
            call(**inputs)
            inputs |= call.static_inputs(batch)

        def step() -> Any:
            with self.context(batch, full):
                return call(**inputs)

        return step


def host_microseconds(step: Callable[[], Any], rounds: int, calls: int = 20) -> float:
    """Median host time of a step, its device work still running."""
    taken = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for _ in range(calls):
            began = time.perf_counter()
            step()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


@torch.inference_mode()
def bench_shape(shape: str, options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[Mark]]:
    batches = [int(size) for size in options.batches.split(",")]
    decode = Decode(shape, batches, options)
    bandwidth = options.bandwidth or read_bandwidth(decode.device)
    floor = decode.weight_bytes / bandwidth
    rows, marks = [], []
    stream = torch.cuda.Stream() if torch.cuda.is_available() else None
    with torch.cuda.stream(stream):
        for batch in batches:
            sides = {"full": decode.side(batch, True), "piecewise": decode.side(batch, False)}
            times = alternate(sides, rounds=options.rounds, repeat=20)
            row: dict[str, Any] = {"shape": shape, "batch": batch, "floor_ms": floor * 1e3}
            for name, timing in times.items():
                row[f"{name}_ms"] = timing.median * 1e3
                row[f"{name}_low_ms"], row[f"{name}_high_ms"] = timing.low * 1e3, timing.high * 1e3
                row[f"{name}_host_us"] = host_microseconds(sides[name], options.rounds)
            row["full_over_floor"] = times["full"].median / floor
            row["piecewise_over_full"] = times["piecewise"].median / times["full"].median
            extra = times["piecewise"].median - times["full"].median
            row["cut_us"] = extra * 1e6 / decode.model.config.num_hidden_layers  # one cut per layer
            rows.append(row)
            marks += _marks(shape, batch, row)
    start = {"shape": shape, "start_s": decode.start_seconds, "bandwidth_TBps": bandwidth / 1e12}
    start |= {"weights_GB": decode.weight_bytes / 1e9, "explain": str(pg.explain(decode.compiled))}
    return [start, *rows], marks


def _marks(shape: str, batch: int, row: dict[str, Any]) -> list[Mark]:
    cut = Mark(f"{shape} microseconds of a cut, batch {batch}", row["cut_us"], CUT_LIMIT)
    limit = FULL_LIMITS.get(shape, {}).get(batch)
    if limit is None:
        return [cut]
    return [Mark(f"{shape} decode, FULL, batch {batch}, times the floor", row["full_over_floor"], limit), cut]


_COLUMNS = ("shape", "batch", "floor_ms", "full_ms", "piecewise_ms", "full_over_floor", "piecewise_over_full",
            "cut_us", "full_host_us", "piecewise_host_us")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--batches", default="1,4,16,32")
    parser.add_argument("--implementation", help="of attention; None = triton on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--bandwidth", type=float, help="bytes per second, None = as in common.py")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--specialize", default="", help="batches with code of their own, as '1,32'")
    parser.add_argument("--deterministic", action="store_true", help="one order of summation in all batches")
    parser.add_argument("--merge", action="store_true", help="merge the weights of parallel linears")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_decode.json")
    options = parser.parse_args(given)
    exact = [size for size in options.batches.split(",") if size in options.specialize.split(",")]
    options.extra = {
        "compiler": options.compiler,
        "merge_linears": options.merge,
        "specialize": list(map(int, exact)),
    }
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    rows: list[dict[str, Any]] = []
    marks: list[Mark] = []
    for shape in options.shapes.split(","):
        more, met = bench_shape(shape, options)
        rows, marks = rows + more, marks + met
        print(more[0]["explain"])
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        command = " ".join(["python -m benchmarks.bench_decode", *without_out(given)])
        write(options.out, command, rows, marks)
    print(table([row for row in rows if "batch" in row], _COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
