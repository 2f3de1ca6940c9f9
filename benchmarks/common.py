"""What the benchmarks share: the environment block, fair timing, the JSON that README names."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Mark:
    """A figure that was promised: met when `value <= limit`."""

    name: str
    value: float
    limit: float

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.value <= self.limit}


def environment() -> dict[str, Any]:
    """Hardware and versions that a figure depends on."""
    import transformers

    env: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    if torch.cuda.is_available():
        import triton

        env["triton"] = triton.__version__
        env["driver"] = _driver()
    return env


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def write(path: Path, command: str, rows: Sequence[Mapping[str, Any]], marks: Sequence[Mark]) -> None:
    """Write the results file and print the marks."""
    content = {
        "env": environment(),
        "command": command,
        "rows": list(rows),
        "marks": [mark.as_row() for mark in marks],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    for mark in content["marks"]:
        verdict = "met   " if mark["met"] else "MISSED"
        print(f"{verdict} {mark['name']}: {mark['value']:.4g} (limit {mark['limit']:.4g})")


def without_out(arguments: list[str]) -> list[str]:
    """Where the results go is no part of what was measured."""
    if "--out" not in arguments:
        return arguments
    place = arguments.index("--out")
    return arguments[:place] + arguments[place + 2 :]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one side, with the quartiles as its spread."""

    median: float
    low: float
    high: float


def alternate(
    sides: Mapping[str, Callable[[], Any]], *, rounds: int, repeat: int, warmups: int = 3
) -> dict[str, Timing]:
    """Wall time per call of each side, the sides taking turns in one process.

    The device is idle when a turn begins and when it ends, so host and device time both count, as they do
    for whoever waits for a forward.
    """
    for call in sides.values():
        for _ in range(warmups):
            call()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            _wait()
            began = time.perf_counter()
            for _ in range(repeat):
                call()
            _wait()
            taken[name].append((time.perf_counter() - began) / repeat)
    return {name: _timing(seconds) for name, seconds in taken.items()}


def _timing(seconds: list[float]) -> Timing:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timing(statistics.median(seconds), low, high)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text."""
    cells = [list(columns)] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)
