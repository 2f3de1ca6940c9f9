"""bench_compare's results as text: aligned tables for the terminal, Markdown for README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.common import table
from benchmarks.compare_sides import OURS, SIDES, STARTS, label
from benchmarks.llama import SHAPES

Row = dict[str, Any]
_START = ("shape", "side", "start", "first_call_s", "backend_s", "compile_s", "ready_s", "capture_s", "error")
_READY = ("shape", "side", "first_call_s", "ready_s", "capture_s", "held_MiB", "device_MiB", "peak_MiB",
          "error")  # fmt: skip


def report(rows: Sequence[Row]) -> str:
    """All tables as text, for the terminal."""
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
    """README's tables, one per shape: a line per side, its forwards first, then what becoming ready takes."""
    shapes = dict.fromkeys(row["shape"] for row in rows)
    return "\n\n".join(_shape_table([row for row in rows if row["shape"] == shape]) for shape in shapes)


def _shape_table(rows: Sequence[Row]) -> str:
    forward = [row for row in rows if row["kind"] == "forward"]
    counts = sorted({row["tokens"] for row in forward})
    floor = next((f"{row['ms']:.2f} ms" for row in rows if row["kind"] == "floor"), "not measured")
    head = [
        SHAPES[rows[0]["shape"]].name,
        *map(str, counts),
        "host µs",
        "cold s",
        "warm s",
        "capture s",
        "MiB",
    ]
    lines = [_markdown_line(head), "|" + "---|" * len(head)]
    for side in _named(forward):
        own = {row["tokens"]: row for row in forward if row["side"] == side}
        times = [_text(own.get(count, {}).get("ms"), 2) for count in counts]
        lines.append(_markdown_line([label(side), *times, *_needs(side, own.values(), rows)]))
    ratios = {line["tokens"]: line.get("ours/others") for line in _pivot(rows, "ms")}
    last = ["our best over the others'", *(_text(ratios.get(count), 2) for count in counts), *[""] * 5]
    return "\n".join([f"Reading the weights: {floor}.", "", *lines, _markdown_line(last)])


def _needs(side: str, forward: Iterable[Row], rows: Sequence[Row]) -> list[str]:
    """Host time, the median of all token counts; seconds of both starts and of capturing; what is held."""
    ready = {row["side"]: row for row in rows if row["kind"] == "ready"}
    starts = {(row["side"], row["start"]): row for row in rows if row["kind"] == "start"}
    host = [row["host_us"] for row in forward if "host_us" in row]
    own, begins = ready.get(side, {}), STARTS.get(side, side)
    cold = [starts.get((begins, "cold"), {})]
    warm = [starts.get((begins, "warm"), {}) if side in OURS else ready.get(begins, {})]
    if side not in (begins, *OURS):  # it captures what another side has compiled
        cold, warm = [*cold, own], [*warm, own]
    return [
        _text(median(host) if host else None, 0),
        *(_text(_seconds(parts), 1) for parts in (cold, warm)),
        _text(own.get("capture_s"), 2),
        _text(_held_mib(own) if SIDES[side].needs_cuda or side in OURS else None, 0),
    ]


def _seconds(parts: Sequence[Row]) -> float | None:
    """Until all token counts are ready; None where that was not seen."""
    seen = [part["ready_s"] for part in parts if "ready_s" in part and "error" not in part]
    return sum(seen) if len(seen) == len(parts) else None


def _held_mib(ready: Row) -> float | None:
    """What ours holds is known to the byte, and is the same for its sides, which share it."""
    held = ready.get("pool_bytes", ready.get("held_bytes"))
    return None if held is None else (held + ready.get("buffer_bytes", 0)) / 2**20


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


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
