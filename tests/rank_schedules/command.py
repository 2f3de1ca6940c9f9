"""`python -m tests.rank_schedules`: schedules for so many seconds, or so many of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rank_schedules.schedules import schedule_of
from rank_schedules.trial import Row, run_group

_GROUP = 100  # then processes begin anew: what torch keeps of a trace does not add up


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 where a schedule was wrong, raised or hung."""
    given = _parser().parse_args(arguments)
    began, seed, end = time.monotonic(), given.seed, given.seed + given.count
    rows: list[Row] = []
    faults = 0
    while seed < end and (left := given.seconds - (time.monotonic() - began)) > 0:
        group = run_group(range(seed, min(seed + _GROUP, end)), given.ranks, seconds=left)
        rows += group.rows
        first, seed = seed, seed + len(group.rows)
        if group.fault is not None:
            faults += 1
            at, what = group.fault
            seed = at + 1
            again = f"python -m tests.rank_schedules --ranks {given.ranks}"
            print(f"seed {at} is wrong:\n{what}\n{schedule_of(at, given.ranks)}")
            print(f"{again} --seed {at} --count 1")
            print(f"{again} --seed {first} --count {at + 1 - first}  # with those before it in its processes")
        done = sum(row.requests for row in rows), sum(row.preemptions for row in rows)
        print(
            f"{len(rows)} schedules up to seed {seed - 1}, {done[0]} requests, {done[1]} preemptions, "
            f"{sum(row.steps for row in rows)} steps, {faults} faults, {time.monotonic() - began:.0f} s",
            flush=True,
        )
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.rank_schedules", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no schedule begins afterwards")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="of schedules, one per seed")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--ranks", type=int, default=2)
    return parser
