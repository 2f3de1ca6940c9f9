"""What a run prints, draws and writes. Everything says whether acceptance was synthetic."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import BenchError
from .load import Load
from .metrics import COLUMNS, Metrics, Ratio, acceptance, ratios
from .setting import Setting


@dataclass(frozen=True)
class Outcome:
    """What was measured so far.

    Attributes:
        turns: concurrency -> side -> metrics, turn by turn.
    """

    sides: Mapping[str, Setting]
    turns: dict[int, dict[str, list[Metrics]]]

    def medians(self, side: str) -> list[Metrics]:
        """Of one side, per concurrency."""
        return [Metrics.median_of(found[side]) for found in self.turns.values()]

    @property
    def synthetic(self) -> float | None:
        """The synthetic accept length of a side that has one."""
        found = [turns[0].synthetic for each in self.turns.values() for turns in each.values()]
        return next((length for length in found if length is not None), None)

    def ratios(self) -> tuple[str, dict[int, list[Ratio]]]:
        """(numerator / denominator by name, ratios per concurrency); for two sides."""
        first, second = self.sides
        per_concurrency = {
            concurrency: ratios(found[first], found[second]) for concurrency, found in self.turns.items()
        }
        return f"{first} / {second}", per_concurrency

    def to_dict(self, command: str, load: Load) -> dict[str, Any]:
        """The results file: a row per side and concurrency, medians over the turns."""
        rows = [
            {"side": name, "turns": len(found[name]), **Metrics.median_of(found[name]).to_dict()}
            for found in self.turns.values()
            for name in self.sides
        ]
        content: dict[str, Any] = {
            "env": environment(),
            "command": command,
            "load": load.to_dict(),
            "sides": {name: dict(setting.values) for name, setting in self.sides.items()},
            "rows": rows,
        }
        if len(self.sides) > 1:
            name, found = self.ratios()
            label = {"ratio": name, "acceptance": acceptance(self.synthetic)}
            content["ratios"] = [
                label | {"max_concurrency": concurrency} | asdict(ratio)
                for concurrency, each in found.items()
                for ratio in each
            ]
            content["turns"] = [
                {"side": side, "turn": turn, **metrics.to_dict()}
                for sides in self.turns.values()
                for side, each in sides.items()
                for turn, metrics in enumerate(each)
            ]
        return content


def environment() -> dict[str, Any]:
    """Hardware and versions that a figure depends on; None where there is no GPU."""
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

        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        env["triton"] = triton.__version__
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        env["driver"] = found[0] if found else ""  # one line per GPU
    return env


def heading(name: str, synthetic: float | None) -> str:
    """The title of a table or a picture."""
    if synthetic is None:
        return f"{name}; real acceptance"
    return f"{name}; {acceptance(synthetic)} acceptance: a mean of {synthetic:.2f} was set, not measured"


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """A line per row, aligned, columns by name; a missing value is a dash."""
    cells = [list(columns)] + [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None else str(value)


def side_table(name: str, rows: Sequence[Metrics]) -> str:
    """A line per concurrency, in the field's columns."""
    synthetic = rows[0].synthetic
    shown = [row.to_dict() for row in rows]
    for row in shown:
        if synthetic is not None:
            row["accept_length"] = f"{row['accept_length']:.3f} {acceptance(synthetic)}"
    return f"{heading(name, synthetic)}\n{table(shown, COLUMNS)}"


def ratio_table(outcome: Outcome) -> str:
    """Ratios of two sides per concurrency, each with its lowest and highest turn."""
    name, found = outcome.ratios()
    columns = list(dict.fromkeys(ratio.column for each in found.values() for ratio in each))
    rows = [
        {"max_concurrency": concurrency}
        | {ratio.column: f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" for ratio in each}
        for concurrency, each in found.items()
    ]
    title = heading(f"{name}: ratio of medians (lowest to highest turn)", outcome.synthetic)
    return f"{title}\n{table(rows, ['max_concurrency', *columns])}"


def check_picture(path: Path) -> None:
    """See that `plot` can draw a picture of this kind.

    Raises:
        BenchError: matplotlib cannot.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        return
    if _kind(path) not in FigureCanvasBase.filetypes:
        raise BenchError.no_picture(path, FigureCanvasBase.filetypes)


def _kind(path: Path) -> str:
    return path.suffix[1:].lower() or "png"


def plot(outcome: Outcome, path: Path) -> str:
    """Draw total throughput over throughput per user, a line per side; returns a message about it.

    Raises:
        BenchError: the system refuses the file.
    """
    try:
        import matplotlib
    except ImportError:
        return f"no {path.name}: matplotlib is not installed; pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 5))
    for name in outcome.sides:
        rows = outcome.medians(name)
        points = [(row.per_user_throughput, row.output_throughput, row.max_concurrency) for row in rows]
        known = [(x, y, concurrency) for x, y, concurrency in points if x is not None]
        axis.plot(
            [x for x, _, _ in known], [y for _, y, _ in known], marker="o",
            label=heading(name, rows[0].synthetic),
        )  # fmt: skip
        for x, y, concurrency in known:
            axis.annotate(str(concurrency), (x, y), textcoords="offset points", xytext=(5, 5))
    axis.set_xlabel("per_user_throughput: output tokens per second of one request")
    axis.set_ylabel("output_throughput: tokens per second of all")
    axis.set_title("points: max_concurrency")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, format=_kind(path))  # without a format, to a file of another name
    except OSError as error:
        raise BenchError.unwritable("--plot", path, error) from error
    finally:
        pyplot.close(figure)
    return f"plotted {path.name}"
