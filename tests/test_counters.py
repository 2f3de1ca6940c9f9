"""pg.counters: counts that other tests assert by formula."""

from __future__ import annotations

import pytest

import piecewise_graph as pg
from piecewise_graph.telemetry import NAMES, Counters


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_snapshot_has_every_name_and_is_a_copy(counters: Counters) -> None:
    before = counters.snapshot()
    assert before == dict.fromkeys(NAMES, 0)
    counters.add("replays")
    assert before["replays"] == 0
    assert counters.snapshot()["replays"] == 1


def test_reasons_are_counted_apart_and_together(counters: Counters) -> None:
    counters.add("fallbacks", reason="autocast")
    counters.add("fallbacks", reason="no_tokens")
    counters.add("unpadded_segments", 3, reason="mixes_tokens")
    found = counters.snapshot()
    assert found["fallbacks"] == found["fallbacks:autocast"] + found["fallbacks:no_tokens"] == 2
    assert found["unpadded_segments"] == found["unpadded_segments:mixes_tokens"] == 3


def test_expect_accepts_exactly_the_named_changes(counters: Counters) -> None:
    with counters.expect(replays=2, captures=0):
        counters.add("replays", 2)
        counters.add("traces")  # not named: may change


@pytest.mark.parametrize(("expected", "moved"), [(1, 0), (1, 2), (0, 1)])
def test_expect_names_what_moved_differently(counters: Counters, expected: int, moved: int) -> None:
    message = rf"replays: expected \+{expected}, found \+{moved}"
    with pytest.raises(AssertionError, match=message), counters.expect(replays=expected):
        counters.add("replays", moved)


def test_expect_takes_reasons_that_never_occurred(counters: Counters) -> None:
    with counters.expect(**{"fallbacks:autocast": 0}):
        pass
    with (
        pytest.raises(AssertionError, match="fallbacks:autocast"),
        counters.expect(**{"fallbacks:autocast": 1}),
    ):
        pass


def test_expect_refuses_a_name_that_cannot_move(counters: Counters) -> None:
    """A misspelt counter with an expected change of 0 would always pass."""
    with pytest.raises((AssertionError, KeyError, ValueError, TypeError)), counters.expect(replay=0):
        pass


def test_error_inside_expect_is_not_replaced(counters: Counters) -> None:
    with pytest.raises(ZeroDivisionError), counters.expect(replays=1):
        raise ZeroDivisionError


def test_clear_zeroes_everything(counters: Counters) -> None:
    counters.add("fallbacks", reason="autocast")
    counters.clear()
    assert counters.snapshot() == dict.fromkeys(NAMES, 0)


def test_repr_shows_the_counts() -> None:
    assert "replays" in repr(pg.counters)
