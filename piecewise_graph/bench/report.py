"""Tables for people, and a results file for programs; both say whether acceptance was decreed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .metrics import COLUMNS, Metrics, acceptance
from .table import table
from .turns import Ratio

REAL = "acceptance: found, not decreed"


def heading(name: str, decreed: float | None) -> str:
    """What a table or a picture shows."""
    if decreed is None:
        return f"{name}; {REAL}"
    return f"{name}; {acceptance(decreed)} acceptance: a mean of {decreed:.2f} was decreed, not found"


def side_table(name: str, rows: Sequence[Metrics]) -> str:
    """A line per concurrency, in the field's columns."""
    decreed = rows[0].synthetic
    shown = [row.to_dict() for row in rows]
    for row in shown:
        if decreed is not None:
            row["accept_length"] = f"{row['accept_length']:.3f} {acceptance(decreed)}"
    return f"{heading(name, decreed)}\n{table(shown, COLUMNS)}"


def ratio_table(name: str, found: Mapping[int, Sequence[Ratio]], decreed: float | None) -> str:
    """Ratios per concurrency, each with its lowest and highest turn.

    Args:
        decreed: the accept length of a side that has one.
    """
    columns = list(dict.fromkeys(ratio.column for each in found.values() for ratio in each))
    rows = [
        {"max_concurrency": concurrency}
        | {ratio.column: f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" for ratio in each}
        for concurrency, each in found.items()
    ]
    title = heading(f"{name}: ratio of medians (lowest to highest turn)", decreed)
    return f"{title}\n{table(rows, ['max_concurrency', *columns])}"
