"""The benchmarks of capture and of trust, in their smallest configuration."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmarks are run as such")


def test_capture() -> None:
    benchmark = importlib.import_module("benchmarks.bench_capture")
    turn = benchmark.measured("tiny", "eager", 8)
    assert (turn["captured_sizes"], turn["captured_graphs"]) == (4, 4 * 4)  # 1, 2, 4, 8; layers and a head
    assert 0 < turn["buckets_s"] < turn["capture_s"]
    row = benchmark.medians([turn, {**turn, "capture_s": 2.0}, {**turn, "capture_s": 3.0}])
    assert row["capture_s"] == 2.0 and row["turns_s"] == [turn["capture_s"], 2.0, 3.0]


def test_trust(tmp_path: Path) -> None:
    benchmark, out = importlib.import_module("benchmarks.bench_trust"), tmp_path / "out.json"
    options = ["--programs", "2", "--jobs", "1", "--no-ops", "--no-faults"]
    assert benchmark.main([*options, "--folder", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == "python -m benchmarks.bench_trust " + " ".join(options)
    assert found["rows"][0]["rows"] == 2 and all(mark["met"] for mark in found["marks"])
    faults = {"kind": "faults", "failures": 1, "errors": 1}
    lost = found["rows"][0] | {"rows": 1, "failed": [0]}
    assert [mark.value for mark in benchmark.marks_of([lost, faults], 2)] == [1, 1, 2]


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    benchmark = importlib.import_module("benchmarks.compare_commits")
    common = importlib.import_module("benchmarks.common")
    names, out = {"old_commit": "a", "new_commit": "b"}, tmp_path / "out.json"
    old, new = [{"x": 1.0, "y": 4.0}, {"x": 1.1, "y": 4.0}], [{"x": 1.05, "y": 5.0}, {"x": 1.05, "y": 5.0}]
    rows, marks = benchmark.compared(old, new)
    common.write(out, "command", [{**names, "turns": 2}, *rows], marks, report=False)
    assert benchmark.turns_of(out, names) == (old, new)
    assert [mark.value <= mark.limit for mark in marks] == [True, False]
    with pytest.raises(SystemExit, match="holds another comparison"):
        benchmark.turns_of(out, names | {"new_commit": "c"})
