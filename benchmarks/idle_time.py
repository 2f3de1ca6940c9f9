"""How long the device idles in a Chrome trace of torch.profiler, and why.

    python -m benchmarks.idle_time TRACE.json

Two shares of the window from the first to the last thing that the device does:

    nothing runs      no kernel, copy or fill is running
    between launches  no launch is under way: what one launch started, a whole graph for instance, counts as
                      busy from its first kernel's start to its last one's end

Gaps between the kernels of one graph come from the device and from dependencies between kernels. Only gaps
between launches can come from the host; overlap scheduling is there to remove them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from piecewise_graph.bench.trace import WORK

Span = tuple[float, float]  # (start, end) in microseconds
Event = Mapping[str, Any]


@dataclass(frozen=True)
class IdleTime:
    """Attributes:
    window_us: from the first start to the last end of anything on the device.
    nothing_runs, between_launches: shares of the window.
    launches: that the device worked for.
    """

    window_us: float
    nothing_runs: float
    between_launches: float
    launches: int


def idle_time(events: Iterable[Event]) -> IdleTime | None:
    """Of one device's trace events; None where the device did nothing."""
    work = work_of(events)
    if not work:
        return None
    launches = launch_spans(work)
    window = max(end for _, end in launches) - min(start for start, _ in launches)
    busy = [busy_time(spans) / window if window else 1.0 for spans in (list(map(span, work)), launches)]
    return IdleTime(window, 1 - busy[0], 1 - busy[1], len(launches))


def work_of(events: Iterable[Event]) -> list[Event]:
    """Kernels, copies and fills."""
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in WORK]


def span(event: Event) -> Span:
    """When a trace event began and ended."""
    return event["ts"], event["ts"] + event.get("dur", 0.0)


def launch_spans(work: Sequence[Event]) -> list[Span]:
    """One span per launch: events of one correlation id; an event without one is a launch of its own."""
    spans: dict[Any, Span] = {}
    for index, event in enumerate(work):
        start, end = span(event)
        launch = event.get("args", {}).get("correlation") or f"event {index}"
        first, last = spans.get(launch, (start, end))
        spans[launch] = min(first, start), max(last, end)
    return list(spans.values())


def busy_time(spans: Sequence[Span]) -> float:
    """Length of their union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def read_events(path: Path) -> list[Event]:
    """The events of a trace file."""
    content = json.loads(path.read_text())
    events: list[Event] = content["traceEvents"] if isinstance(content, dict) else content
    return events


def traced(work: Callable[[], object]) -> list[Event]:
    """What the device does meanwhile, as a trace has it."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return read_events(path)


def main(arguments: list[str] | None = None) -> int:
    (path,) = sys.argv[1:] if arguments is None else arguments
    found = idle_time(read_events(Path(path)))
    print("the device did nothing in this trace" if found is None else json.dumps(asdict(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
