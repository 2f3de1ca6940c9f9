"""The loops and weights of RECIPES.md: generate, batching, embeddings, quantised weights, LoRA, own loops.

    python -m benchmarks.bench_stacks                                 # all parts, all shapes
    python -m benchmarks.bench_stacks --parts generate,quantised --shapes 1b
    python -m benchmarks.bench_stacks --parts embed --batches 500

generate: greedy tokens on a static cache, for 1 and 8 requests. Sides: eager, transformers' own default
(`mode="reduce-overhead"`), and this backend. Each side has a model object of its own around the same weights.

continuous: `generate_batch` of 16 requests. Sides: transformers with attention by sdpa and CUDA graphs of its
own, and our paged attention with this backend (`pg.continuous_batching`). Both managers stay, with what they
have captured.

embed: random batches of at most 32 texts of at most 256 tokens, with masks, through the encoders of BERT-base
and ModernBERT-base. Sides: eager, `torch.compile(dynamic=True)`, and this backend. Two passes over all
batches warm up; those after them are timed. The error is that of mean-pooled rows beside the eager model in
float32, by the largest element.

quantised: a decode step with torchao's int8 and int4 weights and with float8 ones and inputs, for 1 and 8
requests on a paged cache. Sides: eager, `torch.cuda.graph` around the compiled model, and this backend,
frozen, with attention between its graphs and in one graph. The error is that of the logits beside eager's.

lora: decode steps that alternate between two adapters of peft, r=16 on q_proj and v_proj, not merged, for 1
and 8 requests on a paged cache. Sides: eager, `torch.compile(mode="reduce-overhead")`, and this backend:
through Dynamo with attention between its graphs, and frozen in one graph per adapter. Only the frozen side
needs no `set_adapter`, which is timed. The error is the largest of both adapters' logits beside eager's.

loop: greedy decode steps of one request, each token read on the host, the prompt not timed. Sides: eager on
transformers' static cache, the same step under `torch.compile(mode="reduce-overhead")` as gpt-fast does it,
and this backend, frozen, on a paged cache with attention in one graph.

Each case has a process of its own. Up to --jobs of them compile side by side, since that takes longest; then
they measure one after the other, and the sides of a case take turns, eager in the first round only.
`replayed` is the share of forwards that graphs served while this backend was timed: of the steps of generate
those behind the prompt's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    stack_continuous,
    stack_embed,
    stack_generate,
    stack_loop,
    stack_lora,
    stack_quantised,
)
from benchmarks.common import RESULTS, table, without_out, write
from benchmarks.stack_plot import plot
from benchmarks.stack_report import KEYS, marks_of, matrix
from benchmarks.stack_setting import Measure, Row, Setting


@dataclass(frozen=True)
class Case:
    """What one process measures. `prepare` is called there, with the setting."""

    row: Row
    prepare: Any


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """In the order of the results."""
    chosen = options.parts.split(",")
    for part, made in _CASES.items():
        for row, prepare in made(options) if part in chosen else ():
            yield Case({"part": part, **row}, prepare)


def _embed(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    limits = {"count": options.batches, "rows": options.rows, "tokens": options.tokens}
    for shape in options.encoders.split(","):
        yield {"shape": shape}, partial(stack_embed.prepared, shape=shape, **limits)


def _quantised(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for shape, weights in itertools.product(options.shapes.split(","), options.weights.split(",")):
        asked = {"shape": shape, "weights": weights}
        yield asked, partial(stack_quantised.prepared, **asked)


def _loop(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for shape in options.shapes.split(","):
        call = partial(stack_loop.prepared, shape=shape, new_tokens=options.new_tokens)
        yield {"shape": shape, "requests": 1}, call


def _generate(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for shape, requests in itertools.product(options.shapes.split(","), _counts(options)):
        asked = {"shape": shape, "requests": requests}
        yield asked, partial(stack_generate.prepared, **asked, new_tokens=options.new_tokens)


def _continuous(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for shape in options.shapes.split(","):
        asked = {"shape": shape, "requests": options.users}
        yield asked, partial(stack_continuous.prepared, **asked, new_tokens=options.new_tokens)


def _lora(options: argparse.Namespace) -> Iterator[tuple[Row, Any]]:
    for shape, requests in itertools.product(options.lora_shapes.split(","), _counts(options)):
        asked = {"shape": shape, "requests": requests}
        yield asked, partial(stack_lora.prepared, **asked)


def _counts(options: argparse.Namespace) -> list[int]:
    return [int(count) for count in options.requests.split(",")]


# Those that take longest to be ready come first, so that they compile side by side.
_CASES: dict[str, Callable[[argparse.Namespace], Iterator[tuple[Row, Any]]]] = {
    "embed": _embed,
    "quantised": _quantised,
    "loop": _loop,
    "generate": _generate,
    "continuous": _continuous,
    "lora": _lora,
}


def _needs_room(case: Case) -> bool:
    """Large weights in full: such cases come last, where they find memory beside fewer others."""
    return case.row["shape"] == "8b" and case.row["part"] != "quantised"


def _in_process(case: Case, setting: Setting, parent: Connection) -> None:
    """Prepare, tell that this is done, wait for the turn, measure."""
    try:
        measure: Measure = case.prepare(setting)
        parent.send(None)
        parent.recv()
        parent.send(measure())
    except Exception as problem:
        parent.send(
            [case.row | {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"}]
        )


def measured(cases: Sequence[Case], setting: Setting, patience: float) -> Iterator[list[Row]]:
    """The rows of each case: all prepare side by side, then measure in turn.

    Args:
        patience: seconds after which a case that is not ready is ended.
    """
    processes = multiprocessing.get_context("spawn")
    until, started = time.monotonic() + patience, []
    for case in cases:
        ours, theirs = processes.Pipe()
        process = processes.Process(target=_in_process, args=(case, setting, theirs))
        process.start()
        theirs.close()
        started.append((case, ours, process))
    early = []
    for case, ours, process in started:
        early.append(_received(case, ours, until - time.monotonic()))
        print(case.row, early[-1] or f"ready, {patience + time.monotonic() - until:.0f} s", flush=True)
        if early[-1] is not None:
            process.kill()
    for (case, ours, process), failed in zip(started, early, strict=True):
        if failed is None:
            ours.send(None)
        yield failed or _received(case, ours) or []
        process.kill()  # its own way out takes seconds, and frees nothing more
        process.join()


def _received(case: Case, connection: Connection, seconds: float | None = None) -> list[Row] | None:
    """What its process sends: None once it is ready, then rows."""
    try:
        if not connection.poll(None if seconds is None else max(seconds, 0)):
            return [case.row | {"error": "not ready in time"}]
        found: list[Row] | None = connection.recv()
    except EOFError:
        return [case.row | {"error": "its process ended"}]
    return found


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(_CASES))
    parser.add_argument("--shapes", default="1b,8b" if on_gpu else "tiny", help="of all but embed and lora")
    parser.add_argument("--lora-shapes", default="1b" if on_gpu else "tiny")
    parser.add_argument("--encoders", default="bert-base,modernbert-base" if on_gpu else "bert-tiny")
    parser.add_argument("--weights", default="int8,int4,float8" if on_gpu else "int8", help="of quantised")
    parser.add_argument("--requests", default="1,8", help="of generate and lora")
    parser.add_argument("--users", type=int, default=16, help="requests of continuous batching")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--rows", type=int, default=32, help="of the largest batch")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest text")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--rounds", type=int, default=5, help="at least 2, for the quartiles")
    parser.add_argument("--jobs", type=int, default=12 if on_gpu else 1, help="cases that compile at once")
    parser.add_argument("--patience", type=float, default=1800, help="seconds until cases are ready")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_stacks.json")
    parser.add_argument("--report", action="store_true", help="table and plot of results that are there")
    options = parser.parse_args(given)
    if options.report:
        _report(json.loads(options.out.read_text())["rows"], options.out)
        return 0
    setting = Setting(torch.device("cuda" if on_gpu else "cpu"), options.compiler, options.rounds)
    cores = os.cpu_count() or 1
    threads = max(cores // options.jobs, 1)
    compiling = min(2 * threads + 6, cores)  # the cases that compile longest have the machine to themselves
    os.environ |= {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": str(compiling)}
    command, rows = " ".join(["python -m benchmarks.bench_stacks", *without_out(given)]), list[Row]()
    cases = sorted(cases_of(options), key=_needs_room)
    for first in range(0, len(cases), options.jobs):
        for found in measured(cases[first : first + options.jobs], setting, options.patience):
            rows += found
            write(options.out, command, rows, marks_of(rows), report=False)
    write(options.out, command, rows, marks_of(rows))
    _report(rows, options.out)
    print(table(rows, (*KEYS, "side", "ms", "replayed", "error", "first_other_token", "same_answers")))
    return 0


def _report(rows: list[Row], out: Path) -> None:
    print(matrix(rows))
    print(plot(rows, out.with_suffix(".png")))


if __name__ == "__main__":
    raise SystemExit(main())
