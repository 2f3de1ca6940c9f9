"""What is promised of serving, checked on the rows of bench_serving."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common import Mark

OVERLAP_GAINS = {1: 1.08, 16: 1.05}  # requests -> time per output token without overlap / with it: 1B
IDLE_LIMIT = 0.03  # of the time, with overlap
PLAIN_LIMITS = {1: 4.93, 4: 4.92, 16: 5.12, 32: 5.50}  # ms per token of a request: 8B
SPECULATION_GAINS = {"8b": {1: 1.3, 4: 1.3, 16: 1.3}, "1b": {1: 1.1, 4: 1.1}}  # users -> tok/s over plain
AUTO_LEAST = 0.98  # tok/s over plain
LONG_LOAD = 20  # requests per user: with few, most of the time some users have no request left
Row = Mapping[str, Any]


def marks_of(rows: Sequence[Row]) -> list[Mark]:
    """Those that the rows say something about."""
    return [*_overlap_marks(rows), *_idle_marks(rows), *_plain_marks(rows), *_gain_marks(rows)]


def _overlap_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    """Overlap can only remove time in which the device waits for the host.

    Where there is less of that than the gain that was promised, the share of it without overlap is the mark.
    Both sides make the device do the same, so what it is busy for is known from the side with overlap, and
    the rest of the other side's time is idle. (A trace of that side would say more: the profiler slows the
    host, and without overlap the device waits for it.)
    """
    for row in rows:
        wanted = row["kind"] == "ratio" and (row["shape"], row["load"]) == ("1b", "decode")
        if not wanted or row["ratio"] != "as given / overlap=off" or row["column"] != "median_tpot_ms":
            continue
        users = row["max_concurrency"]
        if users not in OVERLAP_GAINS:
            continue
        limit = 1 / OVERLAP_GAINS[users]
        idle = _idle(rows, "1b", users)
        off = None if idle is None else 1 - row["value"] * (1 - idle)
        if row["value"] > limit and off is not None and off <= 1 - limit:
            yield Mark(
                f"1b, {users} requests, overlap off: device idle, less than the gain asked", off, 1 - limit
            )
        else:
            yield Mark(f"1b, {users} requests: time per output token, overlap on / off", row["value"], limit)


def _idle_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in rows:
        if row["kind"] == "idle" and row["overlap"] and row["between_launches"] is not None:
            name = (
                f"{row['shape']}, {row['max_concurrency']} requests, overlap on: idle between graph launches"
            )
            yield Mark(name, row["between_launches"], IDLE_LIMIT)


def _plain_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    for row in rows:
        if row["kind"] == "side" and (row["shape"], row["load"], row["side"]) == ("8b", "decode", "steps=0"):
            users = row["max_concurrency"]
            if users in PLAIN_LIMITS:
                name = f"8b plain decode, {users} requests: median TPOT in ms"
                yield Mark(name, row["median_tpot_ms"], PLAIN_LIMITS[users])


def _gain_marks(rows: Sequence[Row]) -> Iterator[Mark]:
    """Throughput of speculation, and of the planner, over that of plain decoding under a long load."""
    for row in rows:
        if row["kind"] != "ratio" or (row["load"], row["column"]) != ("serving", "output_throughput"):
            continue
        shape, users = row["shape"], row["max_concurrency"]
        if row.get("requests", 0) < LONG_LOAD * users:  # rows of earlier runs do not say how many
            continue
        sides, least = {
            "as given / steps=0": ("speculation", SPECULATION_GAINS.get(shape, {}).get(users)),
            "steps=auto / steps=0": ("planner", AUTO_LEAST),
        }.get(row["ratio"], ("", None))
        if least is not None:
            name = f"{shape}, {users} requests: plain decoding's tok/s over those with the {sides}"
            yield Mark(name, 1 / row["value"], 1 / least)


def _idle(rows: Sequence[Row], shape: str, users: int) -> float | None:
    """The share between launches with overlap, where it was measured."""
    for row in rows:
        if (
            row["kind"] == "idle"
            and (row["shape"], row["max_concurrency"]) == (shape, users)
            and row["overlap"]
        ):
            share: float | None = row["between_launches"]
            return share
    return None
