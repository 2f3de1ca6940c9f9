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


def test_each_step_has_its_own_waits() -> None:
    waits = iter([True, False, True])

    def step() -> None:
        time.sleep(0.01)
        if next(waits):
            Event().synchronize()

    assert 10_000 <= host_us(step, 3, Event) < 50_000


class Lost(Event):
    def synchronize(self) -> None:
        raise RuntimeError("the device was lost")


def test_a_wait_that_fails_fails_the_step_and_leaves_the_event_as_it_was() -> None:
    original = Lost.synchronize
    with pytest.raises(RuntimeError, match="lost"):
        host_us(lambda: Lost().synchronize(), 3, Lost)
    assert Lost.synchronize is original
