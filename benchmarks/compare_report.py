"""bench_compare's results as text: aligned tables for the terminal, Markdown for README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import table
from benchmarks.compare_sides import OURS, SIDES
from benchmarks.llama import SHAPES

Row = dict[str, Any]
_START = ("shape", "side", "start", "first_call_s", "backend_s", "compile_s", "ready_s", "capture_s", "error")
_READY = ("shape", "side", "first_call_s", "ready_s", "capture_s", "held_MiB", "device_MiB", "peak_MiB",
          "error")  # fmt: skip


def report(rows: Sequence[Row]) -> str:
    """Everything, for whoever waits for it."""
    forward = [row for row in rows if row["kind"] == "forward"]
    starts = [row for row in rows if row["kind"] == "start"]
    ready = [_in_mib(row) for row in rows if row["kind"] == "ready"]
    columns = ["shape", "tokens", "floor", *_named(forward), "ours/others"]
    parts = [
        ("milliseconds per forward", table(_pivot(rows, "ms"), columns)),
        ("microseconds of host time", table(_pivot(rows, "host_us"), columns)),
        ("starts in processes of their own, seconds", table(starts, _START)),
        ("made ready in one process with warm caches", table(ready, _READY)),
    ]
    errors = {f"{row['shape']} {row['side']}: {row['error']}" for row in forward if "error" in row}
    return "\n\n".join([*(f"{title}\n{text}" for title, text in parts), *sorted(errors)])


def markdown(rows: Sequence[Row]) -> str:
    """README's tables: time of a forward, then what becoming ready takes."""
    names = _named([row for row in rows if row["kind"] == "forward"])
    columns = ["shape", "tokens", "floor", *names, "ours/others"]
    times = [_markdown_line(columns), "|" + "---|" * len(columns)]
    times += [
        _markdown_line([_text(line.get(column), 2) for column in columns]) for line in _pivot(rows, "ms")
    ]
    head = ["shape", "side", "cold s", "warm s", "of it, capture s", "held MiB", "host us, 1 token"]
    needs = [_markdown_line(head), "|" + "---|" * len(head)]
    for row in rows:
        if row["kind"] == "ready" and "error" not in row:
            needs.append(_markdown_line([_text(value, 1) for value in _needs(row, rows)]))
    return "\n".join([*times, "", *needs])


def _needs(ready: Row, rows: Sequence[Row]) -> list[Any]:
    """What a side took to become ready."""
    shape, side = ready["shape"], ready["side"]
    starts = {
        (row["side"], row["start"]): row.get("error", row.get("ready_s"))
        for row in rows
        if row["kind"] == "start" and row["shape"] == shape
    }
    begins = "ours" if side in OURS else side
    host = [
        row.get("host_us")
        for row in rows
        if row["kind"] == "forward" and (row["shape"], row["side"], row["tokens"]) == (shape, side, 1)
    ]
    warm = starts.get((begins, "warm"), ready.get("ready_s"))
    held = ready.get("held_bytes")
    return [
        shape, side, starts.get((begins, "cold")), warm, ready.get("capture_s"),
        None if held is None else held / 2**20, *(host or [None]),
    ]  # fmt: skip


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: Any, digits: int) -> str:
    if value in SHAPES:
        return SHAPES[value].name
    return "" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _named(forward: Sequence[Row]) -> list[str]:
    return [name for name in SIDES if any(row["side"] == name for row in forward)]


def _pivot(rows: Sequence[Row], what: str) -> list[Row]:
    """One row per shape and token count, one column per side, and our best over the best of the others."""
    floors = {row["shape"]: row["ms"] for row in rows if row["kind"] == "floor"}
    lines: dict[tuple[str, int], Row] = {}
    for row in rows:
        if row["kind"] == "forward":
            line = lines.setdefault((row["shape"], row["tokens"]), {})
            line[row["side"]] = row.get(what, "error" if "error" in row else None)
    for (shape, tokens), line in lines.items():
        best = {mine: _least(line, mine) for mine in (True, False)}
        line |= {"shape": shape, "tokens": tokens, "floor": floors.get(shape) if what == "ms" else None}
        if best[True] and best[False]:
            line["ours/others"] = best[True] / best[False]
    return list(lines.values())


def _least(line: Mapping[str, Any], ours: bool) -> float | None:
    found = [value for side, value in line.items() if (side in OURS) is ours and isinstance(value, float)]
    return min(found, default=None)


def _in_mib(row: Row) -> Row:
    bytes_ = {name: value for name, value in row.items() if name.endswith("_bytes")}
    return row | {name.replace("_bytes", "_MiB"): value / 2**20 for name, value in bytes_.items()}
