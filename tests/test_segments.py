"""Numbers of graphs in traces: launches belong to the phase that the host is in."""

from __future__ import annotations

from typing import Any

from piecewise_graph.bench.trace import segment_events


def phase(name: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid}


def launch(ts: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "dur": 2.0, "pid": 1,
            "tid": tid, "args": {"correlation": correlation}}  # fmt: skip


def kernel(ts: float, dur: float, correlation: int) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": ts, "dur": dur, "pid": 0, "tid": 7,
            "args": {"correlation": correlation}}  # fmt: skip


def test_graphs_are_numbered_within_their_phase() -> None:
    events = [
        phase("round", 0, 100), phase("draft", 0, 10), phase("verify", 20, 30), phase("verify", 60, 10),
        launch(1, 1), launch(40, 3), launch(21, 2), launch(61, 4),
        launch(80, 5),  # in no phase
        launch(22, 6, tid=2),  # of another thread
        kernel(50, 5, 1), kernel(60, 5, 2), kernel(70, 5, 2), kernel(90, 1, 5),
    ]  # fmt: skip
    found = segment_events(events)
    on_host = [(each["name"], each["ts"]) for each in found if each["pid"] == 1]
    assert on_host == [
        ("draft: segment 0", 1), ("verify: segment 0", 21), ("verify: segment 1", 40),
        ("verify: segment 0", 61),
    ]  # fmt: skip
    on_device = [(each["name"], each["ts"], each["dur"]) for each in found if each["pid"] == 0]
    assert on_device == [("draft: segment 0", 50, 5), ("verify: segment 0", 60, 15)]


def test_traces_without_graphs_stay_as_they_are() -> None:
    assert segment_events([phase("draft", 0, 10), kernel(1, 2, 3)]) == []
