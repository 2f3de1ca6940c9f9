"""Numbers for the graphs of a phase in a Chrome trace: when the host launches them, and where they run.

A profiler names a phase (`verify`) and the kernels in it, and between them only `cudaGraphLaunch`. In a
piecewise phase that is one launch per segment, in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PHASES = ("draft", "verify", "draft-extend", "prompts")
LAUNCH = "cudaGraphLaunch"
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
Event = Mapping[str, Any]


def segment_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """An event per graph launch, on the host's row and on the device's, called `verify: segment 3`."""
    phases = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    launches = sorted((e for e in events if e.get("name") == LAUNCH), key=lambda event: event["ts"])
    numbers: Counter[int] = Counter()
    names: dict[Any, str] = {}
    made = []
    for launch in launches:
        phase = _around(phases, launch)
        if phase is None:
            continue
        names[launch["args"]["correlation"]] = name = f"{phase['name']}: segment {numbers[id(phase)]}"
        numbers[id(phase)] += 1
        made.append(_named(name, [launch]))
    return made + [_named(names[key], work) for key, work in _by_launch(events).items() if key in names]


def _around(phases: Iterable[Event], launch: Event) -> Event | None:
    """The phase in which the host made a launch."""
    for phase in phases:
        begun = launch["ts"] - phase["ts"]
        if phase.get("tid") == launch.get("tid") and 0 <= begun <= phase["dur"]:
            return phase
    return None


def _by_launch(events: Iterable[Event]) -> dict[Any, list[Event]]:
    """What the device did for each launch."""
    found: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") in WORK:
            found.setdefault(event.get("args", {}).get("correlation"), []).append(event)
    return found


def _named(name: str, events: Sequence[Event]) -> dict[str, Any]:
    """One event from the first to the last, on the row of the first."""
    start = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    first = events[0]
    return {"ph": "X", "cat": "segment", "name": name, "pid": first["pid"], "tid": first["tid"],
            "ts": start, "dur": end - start}  # fmt: skip
