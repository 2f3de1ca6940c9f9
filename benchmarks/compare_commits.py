"""Two commits of this project on one machine: decode steps, host time and a speculative round.

    python -m benchmarks.compare_commits --old OLD --new NEW

Both are folders that hold `benchmarks/` and an installed copy of the project (`pip install --target OLD .`).
A process of one and a process of the other take turns, three each. Every figure of the new commit is held
against the old one: the ratio of medians has to be at most 1.02, or within the spread that the old commit
shows against itself. A run that was cut short keeps the turns that it has; `--resume` makes the others, on
the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Mark, environment, table, write

LIMIT = 1.02
Figures = dict[str, float]

# Code for exact sizes is left out: it is chosen by timing, and differs from process to process by itself.
_RUNS = {
    "bench_decode": "--shapes 8b,1b --batches 1,32 --specialize= --rounds 12",
    "bench_host": "--shapes deep --tokens 1 --rounds 120",
    "bench_eagle": "--shapes 1b --heads eagle1 --batches 1 --variants full --turns 2 --rounds 5 --no-pair "
    "--specialize= --draft-specialize=",
}
_KEYS = (
    "shape",
    "head",
    "mode",
    "stream",
    "batch",
    "tokens",
    "requests",
    "graphs",
    "synthetic_accept_length",
)
_FIGURES = {
    "bench_decode": ("full_ms", "piecewise_ms", "full_host_us", "piecewise_host_us"),
    "bench_host": ("copied_us", "in_place_us", "owned_us"),
    "bench_eagle": ("round_ms",),
}


def figures(name: str, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """The figures of one run of one benchmark, by what they measure."""
    found = {}
    for row in rows:
        where = ", ".join(f"{key} {row[key]}" for key in _KEYS if row.get(key) is not None)
        found |= {f"{name} {figure}: {where}": row[figure] for figure in _FIGURES[name] if figure in row}
    return found


def compared(old: Sequence[Figures], new: Sequence[Figures]) -> tuple[list[dict[str, Any]], list[Mark]]:
    """A row and a mark per figure.

    Args:
        old, new: one entry per turn, all with the same names.
    """
    rows, marks = [], []
    for name in old[0]:
        before, after = [turn[name] for turn in old], [turn[name] for turn in new]
        median = statistics.median(before)
        row: dict[str, Any] = {"figure": name, "old": median, "new": statistics.median(after)}
        row |= {"ratio": row["new"] / median, "old_spread": max(before) / median}
        row |= {"old_turns": before, "new_turns": after}
        rows.append(row)
        marks.append(Mark(f"{name}, new / old", row["ratio"], max(LIMIT, row["old_spread"])))
    return rows, marks


_CHILD = """
import importlib, json, os, sys
cache, runs = json.loads(sys.argv[1])
importlib.import_module("benchmarks.bench_backend")  # it moves the compilers' caches to an empty folder
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": cache + "/triton"}
for name, *options in runs:
    importlib.import_module("benchmarks." + name).main(options)
"""


def measure(folder: Path, runs: Mapping[str, str], results: Path) -> Figures:
    """All benchmarks of one commit, in a process of its own; what it compiled, its next process finds."""
    given = [(name, *text.split(), "--out", str(results / f"{name}.json")) for name, text in runs.items()]
    told = json.dumps([str(folder / "compiled"), given])
    environment = os.environ | {"PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", _CHILD, told], cwd=folder, env=environment, check=True)
    found: Figures = {}
    for name in runs:
        found |= figures(name, json.loads((results / f"{name}.json").read_text())["rows"])
    return found


def turns_of(path: Path, names: Mapping[str, str]) -> tuple[list[Figures], list[Figures]]:
    """The turns that a results file of the same commits holds, of the old commit and of the new one.

    Raises:
        SystemExit: the file is of other commits, or of another machine.
    """
    found = json.loads(path.read_text())
    head, *rows = found["rows"]
    if {name: head[name] for name in names} != names or found["env"] != environment():
        raise SystemExit(f"{path} holds another comparison: choose another --out, or leave out --resume.")
    sides = [[row[f"{side}_turns"] for row in rows] for side in ("old", "new")]
    figures = [row["figure"] for row in rows]
    old, new = ([dict(zip(figures, turn, strict=True)) for turn in zip(*side, strict=True)] for side in sides)
    return old, new


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--names", default="old,new", help="commits, for the results file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="make the turns that --out does not hold yet")
    parser.add_argument("--benchmarks", default=",".join(_RUNS))
    parser.add_argument("--options", default="", help="given to every benchmark after its own")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_commits.json")
    options = parser.parse_args(given)
    runs = {name: f"{_RUNS[name]} {options.options}" for name in options.benchmarks.split(",")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    names = dict(zip(("old_commit", "new_commit"), options.names.split(","), strict=True))
    old, new = turns_of(options.out, names) if options.resume else ([], [])
    while len(new) < options.turns:
        old.append(measure(options.old.resolve(), runs, options.out.resolve().parent))
        new.append(measure(options.new.resolve(), runs, options.out.resolve().parent))
        rows, marks = compared(old, new)
        # After every turn: a run that is cut short keeps the turns that it has.
        command = f"python -m benchmarks.compare_commits --old OLD --new NEW --turns {options.turns}"
        write(options.out, command, [{**names, "turns": len(old), "runs": runs}, *rows], marks, report=False)
    print(table(rows, ("figure", "old", "new", "ratio", "old_spread")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
