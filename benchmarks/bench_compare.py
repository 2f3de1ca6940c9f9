"""Ours beside other ways to run the same forward: eager, torch.compile and its graphs, Meta's, raw capture.

    python -m benchmarks.bench_compare --shapes 1b,8b

A Llama with random bf16 weights, our paged attention op on every side, logits included. Up to 64 tokens a
forward is a decode step of as many requests, 512 tokens are 8 prompts of 64; every request has 128 tokens in
the cache then. Per shape:

* start: one process per way of compiling, with empty caches of Inductor and Triton (cold). Seconds count from
  a process that has imported everything and has the weights and the attention kernels on the device:
  `first_call_s` at the largest token count, `ready_s` until all of them have run, `backend_s` of it in the
  backend. The other ways start in parallel (--jobs). Ours starts alone, and once more in a process that finds
  the caches of the first one (warm).
* ready: all sides in one process that finds the caches of all starts, so the other ways start warm. Columns
  are the same seconds, those spent capturing, and memory (`held_bytes`: reserved by torch, `device_bytes`:
  taken from the device, `peak_bytes`: highest use). "raw" and "meta" capture what "compile" has compiled.
* forward: the same process; the sides take turns. `host_us` is the time until a call returns. The floor is
  the bytes of the weights over the read bandwidth (common.py), measured there too.

All steps run off CUDA's default stream, where launching many graphs is cheaper. A side that fails, or takes
longer than --patience to become ready, is a row that says so; so is a side that --budget leaves no time for.
Results are written shape by shape, the starts of a shape before the rest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks import compare_child
from benchmarks.common import RESULTS, Mark, caches_in, environment, without_out, write
from benchmarks.compare_plot import plot
from benchmarks.compare_report import markdown, report
from benchmarks.compare_sides import SIDES, STARTS
from benchmarks.llama import SHAPES

ROOT = Path(__file__).resolve().parents[1]
COLD_S, WARM_S = {"8b": 8.0}, {"8b": 2.0}  # backend seconds of ours
Row = dict[str, Any]


def main(given: list[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    options = _options(given)
    if options.child is not None:
        (compare_child.steady if options.child == "steady" else compare_child.start)(options)
        return 0
    command = " ".join(["python -m benchmarks.bench_compare", *without_out(given)])
    if not options.report:
        with tempfile.TemporaryDirectory(prefix="bench_compare_") as folder:
            _bench(command, options, Path(folder))
    rows = json.loads(options.out.read_text())["rows"]
    print(report(rows))
    if options.report:
        print(f"\n{markdown(rows)}\n")
    print(plot(rows, options.out.with_suffix(".png")))
    return 0


def _options(given: list[str]) -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--sides", default=",".join(SIDES), help="default: all")
    parser.add_argument("--tokens", default="1,4,16,32,64,512")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--patience", type=float, default=150, help="seconds for a side to become ready")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds for the whole run")
    parser.add_argument("--jobs", type=int, default=3 if gpu and (os.cpu_count() or 1) >= 12 else 1)
    parser.add_argument("--no-start", action="store_true", help="leave out cold and warm starts")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what --out holds")
    parser.add_argument("--implementation", help="of attention; None = triton on a GPU")
    parser.add_argument("--compiler", default="inductor", help="of ours")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_compare.json")
    compare_child.add_options(parser)
    options = parser.parse_args(given)
    unknown = set(options.sides.split(",")) - set(SIDES)
    if unknown:
        parser.error(f"no such side: {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    options.ends = time.monotonic() + options.budget
    return options


def _bench(command: str, options: argparse.Namespace, folder: Path) -> None:
    """The starts of the other ways, for all shapes; then each shape, written as far as it is known."""
    shapes = options.shapes.split(",")
    others = {} if options.no_start else _other_starts(shapes, options, folder)
    for shape in shapes:
        starts = others.get(shape, [])
        if not options.no_start and "ours" in _starting(options):
            starts += [_start(shape, "ours", kind, options, folder) for kind in ("cold", "warm")]
        _merge(options.out, command, shape, starts)
        _merge(options.out, command, shape, starts + _steady(shape, starts, options, folder))


def _starting(options: argparse.Namespace) -> list[str]:
    """The starts that the sides need: one per way of compiling."""
    wanted = [side for side in options.sides.split(",") if side in STARTS]
    if not torch.cuda.is_available():
        wanted = [side for side in wanted if not SIDES[side].needs_cuda]
    return list(dict.fromkeys(STARTS[side] for side in wanted))


def _other_starts(shapes: Sequence[str], options: argparse.Namespace, folder: Path) -> dict[str, list[Row]]:
    """Cold starts of the other ways, in parallel processes."""
    wanted = [(shape, name) for shape in shapes for name in _starting(options) if name != "ours"]
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        rows = list(pool.map(lambda each: _start(*each, "cold", options, folder), wanted))
    return {shape: [row for row in rows if row["shape"] == shape] for shape in shapes}


def _steady(shape: str, starts: Sequence[Row], options: argparse.Namespace, folder: Path) -> list[Row]:
    """All sides in one process that finds the caches of all starts."""
    caches = folder / shape / "steady"
    for left in [] if options.no_start else sorted((folder / shape).iterdir()):
        shutil.copytree(left, caches, dirs_exist_ok=True)
    told = compare_child.arguments(
        options,
        child="steady",
        shape=shape,
        sides=options.sides,
        skip=json.dumps(_skipped(starts, options)),
        budget=_left(options),
        cache_dir=caches / "ours",
    )
    rows, fault = _child(told, caches, min(3 * options.patience, _left(options)))
    rows = [row | {"shape": shape} for row in rows]
    if fault:
        timed = {(row["side"], row["tokens"]) for row in rows if row["kind"] == "forward"}
        missing = [(side, n) for side in options.sides.split(",") for n in compare_child.sizes(options)]
        rows += [
            {"kind": "forward", "shape": shape, "side": side, "tokens": tokens, "error": fault}
            for side, tokens in missing
            if (side, tokens) not in timed
        ]
    return rows


def _left(options: argparse.Namespace) -> float:
    """Seconds left of the budget."""
    return max(options.ends - time.monotonic(), 0.0)


def _start(shape: str, name: str, kind: str, options: argparse.Namespace, folder: Path) -> Row:
    """One process; a cold one that was cut off leaves what it did to the warm one."""
    caches = folder / shape / name
    told = compare_child.arguments(options, child=name, shape=shape, cache_dir=caches / "ours")
    found, fault = _child(told, caches, min(options.patience, _left(options)))
    row = {"kind": "start", "shape": shape, "side": name, "start": kind, **(found[-1] if found else {})}
    if fault:
        row["error"] = fault
    print(json.dumps(row), flush=True)
    return row


def _child(told: Sequence[str], caches: Path, patience: float) -> tuple[list[Row], str | None]:
    """The rows that a child printed, and what ended it if it did not end well."""
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
    surroundings = os.environ | {
        **caches_in(caches),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    (caches / "ours").mkdir(parents=True, exist_ok=True)
    (caches / "ours").chmod(0o700)
    command = [sys.executable, "-m", "benchmarks.bench_compare", *told]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        fault = None
        try:
            output, _ = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the compiler's workers
            output, _ = process.communicate()
            fault = f"cut off after {patience:.0f} s"
        if fault is None and process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines() or ["nothing said"]
            print("\n".join(lines[-15:]), file=sys.stderr)
            fault = f"exit status {process.returncode}: {lines[-1]}"[:300]
    return compare_child.parse(output), fault


def _skipped(starts: Sequence[Row], options: argparse.Namespace) -> dict[str, dict[int, str]]:
    """Per side the token counts that its cold start did not reach, and why: they are not tried again."""
    found = {}
    for row in starts:
        if row["start"] == "cold" and "error" in row and row["side"] != "ours":
            ready = row.get("ready", [])
            why = {n: f"start: {row['error']}" for n in compare_child.sizes(options) if n not in ready}
            found |= {side: why for side, started in STARTS.items() if started == row["side"]}
    return found


def _merge(out: Path, command: str, shape: str, rows: list[Row]) -> None:
    """Write the shape's rows beside those of other shapes that an earlier run on the same machine wrote."""
    marks = _marks(shape, rows)
    if out.exists():
        old = json.loads(out.read_text())
        if old["env"] == environment():
            rows = [row for row in old["rows"] if row["shape"] != shape] + rows
            kept = [mark for mark in old["marks"] if not mark["name"].startswith(f"{shape}: ")]
            marks = [Mark(mark["name"], mark["value"], mark["limit"]) for mark in kept] + marks
            command = "; ".join(dict.fromkeys([*old["command"].split("; "), command]))
        else:
            print("results of another environment are replaced")
    write(out, command, rows, marks)


def _marks(shape: str, rows: Sequence[Row]) -> list[Mark]:
    ours = {row["start"]: row for row in rows if row["kind"] == "start" and row["side"] == "ours"}
    limits = {"cold": COLD_S.get(shape), "warm": WARM_S.get(shape)}
    return [
        Mark(f"{shape}: {kind} start, seconds in our compiler", ours[kind]["compile_s"], limit)
        for kind, limit in limits.items()
        if limit is not None and "compile_s" in ours.get(kind, {})
    ]


if __name__ == "__main__":
    raise SystemExit(main())
