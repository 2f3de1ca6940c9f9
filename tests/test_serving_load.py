"""The load of the serving benchmark, and the loop that serves it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from piecewise_graph.bench.drive import drive
from piecewise_graph.bench.errors import BenchError
from piecewise_graph.bench.load import Arrival, Load, arrivals, read_texts
from piecewise_graph.bench.metrics import Metrics, Timeline
from piecewise_graph.eagle import Sampling
from piecewise_graph.eagle.statistics import Counts

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


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text("\n \n")
    for file, says in ((blank, "every line is blank"), (tmp_path / "none.txt", "No such file")):
        with pytest.raises(BenchError, match=says):
            read_texts(file, lambda line: [1])


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
    """An engine whose step takes a second and makes `per_step` tokens for every request."""

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
def test_the_loop_serves_every_request_and_never_too_many(
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
    assert sum(clock.slept) == pytest.approx(3.0) and len(clock.slept) == 3  # a second at a time
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
