"""The benchmarks of capture and of trust, in their smallest configuration."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import stack_continuous, stack_generate, stack_lora, stack_quantised
from benchmarks.stack_report import marks_of, matrix
from benchmarks.stack_setting import Setting

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmarks are run as such")


def test_capture() -> None:
    benchmark = importlib.import_module("benchmarks.bench_capture")
    turn = benchmark.measured("tiny", "eager", 8)
    assert (turn["captured_sizes"], turn["captured_graphs"]) == (4, 4 * 4)  # 1, 2, 4, 8; layers and a head
    assert 0 < turn["buckets_s"] < turn["capture_s"]
    row = benchmark.medians([{**turn, "capture_s": seconds} for seconds in (3.0, 1.0, 2.0)])
    assert row["capture_s"] == 2.0 and row["turns_s"] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("tokens", [1, 4, 32, 64, 128])
def test_linears(tokens: int) -> None:
    """Needs a GPU for its times. What it compares is known without one."""
    benchmark = importlib.import_module("benchmarks.bench_linears")
    sizes = {"q k v": (2048, 512, 512), "o": (2048,), "gate up": (8192, 8192), "down": (2048,)}
    layer = {
        part: [torch.empty(n, 8192 if part == "down" else 2048, device="meta") for n in rows]
        for part, rows in sizes.items()
    }
    for rings in (False, True):
        known, tried = benchmark.usual(layer, tokens, 132, rings), list(benchmark.others(tokens, rings))
        assert list(known) == list(sizes) and len(set(tried)) == len(tried) > 4
    found = [
        {"shape": "1b", "tokens": tokens, "launch": launch, "blocks": "", "us": us}
        for launch, us in (("all", 3.0), ("o", 2.0), ("down", 4.0))
    ]
    row, mark = benchmark.summary(found, floor_us=1.0)
    assert (row["changed"], row["best_us"], mark.value) == ("o", 2.0, 1.5)
    with pytest.raises(SystemExit, match="no GPU"):
        benchmark.main(["--tokens", str(tokens)])


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


SMALL = Setting(torch.device("cpu"), "eager", rounds=2)


def test_stacks(tmp_path: Path) -> None:
    """Each case has a process of its own; one that fails is a row that says why."""
    benchmark, out = importlib.import_module("benchmarks.bench_stacks"), tmp_path / "out.json"
    given = ["--compiler", "eager", "--batches", "4", "--rows", "3", "--tokens", "16", "--rounds", "2"]
    given += ["--jobs", "2", "--parts", "embed,quantised", "--weights", "none such"]
    assert benchmark.main([*given, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    *embedded, failed = found["rows"]
    (ours,) = [row for row in embedded if row["side"] == "piecewise"]
    assert (ours["shape"], ours["replayed"]) == ("bert-tiny", 1.0) and ours["error"] < 1e-5
    assert failed == {"part": "quantised", "shape": "tiny", "weights": "none such"} | {
        "error": "KeyError: 'none such'"
    }
    told = {mark["name"]: mark["met"] for mark in found["marks"]}
    assert not told["cases that failed"] and told["embed bert-tiny: piecewise, share not replayed"]


def test_a_step_of_generate_that_captures_is_no_replay() -> None:
    rows = stack_generate.prepared(SMALL, "tiny", requests=2, new_tokens=8)()
    (ours,) = [row for row in rows if row["side"] == "piecewise"]
    # of 7 steps behind the prompt's, one per call captures the graph of a new cache
    assert (ours["requests"], ours["replayed"], ours["first_other_token"]) == (2, 6 / 7, None)
    (missed,) = [mark for mark in marks_of(rows) if "share" in mark.name]
    assert missed.name == "generate tiny 2: piecewise, share not replayed" and missed.value > missed.limit


def test_sides_of_continuous_batching() -> None:
    rows = stack_continuous.prepared(SMALL, "tiny", requests=3, new_tokens=8)()
    assert [row["side"] for row in rows] == ["transformers", "piecewise"]
    assert rows[1]["replayed"] == rows[1]["same_answers"] == 1.0


def test_sides_of_quantised_weights() -> None:
    rows = stack_quantised.prepared(SMALL, "tiny", "int8")()
    assert [(row["requests"], row["side"], row.get("replayed")) for row in rows] == [
        (requests, side, served)
        for requests in (8, 1)
        for side, served in (("eager", None), ("piecewise", 1.0), ("full", 1.0))
    ]
    assert all(row["error"] < 1e-2 for row in rows)  # in bfloat16
    assert [row["between_graphs"] for row in rows if row["side"] == "piecewise"] == [0, 0]


def test_stacks_of_a_loop(tmp_path: Path) -> None:
    benchmark, out = importlib.import_module("benchmarks.bench_stacks"), tmp_path / "out.json"
    given = ["--compiler", "eager", "--rounds", "2", "--new-tokens", "8", "--requests", "2", "--jobs", "2"]
    given += ["--parts", "lora,loop", "--lora-shapes", "none such"]
    assert benchmark.main([*given, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    eager, ours, failed = found["rows"]
    assert failed == {"part": "lora", "shape": "none such", "requests": 2, "error": "KeyError: 'none such'"}
    assert (eager["side"], ours["side"], ours["replayed"]) == ("eager", "full", 1.0)
    assert ours["requests"] == 1 and ours["first_other_token"] is None  # in float32
    told = {mark["name"]: mark["met"] for mark in found["marks"]}
    assert told["loop tiny 1: full, share not replayed"]


def test_sides_of_adapters() -> None:
    rows = stack_lora.prepared(SMALL, "tiny", requests=2)()
    assert [(row["side"], row.get("replayed")) for row in rows] == [
        ("eager", None),
        ("piecewise", 1.0),
        ("full", 1.0),
    ]
    assert all(row["requests"] == 2 and row["error"] < 1e-2 for row in rows)  # in bfloat16
    assert [mark.name for mark in marks_of(rows) if mark.value <= mark.limit] == [
        "cases that failed",
        "lora tiny 2: full, share not replayed",
        "lora tiny 2: piecewise, share not replayed",
    ]
    assert "| lora tiny, 2 requests, full | 100.0% |" in matrix(rows)


def test_the_table_of_stacks_is_made_from_its_results() -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    found = json.loads((folder / "results" / "bench_stacks.json").read_text())
    assert matrix(found["rows"]) in (folder / "README.md").read_text()
    assert [mark.as_row() for mark in marks_of(found["rows"])] == found["marks"]


def test_stacks_are_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark, out = importlib.import_module("benchmarks.bench_stacks"), tmp_path / "bench_stacks.json"
    out.write_text((Path(__file__).parents[1] / "benchmarks" / "results" / out.name).read_text())
    assert benchmark.main(["--report", "--out", str(out)]) == 0
    told, drawn = capsys.readouterr().out, out.with_suffix(".png").exists()
    assert "| embed bert-base | 100.0% |" in told
    assert told.splitlines()[-1] == (
        "plotted bench_stacks.png" if drawn else "no plot: matplotlib is not installed"
    )


def test_a_comparison_goes_on_where_it_stopped(tmp_path: Path) -> None:
    benchmark = importlib.import_module("benchmarks.compare_commits")
    common = importlib.import_module("benchmarks.common")
    names, out = {"old_commit": "a", "new_commit": "b"}, tmp_path / "out.json"
    old, new = [{"x": 1.0, "y": 4.0}, {"x": 1.1, "y": 4.0}], [{"x": 1.05, "y": 5.0}, {"x": 1.05, "y": 5.0}]
    rows, marks = benchmark.compared(old, new)
    common.write(out, "command", [{**names, "turns": 2}, *rows], marks, report=False)
    assert benchmark.turns_of(out, names) == [old, new, []]
    assert [mark.value <= mark.limit for mark in marks] == [True, False]
    control = [{"y": 5.5}, {"y": 4.0}]  # a second process of the old commit measures some of the figures
    rows, marks = benchmark.compared(old, new, control)
    common.write(out, "command", [{**names, "turns": 2}, *rows], marks, report=False)
    assert benchmark.turns_of(out, names) == [old, new, control]
    assert [mark.value <= mark.limit for mark in marks] == [True, True]
    assert (rows[1]["old"], rows[1]["old_spread"]) == (4.0, 5.5 / 4.0)
    with pytest.raises(SystemExit, match="holds another comparison"):
        benchmark.turns_of(out, names | {"new_commit": "c"})


_BENCHMARK = """
import json, sys
from collections import namedtuple
from pathlib import Path
Timing = namedtuple("Timing", "median low high")
def alternate_host(sides, *, rounds):
    with open(Path.cwd().parent / "order", "a") as order:
        order.write(f"{Path.cwd().name} {rounds}\\n")
    return {name: Timing(*call()) for name, call in sides.items()}
def main(arguments):
    assert arguments[:2] == ["--shapes", "deep"] and "--quick" in arguments, arguments
    median = alternate_host({"copied": lambda: (COST, 1, 3)}, rounds=35)["copied"].median
    Path(arguments[-1]).parent.mkdir(exist_ok=True)
    Path(arguments[-1]).write_text(json.dumps({"rows": [{"tokens": 1, "copied_us": median}]}))
"""


def test_commits_time_host_work_by_turns(tmp_path: Path) -> None:
    for name, cost in (("old", 4.0), ("new", 3.0)):
        folder = tmp_path / name / "benchmarks"
        folder.mkdir(parents=True)
        for module in ("__init__", "bench_backend"):
            (folder / f"{module}.py").touch()
        (folder / "bench_host.py").write_text(_BENCHMARK.replace("COST", str(cost)))
    benchmark, out = importlib.import_module("benchmarks.compare_commits"), tmp_path / "out.json"
    given = ["--old", str(tmp_path / "old"), "--new", str(tmp_path / "new"), "--options=--quick"]
    given += ["--benchmarks", "bench_host", "--out", str(out)]
    assert benchmark.main([*given, "--turns", "2"]) == 0
    old_first, new_first = ["old 10", "new 10"], ["new 10", "old 10"]
    rounds = [*old_first, *new_first, *old_first, *new_first, *old_first, *new_first]
    assert (tmp_path / "order").read_text().split("\n")[:-1] == rounds
    row = json.loads(out.read_text())["rows"][1]
    assert (row["ratio"], row["old_turns"], row["new_turns"]) == (0.75, [4.0, 4.0], [3.0, 3.0])
    assert benchmark.main([*given, "--turns", "1", "--control"]) == 0
    turn = ["old 10", "new 10", "old 10"]  # the other way round it is the same
    assert (tmp_path / "order").read_text().split("\n")[len(rounds) : -1] == turn * 3
    row = json.loads(out.read_text())["rows"][1]
    assert (row["old_turns"], row["new_turns"], row["control_turns"]) == ([4.0], [3.0], [4.0])
    (tmp_path / "new" / "benchmarks" / "bench_host.py").write_text(
        "alternate_host, main = 0, lambda _: exit(3)"
    )
    with pytest.raises(subprocess.CalledProcessError, match=r"see above.*3"):
        benchmark.main([*given, "--turns", "1"])
