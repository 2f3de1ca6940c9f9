"""The marks of bench_stacks, and the table that benchmarks/README.md shows of its rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from benchmarks.common import Mark
from benchmarks.stack_setting import Row

KEYS = ("part", "shape", "weights", "requests")  # of the rows that stand beside each other
LIMITS: dict[str, tuple[float, dict[str, tuple[str, float | None]]]] = {
    # of what is not replayed, and of the time over that of another side (None: shown without a limit)
    "generate": (0.02, {"piecewise": ("reduce-overhead", 1.0)}),
    "continuous": (0.05, {"piecewise": ("transformers", 1.0)}),
    "embed": (0.05, {"piecewise": ("dynamic", 1.0)}),
    "quantised": (0.0, {"full": ("raw", 1.05), "piecewise": ("raw", 1.10)}),
    "lora": (0.0, {"full": ("reduce-overhead", 1.0), "piecewise": ("reduce-overhead", None)}),
    "loop": (0.02, {"full": ("reduce-overhead", 1.0)}),
}
NAMES = {"int8": "int8 weights", "int4": "int4 weights", "float8": "float8"}


def marks_of(rows: Sequence[Row]) -> list[Mark]:
    marks = [Mark("cases that failed", sum("error" in row and "side" not in row for row in rows), 0)]
    for key, sides in _cases(rows):
        name = " ".join(str(part) for part in key if part is not None)
        unserved, ways = LIMITS[key[0]]
        for side, (other, limit) in ways.items():
            if side not in sides:
                continue
            label, ours = f"{name}: {side}", sides[side]
            marks.append(Mark(f"{label}, share not replayed", 1 - ours["replayed"], unserved))
            if other in sides and limit is not None:
                marks.append(Mark(f"{label}, time over {other}'s", ours["ms"] / sides[other]["ms"], limit))
            if key[0] == "embed":
                most = 2 * sides["eager"]["error"] + 1e-6
                marks.append(Mark(f"{label}, error beside float32", ours["error"], most))
    return marks


def beside(rows: Sequence[Row]) -> Iterator[tuple[str, Row, str, Row | None]]:
    """(what it is, ours, name of the other side, the other side if it is there) of each way of ours."""
    for key, sides in _cases(rows):
        ways = LIMITS[key[0]][1]
        for side, (other, _) in ways.items():
            if side in sides:
                what = _what(sides[side])
                yield f"{what}, {side}" if len(ways) > 1 else what, sides[side], other, sides.get(other)


def matrix(rows: Sequence[Row]) -> str:
    """A line of Markdown per way of ours: what it was, how much was replayed, beside whom, and how right."""
    lines = ["| what | replayed | ms | other side, ms | times as fast | right |", "|---|---|---|---|---|---|"]
    for what, ours, other, theirs in beside(rows):
        there = f"{other}, {theirs['ms']:.2f} | {theirs['ms'] / ours['ms']:.2f}" if theirs else "- | -"
        cells = what, f"{ours['replayed']:.1%}", f"{ours['ms']:.2f}", there, _right(ours, theirs)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cases(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, ...], dict[str, Row]]]:
    """Each case and its sides, by name."""
    for key, group in itertools.groupby(rows, lambda row: tuple(row.get(key) for key in KEYS)):
        yield key, {row["side"]: row for row in group if "side" in row}


def _what(row: Row) -> str:
    """generate 8b, 1 request"""
    kind = NAMES.get(row.get("weights", ""), row["part"])
    requests = row.get("requests")
    return f"{kind} {row['shape']}" + (
        "" if requests is None else f", {requests} request{'s' * (requests > 1)}"
    )


def _right(ours: Row, theirs: Row | None) -> str:
    """How far ours agrees with eager or with the other side, and how far the other side does."""
    if "same_answers" in ours:
        return f"{ours['same_answers']:.0%} of answers as the other side's"
    if "error" in ours:
        return f"error {ours['error']:.4f}" + (f"; {theirs['error']:.4f}" if theirs else "")
    firsts = [row["first_other_token"] for row in (ours, theirs) if row is not None]
    return "other token than eager's at " + "; ".join("none" if x is None else str(x) for x in firsts)
