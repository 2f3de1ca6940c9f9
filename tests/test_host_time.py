"""A benchmark's host time per step leaves out what the step waits for the device, and nothing else."""

from __future__ import annotations

import time

import pytest

from benchmarks.host_time import host_us


class Event:
    def synchronize(self) -> None:
        time.sleep(0.05)


def test_waiting_is_left_out() -> None:
    def step() -> None:
        Event().synchronize()
        time.sleep(0.01)

    original = Event.synchronize
    assert 10_000 <= host_us(step, 3, Event) < 50_000
    assert Event.synchronize is original


def test_a_wait_that_fails_is_the_caller_s_error_and_leaves_the_event_as_it_was() -> None:
    original = Event.synchronize
    with pytest.raises(RuntimeError, match="lost"):
        host_us(_fail, 3, Event)
    assert Event.synchronize is original


def _fail() -> None:
    raise RuntimeError("the device was lost")
