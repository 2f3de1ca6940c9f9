"""How often answers are wrong: random programs, every op of torch's `op_db`, and the tests of faults.

    python -m benchmarks.bench_trust                                  # 300 programs, as `make fuzz` does
    python -m benchmarks.bench_trust --programs 10000 --jobs 8 --folder fuzz    # goes on where it stopped
    python -m benchmarks.bench_trust --device cuda --programs 1000 --no-ops

What a verdict means is said in tests/fuzz/README.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.common import RESULTS, Mark, without_out, write

ROOT = Path(__file__).resolve().parents[1]


def swept(kind: str, folder: Path, options: Sequence[str]) -> dict[str, Any]:
    """The figures of one sweep of tests/fuzz; its rows stay in `folder`, and are not run again."""
    summary = folder / f"{kind}.json"
    files = ["--resume", str(folder / f"{kind}.jsonl"), "--summary", str(summary)]
    subprocess.run([sys.executable, "-m", "tests.fuzz", kind, *options, *files], cwd=ROOT, check=False)
    return {"kind": kind, **json.loads(summary.read_text(encoding="utf-8"))}


def faults(folder: Path) -> dict[str, Any]:
    """What became of tests/test_faults.py."""
    report, began = folder / "faults.xml", time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "tests/test_faults.py", f"--junitxml={report}"]
    subprocess.run(command, cwd=ROOT, check=False)
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")}
    return {"kind": "faults", **counts, "seconds": round(time.perf_counter() - began, 1)}


def marks_of(rows: Sequence[dict[str, Any]], programs: int) -> list[Mark]:
    """Nothing may be wrong, and nothing left out."""
    marks = []
    for row in rows:
        if row["kind"] == "faults":
            marks.append(Mark("faults: tests that fail", row["failures"] + row["errors"], 0))
            continue
        name = f"{row['kind']} ({row['compiler']}, {row['device']})"
        marks.append(Mark(f"{name}: wrong answers and errors", len(row["failed"]), 0))
        if row["kind"] == "programs":
            marks.append(Mark(f"{name}: not run of {programs}", programs - row["rows"], 0))
    return marks


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-ops", action="store_true")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--folder", type=Path, help="where rows are kept, so that a run can be continued")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_trust.json")
    options = parser.parse_args(given)
    common = ["--jobs", str(options.jobs), "--compiler", options.compiler, "--device", options.device]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        seeds = ["--count", str(options.programs), "--seed", str(options.seed)]
        rows = [{**swept("programs", folder, [*seeds, *common]), "first_seed": options.seed}]
        rows += [] if options.no_ops else [swept("ops", folder, common)]
        rows += [] if options.no_faults else [faults(folder)]
    marks = marks_of(rows, options.programs)
    write(
        options.out,
        " ".join(["python -m benchmarks.bench_trust", *without_out(given, "--folder")]),
        rows,
        marks,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
