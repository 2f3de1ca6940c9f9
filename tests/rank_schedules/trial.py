"""Many schedules in one group of processes, each with an end: right, wrong, raised, or hung."""

from __future__ import annotations

import faulthandler
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ranks import on_ranks
from torch import distributed

from rank_schedules.schedules import Schedule, schedule_of
from rank_schedules.serving import Outcome, Rank

LIMIT = 180.0  # seconds of one schedule; the first one of its kind traces and captures
Serve = Callable[[Schedule], Outcome]


@dataclass(frozen=True)
class Row:
    """One schedule that all ranks have ended: what was wrong with it, and what it has met."""

    seed: int
    wrong: tuple[str, ...]
    requests: int
    steps: int
    preemptions: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Group:
    """What became of the schedules of one group of processes.

    Attributes:
        rows: in order of their seeds; only the last one may be wrong.
        fault: seed and description of the schedule that was wrong, raised or hung; None if none was.
    """

    rows: tuple[Row, ...]
    fault: tuple[int, str] | None


def run_group(
    seeds: Sequence[int],
    ranks: int,
    *,
    seconds: float = float("inf"),
    limit: float = LIMIT,
    serving: Callable[[], Serve] = Rank,
) -> Group:
    """Run the schedules of these seeds in order, up to the first fault.

    Args:
        seconds: after which no further schedule begins.
        limit: seconds of one schedule.
        serving: makes what serves schedules, on each rank.
    """
    within = min(seconds, len(seeds) * limit) + 3 * limit
    with tempfile.TemporaryDirectory() as folder:
        asked = list(seeds), folder, seconds, limit, serving
        answers = on_ranks(ranks, _on_rank, *asked, within=within)
        notes = [_Notes(folder, rank) for rank in range(ranks)]
        rows = tuple(Row(**row) for row in map(json.loads, notes[0].read("rows").splitlines()))
        told = [
            (int(note.read("seed") or seeds[0]), f"rank {rank}: {answer.error}\n{note.read('trace')}")
            for rank, (note, answer) in enumerate(zip(notes, answers, strict=True))
            if answer.error
        ]
    if told:
        return Group(rows, (min(seed for seed, _ in told), "\n".join(what for _, what in told)))
    wrong = next((row for row in rows if row.wrong), None)
    return Group(rows, wrong and (wrong.seed, "\n".join(wrong.wrong)))


class _Notes:
    """What a rank writes down while it runs: it may not live to return anything."""

    def __init__(self, folder: str, rank: int) -> None:
        self._place = Path(folder) / str(rank)

    def path(self, name: str) -> Path:
        return self._place.with_suffix(f".{name}")

    def read(self, name: str) -> str:
        return self.path(name).read_text() if self.path(name).exists() else ""


def _on_rank(
    seeds: list[int], folder: str, seconds: float, limit: float, serving: Callable[[], Serve]
) -> None:
    until, serve = time.monotonic() + seconds, serving()
    notes = _Notes(folder, distributed.get_rank())
    with notes.path("trace").open("w") as trace, notes.path("rows").open("w", buffering=1) as rows:
        for seed in seeds:
            notes.path("seed").write_text(str(seed))
            faulthandler.dump_traceback_later(limit, exit=True, file=trace)
            began = time.monotonic()
            outcomes = _gathered(serve(schedule_of(seed, distributed.get_world_size())))
            late = _gathered(time.monotonic() > until)[0]
            faulthandler.cancel_dump_traceback_later()
            row = replace(row_of(seed, outcomes), seconds=round(time.monotonic() - began, 2))
            rows.write(json.dumps(asdict(row)) + "\n")
            if row.wrong or late:
                return


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, mine)
    return found


def row_of(seed: int, outcomes: Sequence[Outcome]) -> Row:
    """What is wrong with a schedule, by what all ranks tell of it."""
    wrong = [f"rank {rank}: {each}" for rank, outcome in enumerate(outcomes) for each in outcome.wrong]
    one = outcomes[0]
    for name in (field.name for field in fields(Outcome) if field.name != "wrong"):
        told = [getattr(outcome, name) for outcome in outcomes]
        if any(each != told[0] for each in told):
            wrong.append(f"the ranks differ in their {name}: {told}")
    return Row(seed, tuple(wrong), len(one.tokens), one.steps, one.preemptions)
