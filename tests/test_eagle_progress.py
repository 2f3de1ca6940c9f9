"""A request's progress: any legal sequence of events keeps its invariants, and an illegal event is caught."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, strategies as st

from piecewise_graph.eagle import Sampling
from piecewise_graph.eagle.request import Progress, Request

PROMPT = 7


class Life:
    """A request and what an engine may do to it, with a model of its counters beside them."""

    def __init__(self, rng: random.Random, max_new_tokens: int) -> None:
        self.rng, self.steps = rng, rng.randint(0, 4)
        self.heard: list[int] = []
        self.request = Request(
            0, tuple(range(PROMPT)), Sampling(), max_new_tokens, frozenset(),
            lambda _, tokens: self.heard.extend(tokens),
        )  # fmt: skip
        self.in_flight: deque[int] = deque()  # max_new of each launch
        self.is_admitted = self.is_running = self.is_behind = False

    def legal(self) -> list[Callable[[], None]]:
        """Events that may come next."""
        events = [self.report, self.interrupt]
        if not self.is_admitted:
            return [*events, self.admit]
        if not self.is_running:
            return [*events, self.prefill]
        if self.in_flight:
            events.append(self.settle)
        else:
            events += [self.rewind, self.preempt, self.catch_up]
        if not self.request.ends_in_flight:
            events.append(self.launch)
        return events

    def admit(self) -> None:
        self.request.progress.admitted()
        self.is_admitted, self.is_behind = True, False

    def prefill(self) -> None:
        progress, length = self.request.progress, self.request.length
        stop = self.rng.randint(progress.num_computed + 1, length)
        progress.prefilled(stop)
        if stop < length:
            return
        self.is_running = True
        if not self.request.tokens:
            progress.launched(0)
            self.in_flight.append(0)

    def launch(self) -> None:
        if self.steps and self.is_behind and self.in_flight:
            return  # the draft has to catch up first
        if self.steps and self.is_behind:
            self.catch_up()
        self.request.progress.launched(self.steps + 1, plain=not self.steps)
        self.in_flight.append(self.steps + 1)
        self.is_behind |= not self.steps

    def settle(self) -> None:
        max_new = self.in_flight.popleft()
        self.request.take([1] * self.rng.randint(1, max(max_new, 1)), after=len(self.request.tokens))
        self.request.progress.settled(max_new)
        if max_new > 1:
            self.request.progress.drafted(self.request.length)

    def catch_up(self) -> None:
        self.request.progress.caught_up(self.request.length)
        self.is_behind = False

    def preempt(self) -> None:
        self.is_admitted = self.is_running = False

    def rewind(self) -> None:
        self.request.rewind()
        del self.heard[1:]

    def interrupt(self) -> None:
        """An exception ended a step; what was in flight is lost."""
        self.in_flight.clear()
        self.request.progress.restarted()
        self.preempt()

    def report(self) -> None:
        self.request.report()

    def check(self) -> None:
        request, progress = self.request, self.request.progress
        assert progress.results_in_flight == len(self.in_flight)
        assert progress.tokens_in_flight == sum(self.in_flight)
        assert progress.num_reported == len(self.heard) <= len(request.tokens)
        assert self.heard == request.tokens[: progress.num_reported]
        assert request.has_news == (len(self.heard) < len(request.tokens))
        if self.is_admitted:
            assert progress.num_computed <= request.length
            assert progress.num_drafted <= request.length
            assert progress.draft_is_behind == self.is_behind
        if self.is_running and not self.is_behind:  # the draft has all that the host knows
            assert progress.num_drafted == request.length


@given(st.integers(0, 10**6), st.integers(1, 30))
def test_any_legal_sequence_keeps_the_invariants(seed: int, max_new_tokens: int) -> None:
    rng = random.Random(seed)
    life = Life(rng, max_new_tokens)
    for _ in range(60):
        rng.choice(life.legal())()
        life.check()
    assert len(life.request.tokens) <= max_new_tokens


@given(st.lists(st.integers(0, 5), max_size=8))
def test_what_was_launched_is_settled_to_nothing(launches: list[int]) -> None:
    progress = Progress()
    for max_new in launches:
        progress.launched(max_new)
    assert (progress.results_in_flight, progress.tokens_in_flight) == (len(launches), sum(launches))
    for max_new in launches:
        progress.settled(max_new)
    assert progress == Progress()


def in_flight(max_new: int) -> Progress:
    progress = Progress()
    progress.launched(max_new)
    return progress


def prefilled(stop: int) -> Progress:
    progress = Progress()
    progress.prefilled(stop)
    return progress


ILLEGAL: dict[str, Callable[[], None]] = {
    "admitted with a result in flight": lambda: in_flight(0).admitted(),
    "rewound with a result in flight": lambda: in_flight(0).rewound(1),
    "caught up while a round is in flight": lambda: in_flight(1).caught_up(1),
    "more was settled than launched": lambda: Progress().settled(0),
    "settled with another max_new": lambda: in_flight(4).settled(2),
    "prefilled backwards": lambda: prefilled(5).prefilled(4),
    "reported backwards": lambda: Progress(num_reported=3).reported(2),
}


@pytest.mark.parametrize("says", ILLEGAL)
def test_illegal_events_are_caught(says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        ILLEGAL[says]()


@pytest.mark.parametrize("plain", [True, False])
def test_only_plain_rounds_leave_the_draft_behind(plain: bool) -> None:
    progress = Progress()
    progress.launched(1, plain=plain)
    assert progress.draft_is_behind == plain
    progress.settled(1)
    progress.caught_up(9)
    assert not progress.draft_is_behind and progress.num_drafted == 9
