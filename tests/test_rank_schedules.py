"""Random schedules give all ranks the same tokens, and what says so can fail."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from rank_schedules.schedules import LONGEST, LOOPS, TEXTS, Schedule, schedule_of
from rank_schedules.serving import Outcome, text
from rank_schedules.trial import row_of, run_group
from torch import distributed

SEEDS = range(300)


@pytest.mark.slow
def test_random_schedules_give_all_ranks_the_tokens_of_one_process() -> None:
    """`python -m tests.rank_schedules` runs more of them, of all kinds."""
    seeds = (18, 6)  # a planner, overlap, aborts, callbacks that raise, and too few pages
    group = run_group(seeds, 2)
    assert group.fault is None, f"seed {group.fault[0]}: {group.fault[1]}\n{schedule_of(group.fault[0], 2)}"
    assert len(group.rows) == len(seeds) and group.rows[-1].preemptions > 0


def test_the_seeds_reach_what_they_are_for() -> None:
    drawn = [schedule_of(seed, 2) for seed in SEEDS]
    requests = [asked for schedule in drawn for asked in schedule.requests]
    for count in (
        *(sum(schedule.loop == loop for schedule in drawn) for loop in LOOPS),
        sum(schedule.options["shape"] == "auto" for schedule in drawn),
        sum(schedule.options["overlap"] for schedule in drawn),
        sum(schedule.reset_before is not None for schedule in drawn),
        *(sum(rank == one for s in drawn for _, rank in s.sleeps) for one in range(2)),
        *(sum(getattr(a, way) is not None for a in requests) for way in ("aborted_before", "aborts_after")),
        sum(asked.raises_after is not None for asked in requests),
        sum(bool(asked.stop) for asked in requests),
        sum(asked.sampling.filtered for asked in requests),
    ):
        assert count > 8
    assert sum(asked.sampling.greedy for asked in requests) > len(requests) / 2
    assert all(len(text(number)) == LONGEST for number in range(TEXTS))


def test_a_seed_is_always_the_same_schedule() -> None:
    assert str(schedule_of(12, 2)) == str(schedule_of(12, 2)) != str(schedule_of(13, 2))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Outcome(((1, 2), (3, 5)), (), 0, 7, ""), "the ranks differ in their tokens"),
        (Outcome(((1, 2), (3, 4)), (("replays", 1),), 0, 7, ""), "the ranks differ in their counters"),
        (Outcome(((1, 2), (3, 4)), (), 0, 7, "", ("a page",)), "rank 1: a page"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said(other: Outcome, says: str) -> None:
    one = Outcome(((1, 2), (3, 4)), (), 0, 7, "")
    assert not row_of(5, [one, one]).wrong
    assert says in row_of(5, [one, other]).wrong[0]


class Faulty:
    """Serves nothing, and does what it should not with the third schedule."""

    def __init__(self, does: Callable[[], None]) -> None:
        self._does = does

    def __call__(self) -> Callable[[Schedule], Outcome]:
        return self._serve

    def _serve(self, schedule: Schedule) -> Outcome:
        if schedule.seed == 2 and distributed.get_rank() == 1:
            self._does()
        return Outcome((), (), 0, 0, "")


def _hang() -> None:
    time.sleep(60.0)


def _raise() -> None:
    raise ValueError("no such page")


@pytest.mark.parametrize(
    ("does", "limit", "says"),
    [(_hang, 4.0, ["in _hang", "died"]), (_raise, 60.0, ["rank 1: ValueError: no such page"])],
)
def test_a_schedule_that_does_not_end_is_told_with_its_seed(
    does: Callable[[], None], limit: float, says: list[str]
) -> None:
    group = run_group(range(5), 2, limit=limit, serving=Faulty(does))
    assert [row.seed for row in group.rows] == [0, 1] and group.fault is not None
    assert group.fault[0] == 2
    for each in says:
        assert each in group.fault[1]
