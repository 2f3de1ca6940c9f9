"""The serving benchmark: its columns by formula, its load, its loop, and the command line on a tiny model."""

from __future__ import annotations

import contextlib
import io
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecewise_graph.bench.drive import drive
from piecewise_graph.bench.errors import BenchError
from piecewise_graph.bench.load import Arrival, Load, arrivals, read_texts
from piecewise_graph.bench.metrics import COLUMNS, Metrics, RequestTimes, Timeline, percentile, ratios, tpot
from piecewise_graph.bench.setting import Setting
from piecewise_graph.cli.commands import main
from piecewise_graph.eagle import DraftShape, Sampling, Statistics
from piecewise_graph.eagle.serving.round_store import RoundStore
from piecewise_graph.eagle.statistics import Counts

FIELD = (
    "max_concurrency", "input_throughput", "output_throughput",
    "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "p99_tpot_ms", "per_user_throughput", "accept_length",
)  # fmt: skip


# Metrics.

moments = st.floats(0, 100, allow_nan=False)
requests = st.builds(
    lambda prompt, new, released, wait, took: RequestTimes(
        prompt, new, released, released + wait, released + wait + took
    ),
    st.integers(1, 1000), st.integers(1, 1000), moments, moments, st.floats(0.001, 100),
)  # fmt: skip


def served(*times: RequestTimes, synthetic: float | None = None) -> Timeline:
    return Timeline(times, len(times), Statistics((), synthetic))


def test_columns_are_those_of_the_field() -> None:
    assert COLUMNS == FIELD


def test_metrics_of_two_requests_by_hand() -> None:
    found = Metrics.of(served(RequestTimes(10, 5, 0.0, 0.5, 2.5), RequestTimes(30, 3, 1.0, 1.1, 2.1)), 2)
    assert found.input_throughput == pytest.approx((10 + 30) / 2.5)
    assert found.output_throughput == pytest.approx((5 + 3) / 2.5)
    assert found.mean_ttft_ms == found.median_ttft_ms == pytest.approx((500 + 100) / 2)
    assert found.p99_ttft_ms == pytest.approx(100 + 0.99 * 400)
    assert found.mean_tpot_ms == pytest.approx((2000 / 4 + 1000 / 2) / 2)
    assert found.per_user_throughput == pytest.approx(1 / 0.5)
    assert found.accept_length == 1.0 and found.synthetic is None


def test_time_per_output_token_needs_two_tokens() -> None:
    assert tpot(RequestTimes(1, 1, 0.0, 0.5, 0.5)) is None
    alone = Metrics.of(served(RequestTimes(1, 1, 0.0, 0.5, 0.5)), 1)
    assert (alone.mean_tpot_ms, alone.p99_tpot_ms, alone.per_user_throughput) == (None, None, None)
    both = Metrics.of(served(RequestTimes(1, 1, 0.0, 0.5, 0.5), RequestTimes(1, 2, 0.0, 0.5, 0.75)), 2)
    assert both.mean_tpot_ms == pytest.approx(250)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 99):
        assert percentile(values, percent) == pytest.approx(cuts[percent - 1])
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


@given(st.lists(requests, min_size=1, max_size=20))
def test_throughputs_belong_to_one_duration(times: list[RequestTimes]) -> None:
    found = Metrics.of(served(*times), len(times))
    seconds = max(each.last for each in times)
    assert found.output_throughput * seconds == pytest.approx(sum(each.output_tokens for each in times))
    asked, made = (sum(getattr(t, name) for t in times) for name in ("input_tokens", "output_tokens"))
    assert found.input_throughput / found.output_throughput == pytest.approx(asked / made)
    assert found.median_ttft_ms <= found.p99_ttft_ms * (1 + 1e-9)
    if found.mean_tpot_ms is not None and found.per_user_throughput is not None:
        assert found.per_user_throughput * found.mean_tpot_ms == pytest.approx(1000)


def test_medians_and_ratios_over_turns() -> None:
    def turn(last: float) -> Metrics:
        return Metrics.of(served(RequestTimes(4, 5, 0.0, 1.0, last)), 1)

    fast, slow = [turn(2.0), turn(3.0), turn(4.0)], [turn(5.0), turn(5.0), turn(5.0)]
    assert Metrics.median_of(fast) == fast[1]
    found = {ratio.column: ratio for ratio in ratios(fast, slow)}
    throughput = found["output_throughput"]
    assert (throughput.value, throughput.low, throughput.high) == pytest.approx((5 / 3, 5 / 4, 5 / 2))
    times = found["median_tpot_ms"]
    assert (times.value, times.low, times.high) == pytest.approx((2 / 4, 1 / 4, 3 / 4))
    assert found["median_ttft_ms"].value == 1.0


# The load.


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 1), st.integers(0, 5))
def test_lengths_are_in_range_and_seeded(input_len: int, output_len: int, ratio: float, seed: int) -> None:
    load = Load(input_len, output_len, ratio, seed=seed, vocab_size=50)
    found = arrivals(load, 8)
    assert found == arrivals(load, 8) and found[:3] == arrivals(load, 3)
    for each in found:
        assert max(1, ratio * input_len) <= len(each.prompt) <= input_len
        assert max(1, ratio * output_len) <= each.max_new_tokens <= output_len
        assert set(each.prompt) <= set(range(50)) and each.due == 0.0


def test_another_seed_is_another_load() -> None:
    assert arrivals(Load(20, 20, 0.1, seed=1, vocab_size=9), 4) != arrivals(
        Load(20, 20, 0.1, seed=2, vocab_size=9), 4
    )


def test_arrivals_keep_the_rate_and_leave_lengths_alone() -> None:
    at_once, timed = Load(20, 20, 0.1, vocab_size=9), Load(20, 20, 0.1, 4.0, vocab_size=9)
    found = arrivals(timed, 2000)
    assert [each.prompt for each in found[:9]] == [each.prompt for each in arrivals(at_once, 9)]
    dues = [each.due for each in found]
    assert dues == sorted(dues) and dues[-1] / 2000 == pytest.approx(1 / 4, rel=0.1)
    gaps = [after - before for before, after in pairwise(dues)]
    assert statistics.stdev(gaps) == pytest.approx(1 / 4, rel=0.1)  # exponential: as wide as its mean


def test_texts_are_taken_in_turn_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("abcdef\n\nxy\n")
    texts = read_texts(file, lambda line: [ord(letter) for letter in line])
    found = arrivals(Load(4, 2, texts=texts), 3)
    assert [bytes(each.prompt) for each in found] == [b"abcd", b"xy", b"abcd"]


# The loop.


class Clock:
    def __init__(self) -> None:
        self.now, self.slept = 7.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now = math.nextafter(self.now + seconds, math.inf)  # never shorter, however it is rounded


@dataclass
class Asked:
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    on_tokens: Any
    tokens: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


class Steady:
    """An engine whose step takes a second and makes `per_step` tokens for everybody."""

    synthetic_accept_length = None

    def __init__(self, clock: Clock, per_step: int = 1) -> None:
        self.clock, self.per_step = clock, per_step
        self.live, self.released, self.most = list[Asked](), list[float](), 0

    @property
    def unfinished(self) -> int:
        return len(self.live)

    def add_request(self, prompt: Any, *, max_new_tokens: int, sampling: Any, on_tokens: Any) -> Asked:
        self.live.append(Asked(prompt, max_new_tokens, sampling, on_tokens))
        self.released.append(self.clock.now)
        self.most = max(self.most, len(self.live))
        return self.live[-1]

    def step(self) -> None:
        assert self.live, "a step without a request is a step for nothing"
        self.clock.now += 1.0
        for each in self.live:
            new = [0] * min(self.per_step, each.max_new_tokens - len(each.tokens))
            each.tokens += new
            each.on_tokens(each, new)
        self.live = [each for each in self.live if len(each.tokens) < each.max_new_tokens]


def steadily(load: list[Arrival], concurrency: int, per_step: int = 1) -> tuple[Timeline, Steady, Clock]:
    clock = Clock()
    engine = Steady(clock, per_step)
    timeline = drive(engine, load, concurrency, Sampling(seed=5), clock=clock, sleep=clock.sleep)
    return timeline, engine, clock


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from([0.3, 2.0, float("inf")]), st.integers(1, 3))
def test_the_loop_serves_everybody_and_never_too_many(
    count: int, concurrency: int, rate: float, per_step: int
) -> None:
    load = arrivals(Load(5, 7, 0.2, rate, vocab_size=9), count)
    timeline, engine, clock = steadily(load, concurrency, per_step)
    assert engine.most == timeline.most_at_once <= concurrency
    assert [each.output_tokens for each in timeline.requests] == [each.max_new_tokens for each in load]
    for arrival, each, released in zip(load, timeline.requests, engine.released, strict=True):
        assert each.released == released - 7.0 >= arrival.due - 1e-9
        assert each.released < each.first <= each.last <= timeline.seconds
    assert rate < float("inf") or not clock.slept


def test_the_loop_sleeps_only_while_nothing_is_unfinished() -> None:
    timeline, _, clock = steadily([Arrival(0, (1,), 2, due=3.0), Arrival(1, (1,), 2, due=3.5)], 4)
    assert clock.slept == [3.0]
    first, second = timeline.requests
    assert (first.released, first.first, first.last) == pytest.approx((3.0, 4.0, 5.0))
    assert (second.released, second.first, second.last) == pytest.approx((4.0, 5.0, 6.0))  # due during a step


def test_waiting_for_room_is_no_part_of_the_time_to_first_token() -> None:
    timeline, _, _ = steadily([Arrival(0, (1,), 4), Arrival(1, (1,), 4)], 1, per_step=2)
    found = Metrics.of(timeline, 1)
    assert found.mean_ttft_ms == found.p99_ttft_ms == 1000
    assert found.mean_tpot_ms == pytest.approx(1000 / 3)  # 4 tokens, learned of in two steps


def test_every_request_has_a_seed_of_its_own() -> None:
    seen: list[int] = []

    class Noting(Steady):
        def add_request(self, prompt: Any, *, sampling: Any, **asked: Any) -> Asked:
            seen.append(sampling.seed)
            return super().add_request(prompt, sampling=sampling, **asked)

    clock = Clock()
    drive(Noting(clock), [Arrival(0, (1,), 1), Arrival(1, (1,), 1)], 2, Sampling(seed=5), clock=clock)
    assert seen == [5, 6]


# Settings.


def test_a_setting_is_changed_by_name() -> None:
    changed = Setting(steps=3).but("overlap=off, draft-decode=eager,num_draft_tokens=4", has_draft=True)
    assert changed == Setting(steps=3, overlap=False, draft_decode="eager", num_draft_tokens=4)
    assert changed.phase_graphs == {"draft": "eager", "verify": "full", "extend": "full"}
    plain = Setting(steps=3, topk=2).but("steps=0", has_draft=True)
    assert plain.shape == DraftShape(0)
    assert Setting(steps="auto").shape == "auto"
    assert not any(shape.is_tree for shape in Setting(steps="auto").shapes(page_size=16))


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
        Setting(steps=3).but(changes, has_draft=True)
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
        folder, *DRAFT, "--output-len", "32", "--range-ratio", "0.5", "--concurrency", "1,2",
        "--num-prompts", "3", "--compare", "steps=0", "--turns", "2",
        "--plot", str(folder / "out.png"), "--trace", str(folder / "trace.json"),
    )  # fmt: skip


def test_every_column_is_printed_and_written(compared: Ran) -> None:
    assert compared.status == 0
    assert all(column in compared.out for column in FIELD)
    results = compared.results
    assert results["env"]["torch"] == torch.__version__
    assert results["command"].startswith("python -m piecewise_graph bench serving --random-weights tiny")
    assert results["load"]["input_len"] == 12 and results["load"]["request_rate"] == "inf"
    rows = {(row["max_concurrency"], row["side"]): row for row in results["rows"]}
    assert list(rows) == [(1, "as given"), (1, "steps=0"), (2, "as given"), (2, "steps=0")]
    for row in rows.values():
        assert set(FIELD) < set(row) and all(row[column] > 0 for column in FIELD)
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


def test_decreed_acceptance_is_labelled_everywhere(compared: Ran) -> None:
    tables = compared.out.split("\n\n")
    assert [("SYNTHETIC" in text) for text in tables[:3]] == [True, False, True]
    for row in (*compared.results["rows"], *compared.results["turns"]):
        decreed = row["side"] == "as given"
        assert row["acceptance"] == ("SYNTHETIC" if decreed else "real")
        assert row["synthetic_accept_length"] == (2.5 if decreed else None)
        assert 1.5 < row["accept_length"] < 3.5 if decreed else row["accept_length"] == 1.0
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
    """With decreed acceptance a planner belongs to its engine; timing its shapes is no part of any turn."""
    timed: list[int] = []
    time = RoundStore.time
    monkeypatch.setattr(RoundStore, "time", lambda *args: (timed.append(1), time(*args)))
    options = ["--steps", "auto", "--page-size", "4", "--concurrency", "1", "--num-prompts", "1"]
    assert main([*TINY, *DRAFT, *options, "--output-len", "8"]) == 0
    assert "SYNTHETIC" in capsys.readouterr().out
    assert len(timed) == 1  # for the one batch size, while warming up


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    for file, says in ((blank, "every line is blank"), (tmp_path / "none.txt", "No such file")):
        with pytest.raises(BenchError, match=says):
            read_texts(file, lambda line: [1])
