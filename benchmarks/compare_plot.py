"""bench_compare as a picture: one panel per shape, milliseconds over tokens, the floor dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare_sides import OURS, SIDES
from benchmarks.llama import SHAPES

Row = Mapping[str, Any]


def plot(rows: Sequence[Row], path: Path) -> str:
    """Draw to `path`; returns what there is to say about it."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if row["kind"] == "forward" and "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    if not shapes:
        return "no plot: nothing was timed"
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(5.2 * len(shapes), 4.2), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        _panel(axis, shape, [row for row in timed if row["shape"] == shape])
        floor = next((row["ms"] for row in rows if row["kind"] == "floor" and row["shape"] == shape), None)
        if floor is not None:
            axis.axhline(floor, color="black", linestyle="--", linewidth=1, label="reading the weights")
    axes[0][0].set_ylabel("ms per forward")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return f"plotted {path.name}"


def _panel(axis: Any, shape: str, rows: Sequence[Row]) -> None:
    for number, side in enumerate(SIDES):
        points = sorted((row["tokens"], row["ms"]) for row in rows if row["side"] == side)
        if points:
            width = 2.2 if side in OURS else 1.1
            label = f"ours, {side}" if side in OURS else side
            axis.plot(
                *zip(*points, strict=True), color=f"C{number}", linewidth=width, marker=".", label=label
            )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tokens")
    axis.set_title(SHAPES[shape].name)
    axis.grid(alpha=0.3, which="both")
