"""bench_stacks as a picture: how many times as fast as the other side each way of ours is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import pyplot_if_there
from benchmarks.stack_report import beside
from benchmarks.stack_setting import Row


def plot(rows: Sequence[Row], path: Path) -> str:
    """Draw to `path`; returns what there is to say about it."""
    pyplot = pyplot_if_there()
    if pyplot is None:
        return "no plot: matplotlib is not installed"
    bars = [
        (
            f"{what}\n{ours['ms']:.2f} ms, {other} {theirs['ms']:.2f} ms",
            theirs["ms"] / ours["ms"],
            ours["part"],
        )
        for what, ours, other, theirs in beside(rows)
        if theirs is not None
    ]
    if not bars:
        return "no plot: nothing stands beside ours"
    labels, values, parts = zip(*reversed(bars), strict=True)
    colors = {part: f"C{number}" for number, part in enumerate(dict.fromkeys(reversed(parts)))}
    figure, axis = pyplot.subplots(figsize=(8, 0.8 + 0.45 * len(bars)))
    drawn = axis.barh(range(len(bars)), values, color=[colors[part] for part in parts])
    axis.bar_label(drawn, fmt="%.2f", padding=3, fontsize=8)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(range(len(bars)), labels, fontsize=8)
    axis.set_xlim(0, 1.1 * max(values))
    axis.set_xlabel("times as fast as the other side")
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return f"plotted {path.name}"
