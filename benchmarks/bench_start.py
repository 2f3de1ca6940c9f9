"""Seconds until an engine is ready: rounds of 1 to 32 requests and prompts up to 512 tokens, in both modes.

    python -m benchmarks.bench_start

Each start is a process of its own. The first has empty caches (Inductor's, Triton's and `cache_dir`), the
second those that the first has left. Neither is the first process on the machine: two that are not counted
have left the byte code of what all import, which is missing on a machine whose packages were copied. Imports,
from the start of the process, and random weights are shown apart. `beside` is the most memory on the device
that was in use, beyond what is in use when it is ready.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, caches_in, table, wait, without_out, write
from benchmarks.llama import SHAPES, random_model
from benchmarks.own_engine import plain_speculator

REQUESTS, MAX_SEQ_LEN = 32, 4096
LIMITS = {"empty": 20.0, "filled": 8.0}  # seconds, of the 8B shape
BESIDE = 0.5  # GiB
COLUMNS = ("shape", "caches", "ready_s", "import_s", "weights_s", "beside_GiB", "captures", "compiles")
Row = dict[str, Any]


def start(shape: str, cache_dir: str, began: str) -> Row:
    """Make an engine in this process, which was started at `began` (of time.time)."""
    import_s = time.time() - float(began)
    fresh = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pg.register_attention()
    model = random_model(SHAPES[shape], device, "piecewise")
    wait()
    loaded = time.perf_counter()
    plain_speculator(model, REQUESTS, MAX_SEQ_LEN, cache_dir=cache_dir)
    wait()
    ready = time.perf_counter()
    beside = 0
    if device.type == "cuda":
        beside = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    counts = pg.counters.snapshot()
    return {
        "ready_s": ready - loaded,
        "import_s": import_s,
        "weights_s": loaded - fresh,
        "beside_GiB": beside / 2**30,
        "captures": counts["captures"] + counts["phase_captures"],
        "compiles": counts["compiles"],
    }


def started(shape: str, folder: str, byte_code: str) -> Row:
    """`start` in a process of its own, whose caches lie in `folder`."""
    python = {"PYTHONPYCACHEPREFIX": byte_code, "PYTHONDONTWRITEBYTECODE": ""}
    environment = os.environ | caches_in(Path(folder)) | python
    command = [sys.executable, "-m", "benchmarks.bench_start", "--child", shape]
    command += [str(Path(folder, "pg")), str(time.time())]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def bench(shape: str, byte_code: str) -> list[Row]:
    """A start with empty caches and one with those that it has filled."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        return [{"shape": shape, "caches": caches, **started(shape, folder, byte_code)} for caches in LIMITS]


def marks_of(rows: list[Row]) -> list[Mark]:
    marks = []
    for row in (row for row in rows if row["shape"] == "8b"):
        name = f"8b, caches {row['caches']}"
        marks.append(Mark(f"{name}: seconds until ready", row["ready_s"], LIMITS[row["caches"]]))
        marks.append(Mark(f"{name}: GiB beside what stays", row["beside_GiB"], BESIDE))
    return marks


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="8b,1b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--child", nargs=3, metavar=("SHAPE", "FOLDER", "BEGAN"), help="one start, here")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_start.json")
    options = parser.parse_args(given)
    if options.child:
        print(json.dumps(start(*options.child)))
        return 0
    command = " ".join(["python -m benchmarks.bench_start", *without_out(given)])
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as byte_code:
        bench("tiny", byte_code)  # the first processes on the machine
        for shape in options.shapes.split(","):
            rows += bench(shape, byte_code)
            write(options.out, command, rows, marks_of(rows))  # the next shape may not come to its end
    print(table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
