"""Rows of verdicts in a JSONL file: what is there is not run again."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from fuzz.pairs import Failure

FOLLOWED = ("tapes", "replays", "fallbacks", "unpadded_segments", "traces")


@dataclass(frozen=True)
class Row:
    """What became of a seed.

    Attributes:
        verdict: "right"; "refused" at every call; "invalid": eager raised at every call; "torch": plain
            torch.compile does the same wrong; "wrong"; "error".
        reason: of a verdict that is not "right", or what was refused.
        counters: how the calls were served.
    """

    seed: int | str
    verdict: str
    reason: str = ""
    counters: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict in ("wrong", "error")


def row_of(seed: int | str, judge: Callable[[], tuple[str, str]]) -> Row:
    """The row of one case, which starts without traces and graphs of others.

    Args:
        judge: returns verdict and reason, or raises Failure.
    """
    torch._dynamo.reset()
    pg.reset()
    before, start = pg.counters.snapshot(), time.perf_counter()
    try:
        verdict, reason = judge()
    except Failure as failure:
        verdict, reason = failure.verdict, failure.reason
    except Exception as error:
        verdict, reason = "error", f"the comparison raised {error!r}"
    moved = {name: n - before.get(name, 0) for name, n in pg.counters.snapshot().items()}
    kept = {name: n for name, n in moved.items() if n and name.partition(":")[0] in FOLLOWED}
    return Row(seed, verdict, reason, kept, round(time.perf_counter() - start, 3))


class Rows:
    """Rows so far, in memory and, where there is a file, on disk."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.rows: list[Row] = []
        if path is not None and path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self.rows = [row for row in map(_parsed, lines) if row is not None]
        self.done = {row.seed for row in self.rows}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.failed]

    def summary(self) -> dict[str, Any]:
        """Verdicts, how calls were served, and time."""
        served: Counter[str] = Counter()
        for row in self.rows:
            served.update(row.counters)
        return {
            "rows": len(self.rows),
            "verdicts": dict(Counter(row.verdict for row in self.rows).most_common()),
            "refused": sum(row.verdict in ("right", "refused") and bool(row.reason) for row in self.rows),
            "failed": [row.seed for row in self.failed],
            "seconds": round(sum(row.seconds for row in self.rows), 1),
            "counters": dict(served.most_common()),
        }


def _parsed(line: str) -> Row | None:
    """A row; None for a last line that was cut off."""
    try:
        return Row(**json.loads(line))
    except (ValueError, TypeError):
        return None


def shard(items: Iterable[Any], which: str) -> list[Any]:
    """Every n-th of `items`, from the k-th on: "k/n", counted from 1."""
    part, _, parts = which.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"--shard is K/N with 1 <= K <= N, such as 3/8, not {which!r}")
    return list(items)[int(part) - 1 :: int(parts)]
