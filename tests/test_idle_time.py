"""Idle shares of hand-made traces."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `benchmarks` is not installed

idle = importlib.import_module("benchmarks.idle_time")


def work(start: float, end: float, launch: int | None = None, category: str = "kernel") -> dict[str, Any]:
    args = {} if launch is None else {"correlation": launch}
    return {"ph": "X", "cat": category, "name": "k", "ts": start, "dur": end - start, "args": args}


def shares(*events: dict[str, Any]) -> tuple[float, float]:
    found = idle.idle_time(events)
    return found.nothing_runs, found.between_launches


def test_gaps_inside_a_graph_are_not_between_launches() -> None:
    graph = [work(0, 10, 7), work(20, 30, 7)]
    other = [work(40, 50, 8), work(90, 100, 8)]
    found = idle.idle_time(graph + other)
    assert found.window_us == 100 and found.launches == 2
    assert found.nothing_runs == pytest.approx((10 + 10 + 40) / 100)
    assert found.between_launches == pytest.approx(10 / 100)  # from 30 to 40


def test_launches_of_one_kernel_are_counted_alike() -> None:
    assert shares(work(0, 10, 1), work(15, 20, 2)) == pytest.approx((5 / 20, 5 / 20))


def test_copies_and_fills_are_work_and_host_events_are_not() -> None:
    events = [
        work(0, 10, 1), work(10, 20, 2, "gpu_memcpy"), work(20, 30, 3, "gpu_memset"), work(35, 40, 4),
        work(30, 35, 5, "cuda_runtime"), work(0, 500, None, "gpu_user_annotation"),
        {"ph": "f", "cat": "ac2g", "ts": 0}, {"ph": "M", "name": "process_name"},
    ]  # fmt: skip
    assert shares(*events) == pytest.approx((5 / 40, 5 / 40))


def test_streams_that_overlap_are_busy_once() -> None:
    assert shares(work(0, 60, 1), work(10, 20, 2), work(50, 80, 3), work(90, 100, 4)) == pytest.approx(
        (10 / 100, 10 / 100)
    )


def test_events_without_a_launch_stand_for_themselves() -> None:
    assert shares(work(0, 10), work(30, 40)) == pytest.approx((20 / 40, 20 / 40))


def test_a_trace_without_device_work_has_no_share() -> None:
    assert idle.idle_time([work(0, 10, 1, "cpu_op")]) is None


@given(
    st.lists(st.tuples(st.floats(0, 1e3), st.floats(0.1, 1e2), st.integers(1, 5)), min_size=1, max_size=30)
)
def test_shares_are_shares_and_launches_hide_gaps(rows: list[tuple[float, float, int]]) -> None:
    found = idle.idle_time([work(start, start + length, launch) for start, length, launch in rows])
    assert -1e-9 <= found.between_launches <= found.nothing_runs + 1e-9 <= 1 + 1e-9


def test_a_file_is_read_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": [work(0, 10, 1), work(15, 20, 2)]}))
    assert idle.main([str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["between_launches"] == pytest.approx(0.25)
