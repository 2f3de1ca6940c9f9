"""The marks of bench_vllm, and the tables that benchmarks/README.md shows of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from benchmarks.common import Mark
from benchmarks.vllm_engine import Row
from benchmarks.vllm_sides import OWN

OURS, BASE = "piecewise", "v1"  # this backend runs on vLLM's first runner
OWN_GAINS = {  # output tokens per second of this project's engine over vLLM's, by shape and users
    "1b": {1: 1.4, 4: 1.4, 16: 1.2, 32: 1.2},
    "8b": {1: 1.15, 4: 1.15, 16: 1.15, 32: 1.15},
}
NOT_REPLAYED = 0.01  # of the forwards up to the largest captured size


def marks_of(rows: Sequence[Row]) -> list[Mark]:
    """Those that the rows say something about."""
    failed = sum("error" in row for row in rows)
    return [
        Mark("starts and parts that failed", failed, 0),
        *_over(rows, "start", "engine_s", "seconds to make the engine"),
        *_load_marks(rows),
        *_own_marks(rows),
        *_over(rows, "eagle", "round_ms", "time of a round"),
        *_answer_marks(rows),
    ]


def _over(rows: Sequence[Row], part: str, column: str, what: str) -> Iterator[Mark]:
    """Ours over the first runner's: lower is better."""
    for ours, theirs in _pairs(rows, part):
        yield Mark(f"{_name(ours)}: {what} over {BASE}'s", ours[column] / theirs[column], 1.0)


def _load_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    for ours, theirs in _pairs(rows, "load"):
        name = _name(ours)
        yield Mark(f"{name}: {BASE}'s tok/s over ours", theirs["tok_s"] / ours["tok_s"], 1.0)
        yield Mark(f"{name}: share not replayed", not_replayed(ours), NOT_REPLAYED)


def _own_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    for own, theirs in _pairs(rows, "load", OWN):
        name, gain = _name(own), OWN_GAINS.get(own["shape"], {}).get(own["users"])
        if gain is not None:
            yield Mark(f"{name}: {BASE}'s tok/s over our engine's", theirs["tok_s"] / own["tok_s"], 1 / gain)
            yield Mark(f"{name}: our engine's TTFT over {BASE}'s", own["ttft_ms"] / theirs["ttft_ms"], 1.0)


def _answer_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    """Ours may leave eager's as often as the first runner's do: bf16 has near ties."""
    for part, what in (("answers", "64 prompts"), ("features", ""), ("http", "vllm serve")):
        for ours, theirs in _pairs(rows, part):
            name = ours.get("feature", what)
            yield Mark(f"{name}: answers that differ from eager's", ours["differ"], theirs["differ"])


def not_replayed(row: Row) -> float:
    """Of the forwards that are not above the largest captured size."""
    within = row["forwards"] - row["fallbacks:above_max_tokens"]
    return 1 - row["replays"] / within if within else math.nan


def _pairs(rows: Sequence[Row], part: str, side: str = OURS) -> Iterator[tuple[Row, Row]]:
    """(a side's, the first runner's) of each case that both were measured in."""
    cases: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part and "error" not in row:
            key = tuple(row.get(name) for name in ("shape", "users", "ratio", "feature"))
            cases.setdefault(key, {})[row.get("side", "")] = row
    for sides in cases.values():
        if side in sides and BASE in sides:
            yield sides[side], sides[BASE]


def _name(row: Row) -> str:
    users = row.get("users")
    told = "" if users is None else f", {users} user{'s' * (users > 1)}"
    return f"{row['part']} {row['shape']}{told}{_lengths(row)}"


def _lengths(row: Row) -> str:
    return f", lengths from {row['ratio']:g}" if row.get("ratio", 1) < 1 else ""


def matrix(rows: Sequence[Row]) -> str:
    """Tables of Markdown."""
    tables = _speed(rows), _rounds(rows), _right(rows)
    return "\n\n".join("\n".join(lines) for lines in tables if len(lines) > 2)


def _speed(rows: Sequence[Row]) -> list[str]:
    columns = ("tok/s (range)", "TPOT ms", "TTFT ms", "not replayed", "step ms", "call µs (launch)", "idle")
    lines = [f"| | users | side | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    steps = {_case(row): row for row in rows if row["part"] == "decode" and "error" not in row}
    for row in rows:
        if row["part"] != "load" or "error" in row:
            continue
        step = steps.get(_case(row), {})
        idle = step.get("idle", {}).get("nothing_runs")
        cells = [
            row["shape"],
            row["users"],
            row["side"] + _lengths(row),
            f"{row['tok_s']:,.0f} ({row['low']:,.0f}, {row['high']:,.0f})",
        ]
        cells += [f"{row['tpot_ms']:.2f}", f"{row['ttft_ms']:.1f}"]
        cells += [f"{not_replayed(row):.1%}" if row["side"] == OURS else "-"]
        cells += [f"{step['step_ms']:.2f}" if step else "-"]
        launch = f" ({step['launch_us']:.0f})" if "launch_us" in step else ""
        cells += [f"{step['call_us']:.0f}{launch}" if "call_us" in step else "-"]
        cells += ["-" if idle is None else f"{idle:.0%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _rounds(rows: Sequence[Row]) -> list[str]:
    lines = ["| EAGLE | users | side | round ms (range) |", "|---|---|---|---|"]
    for row in rows:
        if row["part"] == "eagle" and "error" not in row:
            taken = f"{row['round_ms']:.2f} ({row['low']:.2f}, {row['high']:.2f})"
            lines.append(f"| {row['shape']} | {row['users']} | {row['side']} | {taken} |")
    return lines


def _right(rows: Sequence[Row]) -> list[str]:
    lines = ["| what | side | answers that differ from eager's | at gaps up to |", "|---|---|---|---|"]
    names = {"answers": "64 greedy prompts", "http": "vllm serve"}
    for row in rows:
        if row["part"] in ("answers", "features", "http") and "differ" in row and row["side"] != "eager":
            known = [each["gap"] for each in row.get("differences", ()) if each["gap"] is not None]
            gap = f"{max(known):.3f}" if known else "-"
            what = row.get("feature") or names[row["part"]]
            lines.append(f"| {what} | {row['side']} | {row['differ']} of {row['prompts']} | {gap} |")
    return lines


def _case(row: Row) -> tuple[object, ...]:
    return row["shape"], row["users"], row["side"]
