"""Which way prompts go beside a round: both are timed on the device, and the faster one is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings, strategies as st

from piecewise_graph.eagle.serving.pace import Pace

STEPS = 500
TRIES = 5  # of the slower way: after 16, 48, 112, 240 and 496 steps


@dataclass
class Device:
    """Marks of a device that is `behind` so many marks, on a clock of its own."""

    behind: int = 0
    clock: float = 0.0
    marks: list[float] = field(default_factory=list)

    def mark(self) -> Mark:
        self.marks.append(self.clock)
        return Mark(self, len(self.marks))


@dataclass(frozen=True)
class Mark:
    device: Device
    number: int

    def query(self) -> bool:
        return self.number + self.device.behind <= len(self.device.marks)

    def elapsed_time(self, end: Mark) -> float:
        assert self.query() and end.query()
        return self.device.marks[end.number - 1] - self.device.marks[self.number - 1]


def ways(device: Device, took: Callable[[int, bool], float], count: int) -> list[bool]:
    """Whether prompts shared, step by step; `took(step, shared)` milliseconds each, a round between them."""
    pace, found = Pace(device.mark), []
    for step in range(count):
        timed = pace.begin("size")
        found.append(timed.shared)
        device.clock += took(step, timed.shared)
        pace.end(timed)
        device.clock += 1.0
        device.mark()
    return found


@settings(max_examples=40)
@given(
    milliseconds=st.floats(0.5, 20), ratio=st.sampled_from([0.5, 0.9, 1.1, 3.0]), behind=st.integers(0, 3),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_the_faster_way_is_kept_and_the_other_tried_ever_more_rarely(
    milliseconds: float, ratio: float, behind: int, seed: int
) -> None:
    """Steps until the device has come so far go the way that is not known yet."""
    noise = random.Random(seed)
    found = ways(
        Device(behind),
        lambda step, shared: milliseconds * noise.uniform(1.0, 1.04) * (1.0 if shared else ratio),
        STEPS,
    )
    assert found[0] is True and False in found
    assert sum(shared != (ratio > 1) for shared in found) <= 2 * (behind + 2) + TRIES


def test_a_step_that_was_disturbed_does_not_decide() -> None:
    """A kernel that is compiled at first use, say. Three times of each way are known after two tries."""
    found = ways(Device(), lambda step, shared: 900.0 if step < 2 else 3.0 if shared else 2.0, STEPS)
    assert sum(found[120:]) <= 2


def test_a_way_that_becomes_the_faster_one_is_found() -> None:
    found = ways(Device(), lambda step, shared: 2.0 if shared == (step < 100) else 3.0, 4 * STEPS)
    assert sum(found[40:100]) >= 59 and sum(found[-STEPS:]) <= 1


def test_keys_are_apart_and_without_a_clock_prompts_share() -> None:
    device = Device()
    pace, found = Pace(device.mark), {"small": [], "large": []}
    for _ in range(100):
        for key, chosen in found.items():
            timed = pace.begin(key)
            chosen.append(timed.shared)
            device.clock += 2.0 if timed.shared == (key == "large") else 3.0
            pace.end(timed)
    assert sum(found["large"]) >= 96 and sum(found["small"]) <= 4
    without = Pace(None)
    for _ in range(5):
        timed = without.begin("size")
        assert timed.shared
        without.end(timed)
