"""bench_compare as a picture: per shape milliseconds over tokens, and below, times the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import pyplot_if_there
from benchmarks.compare_sides import OURS, SIDES, label
from benchmarks.llama import SHAPES

Row = Mapping[str, Any]
NEAR = 1.3  # times the fastest: what the lower panels show


def plot(rows: Sequence[Row], path: Path) -> str:
    """Draw to `path`; returns what there is to say about it."""
    pyplot = pyplot_if_there()
    if pyplot is None:
        return "no plot: matplotlib is not installed"
    timed = [row for row in rows if row["kind"] == "forward" and "ms" in row]
    shapes = list(dict.fromkeys(row["shape"] for row in timed))
    if not shapes:
        return "no plot: nothing was timed"
    figure, axes = pyplot.subplots(2, len(shapes), figsize=(5.2 * len(shapes), 7.6), squeeze=False)
    for (upper, lower), shape in zip(axes.T, shapes, strict=True):
        own = [row for row in timed if row["shape"] == shape]
        fastest: dict[int, float] = {}
        for row in own:
            fastest[row["tokens"]] = min(row["ms"], fastest.get(row["tokens"], row["ms"]))
        _panel(upper, [(row["side"], row["tokens"], row["ms"]) for row in own])
        _panel(lower, [(row["side"], row["tokens"], row["ms"] / fastest[row["tokens"]]) for row in own])
        floor = next((row["ms"] for row in rows if row["kind"] == "floor" and row["shape"] == shape), None)
        if floor is not None:
            upper.axhline(floor, color="black", linestyle="--", linewidth=1, label="reading the weights")
        upper.set_yscale("log")
        steps = [base * 10**power for power in (-3, -2, -1, 0, 1, 2) for base in (1, 2, 5)]
        low, high = upper.get_ylim()
        upper.set_yticks([step for step in steps if low <= step <= high])
        upper.yaxis.set_major_formatter("{x:g}")
        upper.yaxis.set_minor_formatter("")
        upper.set_title(SHAPES[shape].name)
        lower.set_ylim(0.99, NEAR)
        lower.set_xlabel("tokens")
    axes[0][0].set_ylabel("ms per forward")
    axes[1][0].set_ylabel(f"times the fastest, up to {NEAR}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncol=5, fontsize=8, frameon=False)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return f"plotted {path.name}"


def _panel(axis: Any, points: Sequence[tuple[str, int, float]]) -> None:
    for number, side in enumerate(SIDES):
        own = sorted((tokens, value) for name, tokens, value in points if name == side)
        if own:
            width = 2.4 if side in OURS else 1.1
            style = "-" if side in OURS else "--"
            axis.plot(
                *zip(*own, strict=True), style, color=f"C{number}", linewidth=width, marker=".",
                label=label(side),
            )  # fmt: skip
    axis.set_xscale("log", base=2)
    counts = sorted({tokens for _, tokens, _ in points})
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.grid(alpha=0.3, which="major")
