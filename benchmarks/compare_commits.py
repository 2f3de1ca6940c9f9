"""Two commits of this project on one machine: decode steps, host time and a speculative round.

    python -m benchmarks.compare_commits --old OLD --new NEW

Both are folders that hold `benchmarks/` and an installed copy of the project (`pip install --target OLD .`).
A process of one and a process of the other take turns, three each; who is first changes from turn to turn.
Host time depends more on the core, its clock and its neighbours than on the commit, so the two processes that
time frozen calls live side by side on one core, and time ten rounds each by turns. Every figure of the new
commit is held against the old one: the ratio of medians has to be at most 1.02, or within the spread that the
old commit shows against itself. Two processes of one commit differ, too: with `--control` a second process of
the old commit takes part in the turns on that core, and its times belong to the old commit's spread. A run
that was cut short keeps the turns that it has; `--resume` makes the others, on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commit_child import TURN
from benchmarks.common import RESULTS, Mark, environment, table, write

LIMIT = 1.02
Figures = dict[str, float]
Process = subprocess.Popen[str]

# Code for exact sizes is left out: it is chosen by timing, and differs from process to process by itself.
_RUNS = {
    "bench_decode": "--shapes 8b,1b --batches 1,32 --specialize= --rounds 12",
    "bench_host": "--shapes deep --tokens 1 --rounds 120",
    "bench_eagle": "--shapes 1b --heads eagle1 --batches 1 --variants full --turns 2 --rounds 5 --no-pair "
    "--specialize= --draft-specialize=",
}
_SIDE_BY_SIDE = ("bench_host",)
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


def compared(
    old: Sequence[Figures], new: Sequence[Figures], control: Sequence[Figures] = ()
) -> tuple[list[dict[str, Any]], list[Mark]]:
    """A row and a mark per figure.

    Args:
        old, new: one entry per turn, all with the same names.
        control: the same of the old commit's second process, for the figures that it measures.
    """
    rows, marks = [], []
    for name in old[0]:
        turns = {
            f"{side}_turns": [turn[name] for turn in found if name in turn]
            for side, found in (("old", old), ("new", new), ("control", control))
        }
        before = turns["old_turns"] + turns["control_turns"]
        median = statistics.median(before)
        row: dict[str, Any] = {"figure": name, "old": median, "new": statistics.median(turns["new_turns"])}
        row |= {"ratio": row["new"] / median, "old_spread": max(before) / median, **turns}
        rows.append(row)
        marks.append(Mark(f"{name}, new / old", row["ratio"], max(LIMIT, row["old_spread"])))
    return rows, marks


@dataclass(frozen=True)
class Side:
    """One commit: the folder of its installed copy. What one process compiles there, the next one finds.

    Attributes:
        control: whether this is the old commit's second process, of the benchmarks on one core alone.
    """

    folder: Path
    control: bool = False

    def start(self, runs: Mapping[str, str], core: int | None = None) -> Process:
        """A process that runs these benchmarks; with a core, it waits for its turns (commit_child.py)."""
        given = [(name, *text.split(), "--out", str(self._file(name))) for name, text in runs.items()]
        told = json.dumps({"cache": str(self.folder / "compiled"), "core": core, "runs": given})
        pipe = None if core is None else subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("commit_child.py")), told],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            stdin=pipe,
            stdout=pipe,
            text=True,
        )

    def found(self, names: Iterable[str]) -> Figures:
        """What its last processes have measured."""
        measured: Figures = {}
        for name in names:
            if name in _SIDE_BY_SIDE or not self.control:
                measured |= figures(name, json.loads(self._file(name).read_text())["rows"])
        return measured

    def _file(self, name: str) -> Path:
        return self.folder / ("control" if self.control else "measured") / f"{name}.json"


def measure(sides: Sequence[Side], runs: Mapping[str, str]) -> list[Figures]:
    """One turn: all benchmarks of each side, in this order.

    Raises:
        subprocess.CalledProcessError: a benchmark failed.
    """
    alone = {name: text for name, text in runs.items() if name not in _SIDE_BY_SIDE}
    together = {name: text for name, text in runs.items() if name in _SIDE_BY_SIDE}
    for side in sides:
        if alone and not side.control:
            _ended(side.start(alone))
    if together:
        core = max(os.sched_getaffinity(0))
        _side_by_side([side.start(together, core) for side in sides])
    return [side.found(runs) for side in sides]


def _side_by_side(processes: Sequence[Process]) -> None:
    """Prepare all at once; then let one of them time at a time. Who is first changes from round to round."""
    try:
        running = [process for process in processes if _wants_a_turn(process)]
        while running:
            for process in tuple(running):
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                if not _wants_a_turn(process):
                    running.remove(process)
            running.reverse()
        for process in processes:
            _ended(process)
    finally:
        for process in processes:
            process.kill()


def _wants_a_turn(process: Process) -> bool:
    """Wait until it does, or has ended; what it prints before that is for people."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == TURN:
            return True
        print(line, end="")
    return False


def _ended(process: Process) -> None:
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, "a benchmark, see above")


def turns_of(path: Path, names: Mapping[str, str]) -> list[list[Figures]]:
    """The turns that a results file of the same commits holds: of the old commit, the new one, the control.

    Raises:
        SystemExit: the file is of other commits, or of another machine.
    """
    found = json.loads(path.read_text())
    head, *rows = found["rows"]
    if {name: head[name] for name in names} != names or found["env"] != environment():
        raise SystemExit(f"{path} holds another comparison: choose another --out, or leave out --resume.")
    turns = []
    for side in ("old", "new", "control"):
        columns = {row["figure"]: row[f"{side}_turns"] for row in rows if row.get(f"{side}_turns")}
        turns.append([dict(zip(columns, turn, strict=True)) for turn in zip(*columns.values(), strict=True)])
    return turns


def _command(options: argparse.Namespace) -> str:
    control = " --control" if options.control else ""
    return f"python -m benchmarks.compare_commits --old OLD --new NEW --turns {options.turns}{control}"


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, required=True)
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--names", default="old,new", help="commits, for the results file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--control", action="store_true", help="a second process of the old commit")
    parser.add_argument("--resume", action="store_true", help="make the turns that --out does not hold yet")
    parser.add_argument("--benchmarks", default=",".join(_RUNS))
    parser.add_argument("--options", default="", help="given to every benchmark after its own")
    parser.add_argument("--out", type=Path, default=RESULTS / "compare_commits.json")
    options = parser.parse_args(given)
    runs = {name: f"{_RUNS[name]} {options.options}" for name in options.benchmarks.split(",")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    names = dict(zip(("old_commit", "new_commit"), options.names.split(","), strict=True))
    measured = turns_of(options.out, names) if options.resume else [[], [], []]
    sides = [Side(options.old.resolve()), Side(options.new.resolve())]
    sides += [Side(options.old.resolve(), control=True)] * options.control
    while len(measured[1]) < options.turns:
        in_turn = sides if len(measured[1]) % 2 == 0 else sides[::-1]
        found = dict(zip(in_turn, measure(in_turn, runs), strict=True))
        for turns, side in zip(measured, sides, strict=False):
            turns.append(found[side])
        rows, marks = compared(*measured)
        # After every turn: a run that is cut short keeps the turns that it has.
        head = {**names, "turns": len(measured[1]), "runs": runs}
        write(options.out, _command(options), [head, *rows], marks, report=False)
    print(table(rows, ("figure", "old", "new", "ratio", "old_spread")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
