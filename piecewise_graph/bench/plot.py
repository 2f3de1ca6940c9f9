"""Throughput of all over throughput of one: what batching buys, and what a user pays for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .metrics import Metrics
from .report import heading


def plot(sides: Mapping[str, Sequence[Metrics]], path: Path) -> str:
    """Draw a line per side to `path`; returns what there is to say about it."""
    try:
        import matplotlib
    except ImportError:
        return f"no {path.name}: matplotlib is not installed; pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 5))
    for name, rows in sides.items():
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
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"plotted {path.name}"
