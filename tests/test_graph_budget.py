"""max_graph_bytes: the largest buckets that do not fit are not captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from internals import decision, fail_capture, pool_of, state
from torch import Tensor, nn
from toys import (
    WIDTH,
    Blocks,
    assert_same,
    called,
    captured,
    compiled,
    fallbacks,
    rows,
    through_torch,
    watching,
)

import piecewise_graph as pg
from piecewise_graph.errors import CaptureError, ConfigError
from piecewise_graph.recorder.memory_plan import largest_to_drop

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 2
MIB = 2**20


@given(st.lists(st.integers(0, 100)), st.integers(0, 100))
def test_as_few_of_the_largest_are_dropped_as_the_budget_allows(needs: list[int], budget: int) -> None:
    dropped = largest_to_drop(iter(needs), budget)
    kept = needs[len(dropped) :]
    assert needs == dropped + kept
    assert all(need > budget for need in dropped)
    assert not kept or kept[0] <= budget


def test_needs_are_read_no_further_than_necessary() -> None:
    needs = iter([9, 7, 3, 1])
    assert largest_to_drop(needs, 4) == [9, 7]
    assert list(needs) == [1]


def needed(plan: Any, tokens: int) -> int:
    return sum(b.graph_bytes for b in plan.buckets if b.tokens <= tokens)


def budgeted(device: torch.device, **options: Any) -> tuple[nn.Module, Any]:
    """A model with capture sizes 64, 2 and 1, and a budget for 2 and 1."""
    model = Blocks(LAYERS)
    model.linears = nn.ModuleList(nn.Identity() for _ in range(LAYERS))  # any width
    sizes = {"capture_sizes": [1, 2, 64], "max_tokens": 64}
    probe = compiled(model, capture="explicit", **sizes)
    probe(wide(2, device))
    limit = pg.plan(probe, sizes=[1, 2]).pool_bytes
    assert pg.plan(probe).pool_bytes > limit
    return model, compiled(model, max_graph_bytes=limit, **sizes, **options)


def wide(count: int, device: torch.device) -> Tensor:
    return rows(count, device, 65536 if device.type == "cuda" else WIDTH)


def test_largest_bucket_that_does_not_fit_is_not_captured(device: torch.device) -> None:
    model, fast = budgeted(device)
    report = pg.capture(fast, lambda n: wide(n, device), progress=False)
    limit = state(fast).config.max_graph_bytes
    assert [b.tokens for b in report.captured] == [2, 1]
    assert report.pool_bytes <= limit
    assert list(report.failed) == [64]
    assert f"max_graph_bytes is {limit}" in report.failed[64]
    assert "not captured: 64 tokens: over_budget" in str(report)
    assert "not captured: 64 tokens: over_budget" in str(pg.explain(fast))
    with pg.counters.expect(replays=2, tapes=0, **{"fallbacks:over_budget": 2}):
        for count in (1, 2, 3, 64):
            x = wide(count, device)
            assert_same(fast(x), model(x))


def test_lazy_capture_keeps_to_the_same_budget(device: torch.device) -> None:
    model, fast = budgeted(device)
    with pg.counters.expect(tapes=2, replays=2, **{"fallbacks:over_budget": 2}):
        for count in (1, 1, 50, 2, 2, 50):
            x = wide(count, device)
            assert_same(fast(x), model(x))
    assert pool_of(fast).bytes() <= state(fast).config.max_graph_bytes
    assert fallbacks(fast) == {"over_budget": 2}
    assert list(pg.explain(fast).over_budget) == [64]


def test_budget_for_nothing_is_an_error_of_capture_and_a_count_of_calls(device: torch.device) -> None:
    fast = compiled(Blocks(LAYERS).to(device), max_graph_bytes=1)
    with pytest.raises(CaptureError, match=r"(?s)nothing was captured.*over_budget.*max_graph_bytes is 1"):
        captured(fast, device)
    lazy = compiled(Blocks(LAYERS).to(device), max_graph_bytes=1)
    with pg.counters.expect(tapes=0, **{"fallbacks:over_budget": 3}):
        for count in (3, 8, 3):
            lazy(rows(count, device))


def test_budget_that_has_room_for_all_changes_nothing(model: Blocks, device: torch.device) -> None:
    fast = compiled(model, max_graph_bytes=2**40)
    report = captured(fast, device)
    assert [b.tokens for b in report.captured] == [8, 4]
    assert report.failed == {}
    assert pg.explain(fast).over_budget == {}


def test_sizes_captured_before_count_against_the_budget(device: torch.device) -> None:
    _, fast = budgeted(device)
    pg.capture(fast, lambda n: wide(n, device), sizes=[2], progress=False)
    with pytest.raises(CaptureError, match="over_budget: 64 tokens"):
        pg.capture(fast, lambda n: wide(n, device), sizes=[64], progress=False)


def test_subset_that_was_planned_before_is_no_way_around_the_budget(device: torch.device) -> None:
    _, fast = budgeted(device)
    fast(wide(2, device))
    assert pg.plan(fast, sizes=[1]).dropped == {}
    with pg.counters.expect(tapes=0, **{"fallbacks:over_budget": 1}):
        fast(wide(64, device))


def test_trace_of_a_fixed_size_keeps_to_the_budget(device: torch.device) -> None:
    """Plain torch.compile traces its first size as a constant, even if it is no capture size."""
    model = Blocks(LAYERS).to(device)
    fast = through_torch(model, capture_sizes=[2], max_tokens=64, max_graph_bytes=1)
    with pg.counters.expect(tapes=0, **{"fallbacks:over_budget": 2}):
        for _ in range(2):
            x = rows(3, device)
            assert_same(fast(x), model(x))


@pytest.mark.parametrize("how", ["lazy", "capture"])
def test_budget_counts_the_traces_that_come_later(how: str, device: torch.device) -> None:
    """A budget that just fits the first trace has no room for the largest bucket of a second one."""
    model, probe = Blocks(LAYERS).to(device), None
    probe = called(model, device, capture_sizes=[2, 64], max_tokens=64)
    fast = compiled(model, capture_sizes=[2, 64], max_tokens=64, max_graph_bytes=pg.plan(probe).pool_bytes)
    for count in (64, 2, 64):
        fast(rows(count, device))
    assert fallbacks(fast) == {}
    model.double()
    if how == "capture":
        pg.capture(fast, lambda n: rows(n, device).double(), progress=False)
    x = rows(64, device).double()
    with pg.counters.expect(**{"fallbacks:over_budget": 1}):
        torch.testing.assert_close(fast(x), model(x))
    assert 64 in pg.explain(fast).over_budget


@pytest.mark.parametrize("value", [0, -1, 1.5, "1GiB", True])
def test_budget_that_is_no_number_of_bytes_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_graph_bytes"):
        pg.PiecewiseConfig(max_graph_bytes=value)


def test_budget_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIECEWISE_GRAPH_MAX_GRAPH_BYTES", "1048576")
    assert pg.PiecewiseConfig.from_options(None).max_graph_bytes == MIB


def test_out_of_memory_says_what_was_planned_and_names_the_option(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = called(model, device, capture_sizes=[4, 6])
    planned = {b.tokens: b.graph_bytes for b in pg.plan(fast).buckets}
    fail_capture(monkeypatch, torch.OutOfMemoryError("wanted 12 GiB"), at=6)
    why = captured(fast, device).failed[6]
    for part in ("6 tokens", "wanted 12 GiB", f"planned: {planned[6]} bytes", "max_graph_bytes"):
        assert part in why


def test_asking_plans_captures_and_runs_nothing(device: torch.device) -> None:
    fast = compiled(Blocks(LAYERS).to(device), max_graph_bytes=1 << 40)
    fast(rows(9, device))  # above max_tokens: the trace is there, and nothing was captured or planned
    before = pg.counters.snapshot()
    with watching() as seen:
        found = [decision(fast, count) for count in range(1, 10)]
        report = pg.explain(fast)
    assert [each.bucket for each in found] == [4] * 4 + [8] * 4 + [None]
    assert not seen and pg.counters.snapshot() == before
    assert state(fast).plan is None and report.pool_bytes == report.buffer_bytes == 0
    fast(rows(3, device))  # the first capture makes the plan
    assert state(fast).plan is not None
