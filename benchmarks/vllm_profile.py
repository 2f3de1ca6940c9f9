"""Where the time of an engine's steps goes: on the device, and in Python."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.idle_time import Event, idle_time, traced, work_of
from benchmarks.vllm_engine import Row


def device_time(work: Callable[[], object], steps: int) -> Row:
    """IdleTime of `work`, which makes so many steps; busy_ms, of the device per step; kernels, by time."""
    events = traced(work)
    found = idle_time(events)
    if found is None:
        return {}
    busy = (1 - found.nothing_runs) * found.window_us / steps / 1e3
    return {**asdict(found), "busy_ms": busy, "kernels": kernels_of(events, steps)}


def kernels_of(events: Iterable[Event], steps: int) -> list[Row]:
    """What the device does, in microseconds per step, what takes longest first."""
    taken: dict[str, list[float]] = defaultdict(list)
    for event in work_of(events):
        taken[event["name"][:100]].append(event.get("dur", 0.0))
    rows = [
        {"kernel": name, "calls": len(times) / steps, "us": sum(times) / steps}
        for name, times in taken.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def host_time(work: Callable[[], object], steps: int) -> list[Row]:
    """Functions by their own time, then others by all of it, in microseconds per step.

    The profiler slows each call of a function, so the times compare functions, not sides.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    work()
    profiler.disable()
    stats: Any = pstats.Stats(profiler)
    rows = [
        {
            "function": f"{Path(place).parent.name}/{Path(place).name}:{line}({name})",
            "calls": calls / steps,
            "own_us": own / steps * 1e6,
            "all_us": within / steps * 1e6,
        }
        for (place, line, name), (_, calls, own, within, _) in stats.stats.items()
    ]
    by_own = sorted(rows, key=lambda row: -row["own_us"])[:25]
    by_all = sorted(rows, key=lambda row: -row["all_us"])[:60]
    return [*by_own, *(row for row in by_all if row not in by_own)]
