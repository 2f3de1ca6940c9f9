"""The benchmarks of whole models, in their smallest configuration, and what bench_compare makes of faults."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sides that need CUDA say so here")

TINY = ["--shapes", "tiny", "--compiler", "eager", "--rounds", "2"]
SIDES = "eager,meta,piecewise,full"


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Importing a benchmark that starts cold moves the compilers' caches; afterwards they are back.

    One thread, here and in children: on a busy machine, ops this small do little but wait for other threads.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str, options: list[str], out: Path) -> dict[str, Any]:
    """One benchmark's results, with what all of them have checked."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    assert benchmark.main([*TINY, *options, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    assert set(found) == {"env", "command", "rows", "marks"}
    assert found["env"]["torch"] == torch.__version__
    assert found["command"].startswith(f"python -m benchmarks.{name} ") and str(out) not in found["command"]
    assert found["rows"]
    for mark in found["marks"]:
        assert set(mark) == {"name", "value", "limit", "met"}
        assert mark["met"] == (mark["value"] <= mark["limit"])
    return found


@pytest.mark.slow
def test_suite_is_saved_and_compared(tmp_path: Path) -> None:
    """`pytest benchmarks` with its users' options, twice in one process; one benchmark stands for all."""
    root, results = Path(__file__).resolve().parents[1], tmp_path / "out.json"
    kept = [f"--benchmark-storage={tmp_path}", "--benchmark-max-time=0.1"]
    call = ["-q", "benchmarks", "-k", "metadata and 4-16", *kept]
    calls = [[*call, f"--benchmark-json={results}", "--benchmark-save=first"], [*call, "--benchmark-compare"]]
    code = f"import pytest; raise SystemExit([pytest.main(call) for call in {calls}] != [0, 0])"
    # Under xdist pytest-benchmark measures nothing, and a child of one of its workers looks like one.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.count("1 passed") == 2, done.stdout + done.stderr
    _, _, compared = done.stdout.partition("1 passed")
    assert "first" in compared  # the run that this one stands beside
    (found,) = json.loads(results.read_text())["benchmarks"]
    assert found["name"] == "test_metadata[4-16]" and found["stats"]["median"] > 0


def test_suite_covers_every_stage() -> None:
    suite = importlib.import_module("benchmarks.test_suite")
    names = {name.removeprefix("test_") for name in vars(suite) if name.startswith("test_")}
    assert names == {
        "split_and_compile", "capture", "replay", "frozen_call", "decode_step", "attention", "metadata",
        "round", "engine_step",
    }  # fmt: skip


def test_backend(tmp_path: Path) -> None:
    options = ["--tokens", "1,8", "--max-tokens", "8", "--no-torch-compile"]
    found = run("bench_backend", options, tmp_path / "out.json")
    assert [row["tokens"] for row in found["rows"] if "tokens" in row] == [1, 8]
    assert len(found["marks"]) == 4


def test_decode(tmp_path: Path) -> None:
    found = run("bench_decode", ["--batches", "1,4"], tmp_path / "out.json")
    assert [row["batch"] for row in found["rows"] if "batch" in row] == [1, 4]
    assert len(found["marks"]) == 2


def test_host(tmp_path: Path) -> None:
    found = run("bench_host", ["--tokens", "1,4"], tmp_path / "out.json")
    modes = {(row["mode"], row["tokens"]): row for row in found["rows"]}
    layers = 3
    for tokens in (1, 4):
        assert modes["full", tokens]["graphs"] == 1
        assert modes["full", tokens]["attention_calls"] == 0
        assert modes["full", tokens]["graph_in_place_us"] > 0
        assert modes["piecewise", tokens]["graphs"] == layers + 1
        assert modes["piecewise", tokens]["attention_calls"] == layers
    for row in found["rows"]:
        beyond = row["copied_us"] - 3.0 * row["graphs"] - row["attention_us"]
        assert row["copied_beyond_us"] == pytest.approx(beyond)
    assert found["marks"] == []  # stand-ins compute what graphs launch: host time says nothing here


def test_padding_proof(tmp_path: Path) -> None:
    """A decoder that is proved, one whose mask is cut out, and a name that is no model."""
    out = tmp_path / "out.json"
    benchmark = importlib.import_module("benchmarks.bench_padding_proof")
    assert benchmark.main(["llama", "mpt", "nothing", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == "python -m benchmarks.bench_padding_proof llama mpt nothing"
    llama, mpt, nothing, total = found["rows"]
    assert llama["proved"] == llama["structures"] == 3 and llama["regions"] == 0
    assert mpt["cut"] == mpt["structures"] == 1
    assert mpt["regions"] > 0 and 0 < mpt["nodes_on_live_rows"] < mpt["nodes"] / 2
    assert "slice by a size" in " ".join(mpt["reasons"])
    assert nothing["error"].startswith("KeyError")
    assert (total["models"], total["structures"]) == (2, 4)
    assert total["models_without_figures"] == {"KeyError": 1}
    assert (total["proved"], total["cut"], total["refused"]) == (3, 1, 0) and found["marks"] == []


def test_eagle(tmp_path: Path) -> None:
    options = [
        "--heads",
        "eagle1",
        "--batches",
        "2",
        "--turns",
        "1",
        "--specialize",
        "",
        "--draft-specialize",
        "",
        "--no-pair",
    ]
    found = run("bench_eagle", options, tmp_path / "out.json")
    rows = [row for row in found["rows"] if "graphs" in row]
    sides = ["full", "piecewise", "draft eager", "verify eager", "extend eager", "extend compiled", "plain"]
    assert [row["requests"] for row in found["rows"] if "ratio" in row] == [2]
    assert [row["graphs"] for row in rows] == [*sides, "full", "plain"]
    assert {row["synthetic_accept_length"] for row in rows if row["graphs"] == "full"} == {1.0, 2.5}


def test_serving(tmp_path: Path) -> None:
    lengths = ["--input-len", "16", "--output-len", "16"]
    options = ["--concurrency", "1,2", "--turns", "1", *lengths, "--specialize", ""]
    found = run("bench_serving", options, tmp_path / "out.json")
    kinds = {
        kind: [row for row in found["rows"] if row["kind"] == kind] for kind in ("side", "ratio", "idle")
    }
    changes = ["overlap=off", "extend=eager", "graphs=piecewise", "steps=0", "steps=auto"]
    for users in (1, 2):
        own = [row for row in kinds["side"] if row["max_concurrency"] == users]
        assert [row["side"] for row in own if row["load"] == "serving"] == ["as given", *changes]
        assert [row["side"] for row in own if row["load"] == "decode"] == [
            "as given",
            "overlap=off",
            "steps=0",
        ]
        assert {row["acceptance"] for row in own if row["side"] == "steps=0"} == {"real"}
        assert {row["acceptance"] for row in own if row["side"] != "steps=0"} == {"SYNTHETIC"}
    assert len(kinds["ratio"]) == 2 * (len(changes) + 2) * 3  # users, changes on both loads, columns
    assert [(row["max_concurrency"], row["overlap"]) for row in kinds["idle"]] == [(1, True), (1, False)]
    assert all(row["steps"] == 2 and row["between_launches"] is None for row in kinds["idle"])  # on a CPU
    assert all(row["host_us"] > 0 for row in kinds["idle"])
    planned = [row for row in kinds["ratio"] if row["ratio"] == "steps=auto / steps=0"]
    assert {row["acceptance"] for row in planned} == {"SYNTHETIC"}
    assert found["marks"] == []  # nothing is promised of this shape under a short load


def test_serving_results_of_several_runs_add_up(tmp_path: Path) -> None:
    results, out = importlib.import_module("benchmarks.serving_results"), tmp_path / "out.json"

    def rows(shape: str, tpot: float) -> list[dict[str, Any]]:
        side = {"kind": "side", "shape": shape, "load": "decode", "side": "steps=0"}
        return [side | {"max_concurrency": users, "median_tpot_ms": tpot} for users in (1, 4)]

    for command, shape, tpot in (("first", "8b", 5.5), ("second", "1b", 1.5), ("third", "8b", 4.5)):
        results.Results(out, command).add(rows(shape, tpot))
    found = json.loads(out.read_text())
    assert found["command"] == "first; second; third"
    assert [(row["shape"], row["median_tpot_ms"]) for row in found["rows"]] == [
        ("1b", 1.5), ("1b", 1.5), ("8b", 4.5), ("8b", 4.5),
    ]  # fmt: skip
    assert [mark["met"] for mark in found["marks"]] == [True, True]
    out.write_text(out.read_text().replace(torch.__version__, "1.0"))
    results.Results(out, "fourth").add(rows("1b", 1.0))
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_marks_of_serving() -> None:
    serving = importlib.import_module("benchmarks.serving_marks")

    def ratio(value: float, users: int) -> dict[str, Any]:
        return {"kind": "ratio", "shape": "1b", "load": "decode", "max_concurrency": users,
                "ratio": "as given / overlap=off", "column": "median_tpot_ms", "value": value}  # fmt: skip

    def idle(share: float, overlap: bool) -> dict[str, Any]:
        return {"kind": "idle", "shape": "1b", "max_concurrency": 16, "overlap": overlap,
                "between_launches": share}  # fmt: skip

    def met(*rows: dict[str, Any]) -> list[tuple[float, bool]]:
        return [(mark.value, mark.as_row()["met"]) for mark in serving.marks_of(rows)]

    assert met(ratio(0.90, 1), ratio(0.97, 16), ratio(0.97, 4)) == [(0.90, True), (0.97, False)]
    # Overlap cannot remove more than there is: 1 - 0.97 * (1 - 0.01) of the time, if the device is busy for
    # as long on both sides; where there was enough, it should have.
    off = pytest.approx(1 - 0.97 * 0.99)
    assert met(ratio(0.97, 16), idle(0.20, False), idle(0.01, True)) == [(off, True), (0.01, True)]
    assert met(ratio(0.97, 16), idle(0.20, False), idle(0.04, True)) == [(0.97, False), (0.04, False)]
    plain = {"kind": "side", "shape": "8b", "load": "decode", "side": "steps=0"}
    plain |= {"max_concurrency": 4, "median_tpot_ms": 4.9}
    assert met(plain) == [(4.9, True)]
    gain = {"load": "serving", "requests": 320, "column": "output_throughput"}
    drafts, auto = gain | {"ratio": "as given / steps=0"}, gain | {"ratio": "steps=auto / steps=0"}
    speculation = [ratio(value, users) | drafts for value, users in ((1.25, 1), (1.0, 4), (1.0, 16))]
    assert met(*speculation) == [(0.8, True), (1.0, False)]  # nothing is promised for 16 requests
    planner = [ratio(value, 16) | auto for value in (1.0, 0.97)]
    assert met(*planner) == [(1.0, True), (pytest.approx(1 / 0.97), False)]
    assert met(ratio(0.97, 32) | auto) == []  # of a load of 10 requests per user
    assert met({key: value for key, value in (ratio(0.97, 4) | auto).items() if key != "requests"}) == []


def test_eagle_greedy(tmp_path: Path) -> None:
    benchmark = importlib.import_module("benchmarks.eagle_greedy")
    options = ["--heads", "eagle1", "--prompts", "2", "--new-tokens", "3", "--compiler", "eager"]
    assert benchmark.main([*options, "--out", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["rows"]) == len(benchmark.WAYS) * len(benchmark.CHAINS + benchmark.TREES)
    assert all(row["differences"] == [] for row in found["rows"])  # float32
    assert benchmark.differences([[1, 2], [3, 4]], [[1, 2], [3, 5]], [[1.0, 2.0], [3.0, 0.5]]) == [
        {"prompt": 1, "token": 1, "gap": 0.5}
    ]


def test_compare(tmp_path: Path) -> None:
    options = ["--tokens", "1,4", "--sides", SIDES]
    found = run("bench_compare", options, tmp_path / "out.json")
    kinds = {
        kind: [row for row in found["rows"] if row["kind"] == kind] for kind in ("start", "ready", "forward")
    }
    assert [(row["side"], row["start"]) for row in kinds["start"]] == [("ours", "cold"), ("ours", "warm")]
    assert all(row["ready"] == [1, 4] and row["traces"] == 1 for row in kinds["start"])
    assert [row["side"] for row in kinds["ready"]] == SIDES.split(",")
    timed = {(row["side"], row["tokens"]): row for row in kinds["forward"]}
    assert set(timed) == {(side, tokens) for side in SIDES.split(",") for tokens in (1, 4)}
    for (side, _), row in timed.items():
        if side == "meta":
            assert row["error"] == "needs CUDA"
        else:
            assert row["ms"] > 0 and row["host_us"] > 0 and row["over_floor"] > 0 and "error" not in row
            assert row["difference_to_eager"] < 0.02  # bf16
    report = importlib.import_module("benchmarks.compare_report")
    assert "needs CUDA" in report.report(found["rows"])
    text = report.markdown(found["rows"])
    assert "| tiny | 1 | 4 | host µs |" in text and "| ours, piecewise |" in text


def test_rows_of_other_shapes_stay_in_the_results(tmp_path: Path) -> None:
    compare, out = importlib.import_module("benchmarks.bench_compare"), tmp_path / "out.json"

    def start(kind: str, seconds: float) -> dict[str, Any]:
        return {"kind": "start", "shape": "8b", "side": "ours", "start": kind, "compile_s": seconds}

    compare._merge(out, "first", "8b", [start("cold", 9.0), start("warm", 1.0)])
    compare._merge(out, "second", "1b", [{"kind": "forward", "shape": "1b", "side": "eager", "tokens": 1}])
    compare._merge(out, "third", "8b", [start("cold", 7.0)])
    found = json.loads(out.read_text())
    assert found["command"] == "first; second; third"
    assert [row["shape"] for row in found["rows"]] == ["1b", "8b"]
    assert [(mark["value"], mark["limit"], mark["met"]) for mark in found["marks"]] == [(7.0, 8.0, True)]


def test_rows_of_another_machine_do_not_stay(tmp_path: Path) -> None:
    compare, out = importlib.import_module("benchmarks.bench_compare"), tmp_path / "out.json"
    compare._merge(out, "first", "8b", [{"kind": "floor", "shape": "8b", "ms": 1.0}])
    out.write_text(out.read_text().replace(torch.__version__, "1.0"))
    compare._merge(out, "second", "1b", [{"kind": "floor", "shape": "1b", "ms": 1.0}])
    found = json.loads(out.read_text())
    assert (found["command"], [row["shape"] for row in found["rows"]]) == ("second", ["1b"])


def test_a_side_that_takes_too_long_is_cut_off_with_what_it_said(tmp_path: Path) -> None:
    compare = importlib.import_module("benchmarks.bench_compare")
    rows, fault = compare._child(["--child", "steady", "--shape", "tiny"], tmp_path, patience=0.2)
    assert (rows, fault) == ([], "cut off after 0 s")
    child = importlib.import_module("benchmarks.compare_child")
    assert child.parse('noise\n@row {"a": 1}\n@row {"b":') == [{"a": 1}]


def test_what_a_budget_leaves_no_time_for_is_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokens", "1", "--sides", "eager,full", "--budget", "0"]
    found = run("bench_compare", options, tmp_path / "out.json")
    starts, forwards = found["rows"][:2], found["rows"][2:]
    assert [(row["start"], row["error"]) for row in starts] == [
        ("cold", "cut off after 0 s"),
        ("warm", "cut off after 0 s"),
    ]
    assert [(row["side"], row["error"]) for row in forwards] == [
        ("eager", "cut off after 0 s"),
        ("full", "cut off after 0 s"),
    ]
    compare = importlib.import_module("benchmarks.bench_compare")
    child = importlib.import_module("benchmarks.compare_child")
    child.steady(compare._options([*TINY, *options, "--child", "steady", "--shape", "tiny"]))
    rows = [row for row in child.parse(capsys.readouterr().out) if row["kind"] != "floor"]
    assert [(row["kind"], row["side"]) for row in rows] == [
        (kind, side) for kind in ("ready", "forward") for side in ("eager", "full")
    ]
    assert {row["error"] for row in rows} == {"no time left"}


def test_token_counts_that_a_start_did_not_reach_are_not_tried_again() -> None:
    compare = importlib.import_module("benchmarks.bench_compare")
    options = compare._options(["--tokens", "1,4,64"])
    late = {"start": "cold", "side": "compile", "ready": [4, 64], "error": "cut off after 9 s"}
    fine = {"start": "cold", "side": "partition", "ready": [1, 4, 64]}
    skipped = compare._skipped([late, fine], options)
    assert skipped == {side: {1: "start: cut off after 9 s"} for side in ("compile", "raw", "meta")}
