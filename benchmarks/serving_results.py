"""The results file of bench_serving: runs of single shapes or parts on one machine add up to one table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import environment, write
from benchmarks.serving_marks import marks_of

# What a row is about; the other columns say what was found.
_ABOUT = ("kind", "shape", "load", "max_concurrency", "side", "ratio", "column", "overlap")
Row = Mapping[str, Any]


class Results:
    """Rows of this run, beside those of earlier runs that this one has not measured again."""

    def __init__(self, out: Path, command: str) -> None:
        self._out, self._command, self._earlier = out, command, list[Row]()
        self.rows: list[Row] = []
        if out.exists():
            old = json.loads(out.read_text())
            if old["env"] == environment():
                self._earlier = old["rows"]
                self._command = "; ".join(dict.fromkeys([*old["command"].split("; "), command]))
            else:
                print(f"{out.name} is of another environment, and replaced")

    def add(self, rows: Sequence[Row]) -> None:
        """Take rows in and write the file: a run that is cut short keeps what it has."""
        self.rows += rows
        self._write(report=False)

    def finish(self) -> None:
        """Write the file and print the marks."""
        self._write(report=True)

    def _write(self, *, report: bool) -> None:
        again = set(map(_about, self.rows))
        rows = [row for row in self._earlier if _about(row) not in again] + self.rows
        write(self._out, self._command, rows, marks_of(rows), report=report)


def _about(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _ABOUT)
