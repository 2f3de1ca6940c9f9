"""The serving benchmark's settings and its command line, on a tiny model."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from piecewise_graph.bench.metrics import COLUMNS
from piecewise_graph.bench.setting import Setting
from piecewise_graph.cli.commands import main
from piecewise_graph.eagle import DraftShape
from piecewise_graph.eagle.serving.round_store import RoundStore

# Settings.


def test_a_setting_is_changed_by_name() -> None:
    changed = Setting.of(steps=3).but("overlap=off, draft-decode=eager,num_draft_tokens=4", has_draft=True)
    assert changed == Setting.of(steps=3, overlap=False, draft_decode="eager", num_draft_tokens=4)
    assert changed.options.graphs == {"draft": "eager", "verify": "full", "extend": "full"}
    plain = Setting.of(steps=3, topk=2).but("steps=0", has_draft=True)
    assert plain.options.shape == DraftShape(0)
    assert Setting.of(steps="auto").options.shape == "auto"
    assert not any(shape.is_tree for shape in Setting.of(steps="auto").shapes(page_size=16))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ("overlapp=off", "did you mean 'overlap'"),
        ("page-size=16", "takes a run of its own"),
        ("overlap", "has no '='"),
        ("overlap=yes", "on, off"),
        ("steps=-1", "a whole number from 0 up"),
        ("steps=3", "changes nothing"),
        ("topk=9999,num-draft-tokens=1", "the root included"),
    ],
)
def test_a_change_that_cannot_be_says_what_to_do(changes: str, says: str) -> None:
    with pytest.raises(ValueError, match="What to do") as caught:
        Setting.of(steps=3).but(changes, has_draft=True)
    assert says in str(caught.value)


# The command line.


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)


TINY = ["bench", "serving", "--random-weights", "tiny", "--compiler", "eager", "--input-len", "12"]
DRAFT = ["--random-draft", "eagle1", "--synthetic-accept-length", "2.5"]


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    results: dict[str, Any]
    folder: Path


def bench(folder: Path, *options: str) -> Ran:
    """One run on one thread: operations this small do little but wait for other threads."""
    threads, out = torch.get_num_threads(), io.StringIO()
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(out):
            status = main([*TINY, *options, "--json", str(folder / "out.json")])
    finally:
        torch.set_num_threads(threads)
    return Ran(status, out.getvalue(), json.loads((folder / "out.json").read_text()), folder)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Speculation beside plain decoding, at two concurrencies, with every output there is."""
    folder = tmp_path_factory.mktemp("serving")
    return bench(
        folder, *DRAFT, "--output-len", "20", "--range-ratio", "0.5", "--concurrency", "1,2",
        "--num-prompts", "3", "--compare", "steps=0", "--turns", "2",
        "--plot", str(folder / "out.png"), "--trace", str(folder / "trace.json"),
    )  # fmt: skip


def test_every_column_is_printed_and_written(compared: Ran) -> None:
    assert compared.status == 0
    assert all(column in compared.out for column in COLUMNS)
    results = compared.results
    assert results["env"]["torch"] == torch.__version__
    assert results["command"].startswith("python -m piecewise_graph bench serving --random-weights tiny")
    assert results["load"]["input_len"] == 12 and results["load"]["request_rate"] == "inf"
    rows = {(row["max_concurrency"], row["side"]): row for row in results["rows"]}
    assert list(rows) == [(1, "as given"), (1, "steps=0"), (2, "as given"), (2, "steps=0")]
    for row in rows.values():
        assert set(COLUMNS) < set(row) and all(row[column] > 0 for column in COLUMNS)
    assert len(results["turns"]) == 2 * 2 * 2  # concurrencies, sides, turns


def test_the_two_sides_are_compared_with_their_spread(compared: Ran) -> None:
    assert "as given / steps=0: ratio of medians" in compared.out
    found = compared.results["ratios"]
    assert [(each["max_concurrency"], each["column"]) for each in found] == [
        (concurrency, column)
        for concurrency in (1, 2)
        for column in ("output_throughput", "median_tpot_ms", "median_ttft_ms")
    ]
    assert all(each["low"] <= each["high"] for each in found)


def test_synthetic_acceptance_is_labelled_everywhere(compared: Ran) -> None:
    tables = compared.out.split("\n\n")
    assert [("SYNTHETIC" in text) for text in tables[:3]] == [True, False, True]
    for row in (*compared.results["rows"], *compared.results["turns"]):
        synthetic = row["side"] == "as given"
        assert row["acceptance"] == ("SYNTHETIC" if synthetic else "real")
        assert row["synthetic_accept_length"] == (2.5 if synthetic else None)
        assert 1.5 < row["accept_length"] < 3.5 if synthetic else row["accept_length"] == 1.0
    assert all(each["acceptance"] == "SYNTHETIC" for each in compared.results["ratios"])
    assert json.loads((compared.folder / "trace.json").read_text())["acceptance"] == "SYNTHETIC"
    assert "requests: trace.json; SYNTHETIC" in compared.out


def test_the_trace_names_the_phases(compared: Ran) -> None:
    events = json.loads((compared.folder / "trace.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"draft", "verify", "draft-extend"} <= names


def test_a_picture_is_drawn_or_its_absence_explained(compared: Ran) -> None:
    drawn = (compared.folder / "out.png").exists()
    assert ("plotted out.png" in compared.out) == drawn
    assert drawn or "matplotlib is not installed" in compared.out


def test_plain_decoding_needs_no_draft_and_prompts_can_be_text(tmp_path: Path) -> None:
    model = Path(__file__).resolve().parents[1] / "benchmarks" / "models" / "byte-llama"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n\ndef main():\n")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = main(
            ["bench", "serving", "--model", str(model), "--compiler", "eager", "--prompts", str(prompts),
             "--input-len", "8", "--output-len", "4", "--concurrency", "2", "--num-prompts", "2",
             "--request-rate", "500", "--temperature", "0.8", "--warm-up", "0"]
        )  # fmt: skip
    assert status == 0 and "SYNTHETIC" not in out.getvalue()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "3"], "--random-draft eagle1"),
        (["--prompts", "prompts.txt"], "--model DIR"),
        (["--json", "nowhere/out.json"], "its folder does not exist"),
        (["--json", "/dev/full"], "--json /dev/full cannot be written: No space left on device"),
        (
            ["--output-len", "24", "--trace", "/dev/full"],
            "--trace /dev/full cannot be written: No space left on device",
        ),
        (["--num-pages", "4"], "num_pages"),
        ([*DRAFT, "--compare", "steps=2,pages=4"], "It changes one or more of: steps"),
        ([*DRAFT, "--top-p", "0", "--temperature", "1"], "pass a probability above 0"),
        ([*DRAFT, "--topk", "2", "--page-size", "16"], "page_size=1"),
        (["--random-draft", "eagle1", "--synthetic-accept-length", "9"], "from 1 to steps + 1"),
        (["--input-len", "2", "--trace", "trace.json"], "raise --output-len"),
        (["--compare", ""], "--compare '' cannot be read"),
    ],
)
def test_options_that_cannot_be_served_say_what_to_do(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str], inside: None
) -> None:
    assert main([*TINY, "--output-len", "3", "--concurrency", "1", "--num-prompts", "1", *options]) == 2
    error = capsys.readouterr().err
    assert "What to do" in error and says in error


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("/dev/full", "--plot /dev/full cannot be written: No space left on device"),
        ("out.xyz", "--plot out.xyz cannot be drawn: matplotlib has no pictures of that kind"),
    ],
)
def test_a_picture_that_cannot_be_written_says_what_to_do(
    file: str, says: str, capsys: pytest.CaptureFixture[str], inside: None
) -> None:
    pytest.importorskip("matplotlib")
    options = ["--output-len", "3", "--concurrency", "1", "--num-prompts", "1", "--plot", file]
    assert main([*TINY, *options]) == 2
    error = capsys.readouterr().err
    assert "What to do" in error and says in error and not list(Path().iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--concurrency", "0"], "a whole number from 1 up"),
        (["--concurrency", ","], "such as 1,4,16"),
        (["--range-ratio", "1.5"], "from 0 to 1"),
        (["--request-rate", "never"], "pass a number from"),
        (["--overlap", "maybe"], "on, off"),
        (["--extend", "fast"], "full, piecewise, compiled, eager"),
        (["--model", "somewhere"], "not allowed with"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*TINY, *options])
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(inside: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serving", "--model", "./nowhere"]) == 2
    assert "the model './nowhere' cannot be used" in capsys.readouterr().err


def test_a_planner_is_timed_before_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With synthetic acceptance a planner belongs to its engine; timing its shapes is no part of any turn."""
    timed: list[int] = []
    time = RoundStore.time
    monkeypatch.setattr(RoundStore, "time", lambda *args: (timed.append(1), time(*args)))
    options = ["--steps", "auto", "--page-size", "4", "--concurrency", "1", "--num-prompts", "1"]
    assert main([*TINY, *DRAFT, *options, "--output-len", "8"]) == 0
    assert "SYNTHETIC" in capsys.readouterr().out
    assert len(timed) == 1  # for the one batch size, while warming up
