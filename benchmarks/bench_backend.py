"""Eager, torch.compile and piecewise on unmodified transformers models with random weights.

    python -m benchmarks.bench_backend

Per shape: forward time at several token counts (no KV cache: every token is computed), cold compile
seconds, seconds and bytes of capturing the default sizes, and the price of cutting: the segments replayed
graph by graph against one graph of the same compiled segments, attention left out on both sides.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Cold means cold: neither Inductor nor Triton finds what an earlier run compiled.
_CACHE = tempfile.mkdtemp(prefix="bench_backend_")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE
os.environ["TRITON_CACHE_DIR"] = f"{_CACHE}/triton"

import torch  # noqa: E402

import piecewise_graph as pg  # noqa: E402
from benchmarks.common import RESULTS, Mark, alternate, table, without_out, write  # noqa: E402
from benchmarks.llama import SHAPES, Shape, random_model  # noqa: E402
from piecewise_graph.frontend.state_lookup import state_of  # noqa: E402
from piecewise_graph.recorder.tape import LateCall, ReplayTape  # noqa: E402
from piecewise_graph.sizes import evaluate  # noqa: E402
from piecewise_graph.splitter.split_graph import Ref  # noqa: E402

CUT_LIMITS = {"Llama-3-8B": 1.03}  # segments replayed one by one, times one graph of them
_CUT_LIMIT = 1.08  # of other shapes
_COLUMNS = ("shape", "tokens", "eager_ms", "compile_ms", "piecewise_ms", "speedup_eager", "speedup_compile")


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", default="1,8,64,512")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--compiler", default="inductor", help="of the piecewise side")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--no-torch-compile", action="store_true", help="leave that side out; it compiles long"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_backend.json")
    options = parser.parse_args(given)
    rows: list[dict[str, Any]] = []
    marks: list[Mark] = []
    for name in options.shapes.split(","):
        _bench_shape(SHAPES[name], options, rows, marks)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        command = " ".join(["python -m benchmarks.bench_backend", *without_out(given)])
        write(options.out, command, rows, marks)  # after each shape: a long run that is cut short loses one
    print(table([row for row in rows if "tokens" in row], _COLUMNS))
    return 0


@torch.inference_mode()
def _bench_shape(
    shape: Shape, options: argparse.Namespace, rows: list[dict[str, Any]], marks: list[Mark]
) -> None:
    torch._dynamo.reset()
    # cuDNN's attention builds a plan for every new token count, 0.13 s each, on every side alike.
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(shape, device, "sdpa")
    make = partial(_inputs, vocab=model.config.vocab_size, device=device)
    start, compiled = _start(shape, model, make, options)
    rows.append(start)
    marks += _start_marks(shape, start)
    sides: dict[str, Callable[..., Any]] = {"eager": model}
    if not options.no_torch_compile:
        sides["compile"] = _compile_whole(model, make, start)
    sides["piecewise"] = compiled
    for tokens in map(int, options.tokens.split(",")):
        rows.append(_forward_row(shape, sides, make, tokens, options.rounds))
        print(rows[-1], flush=True)
    if device == "cuda":
        cut = _cut_rows(shape, compiled, options)
        rows += cut
        worst = max(row["ratio"] for row in cut)
        limit = CUT_LIMITS.get(shape.name, _CUT_LIMIT)
        marks.append(Mark(f"{shape.name}: segments replayed / one graph of them, worst", worst, limit))


def _inputs(tokens: int, *, vocab: int, device: str) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.randint(0, vocab, (1, tokens), device=device, generator=generator)
    return {"input_ids": ids, "use_cache": False}


def _start(
    shape: Shape, model: Any, make: Callable[..., Any], options: argparse.Namespace
) -> tuple[dict[str, Any], Any]:
    """Compile and capture; what start-up costs."""
    compiled = pg.compile(model, max_tokens=options.max_tokens, capture="explicit", compiler=options.compiler)
    began = time.perf_counter()
    compiled(**make(options.max_tokens))
    trace_and_compile = time.perf_counter() - began
    began = time.perf_counter()
    plan = pg.plan(compiled)
    planning = time.perf_counter() - began
    report = pg.capture(compiled, make, progress=False)
    explained = pg.explain(compiled).traces[0]
    logits = options.max_tokens * model.config.vocab_size * 2
    row = {
        "shape": shape.name,
        "steps": explained.steps,
        "segments": explained.segments,
        "distinct_segments": explained.distinct,
        "cold_first_call_s": trace_and_compile,
        "cold_compile_s": explained.compile_seconds,
        "captured_sizes": len(report.captured),
        "captured_graphs": sum(bucket.graphs for bucket in report.captured),
        "capture_s": report.seconds,
        "plan_s": planning,
        "planned_pool_bytes": plan.pool_bytes,
        "planned_buffer_bytes": plan.buffer_bytes,
        "plan_worst_error": _plan_error(plan, report),
        "planned_and_taken_bytes": [
            [bucket.tokens, bucket.planned_bytes, bucket.graph_bytes] for bucket in report.captured
        ],
        "pool_bytes": report.pool_bytes,
        "logits_bytes": logits,
        "buffer_bytes": report.buffer_bytes,
        "fallbacks_before_timing": dict(explained.fallbacks),
    }
    print(row, flush=True)
    return row, compiled


def _plan_error(plan: Any, report: Any) -> float:
    """The worst of all buckets and their sum, relative to the larger of planned and taken.

    A difference of one small allocator segment (2 MiB) in a bucket that reuses everything is none.
    """
    pairs = [(plan.pool_bytes, report.pool_bytes)]
    pairs += [(bucket.planned_bytes or 0, bucket.graph_bytes) for bucket in report.captured]
    errors = [abs(a - b) / max(a, b) for a, b in pairs if abs(a - b) > 2 * 2**20]
    return max(errors, default=0.0)


def _start_marks(shape: Shape, row: dict[str, Any]) -> list[Mark]:
    bare = (row["pool_bytes"] - row["logits_bytes"]) / 2**30
    return [
        Mark(f"{shape.name}: distinct segments of {row['steps']} steps", row["distinct_segments"], 4),
        Mark(f"{shape.name}: seconds to capture {row['captured_sizes']} sizes", row["capture_s"], 2.0),
        Mark(f"{shape.name}: GiB of graphs, logits buffers apart", bare, 0.14),
        Mark(f"{shape.name}: plan against taken, worst relative error", row["plan_worst_error"], 0.10),
    ]


def _compile_whole(model: Any, make: Callable[..., Any], row: dict[str, Any]) -> Callable[..., Any]:
    """torch.compile with its token dimension marked dynamic, the kindest way to start it."""
    whole = torch.compile(model)
    inputs = make(64)
    torch._dynamo.mark_dynamic(inputs["input_ids"], 1)
    began = time.perf_counter()
    whole(**inputs)
    row["torch_compile_first_call_s"] = time.perf_counter() - began
    return whole


def _forward_row(
    shape: Shape, sides: dict[str, Callable[..., Any]], make: Callable[..., Any], tokens: int, rounds: int
) -> dict[str, Any]:
    calls = {name: partial(side, **make(tokens)) for name, side in sides.items()}
    expected, found = calls["eager"]().logits.float(), calls["piecewise"]().logits.float()
    with pg.counters.expect(fallbacks=0):
        times = alternate(calls, rounds=rounds, repeat=5)
    row: dict[str, Any] = {"shape": shape.name, "tokens": tokens}
    for name, timing in times.items():
        row |= {
            f"{name}_ms": timing.median * 1e3,
            f"{name}_quartiles_ms": [timing.low * 1e3, timing.high * 1e3],
        }
    row["speedup_eager"] = times["eager"].median / times["piecewise"].median
    if "compile" in times:
        row["speedup_compile"] = times["compile"].median / times["piecewise"].median
    row["relative_difference_to_eager"] = float((expected - found).norm() / expected.norm())
    return row


def _cut_rows(shape: Shape, compiled: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Graph by graph against one graph of the same segments, attention left out on both sides."""
    runtime = state_of(compiled).traces[0]  # type: ignore[union-attr]
    rows, buckets = [], runtime.all_tapes()[0].buckets  # type: ignore[attr-defined]
    for size in (s for s in (1, 8, 64, 512) if s in buckets):
        tape = buckets[size].tape
        graphs = [entry for entry in tape.entries if not isinstance(entry, LateCall)]
        whole = _one_graph(tape, runtime.state.pool)

        run = runtime.state.pool.run_off_default_stream
        sides = {"segments": partial(run, graphs), "one graph": partial(run, [whole])}
        times = alternate(sides, rounds=options.rounds * 2, repeat=20)
        cut, one = times["segments"], times["one graph"]
        rows.append(
            {
                "shape": shape.name,
                "bucket": size,
                "graphs": len(graphs),
                "segments_ms": cut.median * 1e3,
                "segments_quartiles_ms": [cut.low * 1e3, cut.high * 1e3],
                "one_graph_ms": one.median * 1e3,
                "one_graph_quartiles_ms": [one.low * 1e3, one.high * 1e3],
                "ratio": cut.median / one.median,
            }
        )
        print(rows[-1], flush=True)
    return rows


def _one_graph(tape: ReplayTape, pool: pg.GraphPool) -> Callable[[], None]:
    """All captured segments of a tape, captured again as a single graph."""
    program = tape.program
    sizes = program.sizes_at(tape.bucket)

    def run() -> list[Any]:
        outputs: list[Any] = []
        for step in program.split.segments:
            values = [
                tape.values[i.slot] if isinstance(i, Ref) else evaluate(i.expr, sizes) for i in step.inputs
            ]
            outputs += program.compiled[step.index].run(*values)
        return outputs

    with pool.session():
        run()
        replay, _ = pool.capture(run, [])
    return replay


if __name__ == "__main__":
    raise SystemExit(main())
