"""pg.plan against what capturing takes, and the budget that follows from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from internals import fail_capture, pool_of, state
from torch import Tensor, nn
from toys import SIZES, WIDTH, Blocks, Chooses, assert_same, compiled, fallbacks, ops, rows

import piecewise_graph as pg
from piecewise_graph.buckets import default_capture_sizes
from piecewise_graph.errors import CaptureError, ConfigError, NotCompiledError
from piecewise_graph.recorder.memory_plan import largest_to_drop

LAYERS = 2
ROW = WIDTH * 4  # bytes of one float32 token
MIB = 2**20


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model(device: torch.device) -> Blocks:
    return Blocks(LAYERS).to(device)


def called(model: Any, device: torch.device, **options: Any) -> Any:
    """A compiled model that has been traced and has captured nothing."""
    fast = compiled(model, **({"capture": "explicit"} | options))
    fast(rows(3, device))
    return fast


def captured(fast: Any, device: torch.device, **options: Any) -> Any:
    return pg.capture(fast, lambda n: rows(n, device), progress=False, **options)


def slack(device: torch.device) -> int:
    """Of the GPU's allocator, which hands out 2 MiB at once; a CPU's stand-ins count to the byte."""
    return 2 * MIB if device.type == "cuda" else 0


def assert_as_planned(plan: Any, report: Any, device: torch.device) -> None:
    """Within 10 % of what was taken, bucket by bucket and together; on a CPU to the byte."""
    assert [b.tokens for b in plan.buckets] == [b.tokens for b in report.captured]
    assert [b.graphs for b in plan.buckets] == [b.graphs for b in report.captured]
    assert [b.graph_bytes for b in plan.buckets] == [b.planned_bytes for b in report.captured]
    share = 0.1 if device.type == "cuda" else 0
    pairs = [(b.graph_bytes, c.graph_bytes) for b, c in zip(plan.buckets, report.captured, strict=True)]
    for planned, taken in [*pairs, (plan.pool_bytes, report.pool_bytes)]:
        assert abs(planned - taken) <= share * max(planned, taken) + slack(device)
    assert plan.buffer_bytes == report.buffer_bytes


# --- the plan -----------------------------------------------------------------------------------------


class Strange(nn.Module):
    """Segments of every kind: outputs that share storage, one that only allocates, one that casts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Any:
        halves = (self.linear(x) * 2).split(WIDTH // 2, dim=1)
        first, second = ops.mix_pair(torch.cat(halves, 1))
        out = torch.empty_like(first)
        ops.mix_out(first + second, out)
        picked = self.table(out.argmax(-1) % 8)
        other = torch.empty_like(picked)
        ops.mix_out(ops.mix(picked), other)
        y = x + other
        return y, y[:, :3], y.sum(-1)


class Unpadded(nn.Module):
    """One segment divides by the token count: it runs uncaptured, into buffers."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.mix(ops.mix(x * 2) / x.shape[0]) + 1


def test_plan_of_merged_weights(device: torch.device) -> None:
    model = models.build("llama", device=device)
    fast = pg.compile(
        model, compiler="eager", capture_sizes=[1, 4, 8], capture="explicit", merge_linears=True
    )

    def make(count: int) -> dict[str, Any]:
        return models.call("llama", models.random_ids(count, device=device))

    fast(**make(8))
    plan = pg.plan(fast)
    assert_as_planned(plan, pg.capture(fast, make, progress=False), device)
    assert "merged: " in str(pg.explain(fast))


@pytest.mark.parametrize("kind", [Blocks, Strange, Unpadded, Chooses])
def test_plan_is_what_capturing_takes(kind: Any, device: torch.device) -> None:
    model = kind().to(device)
    fast = called(model, device, capture_sizes=[1, 2, 4, 8], max_tokens=8)
    plan = pg.plan(fast)
    assert_as_planned(plan, captured(fast, device), device)
    for count in (1, 2, 3, 5, 8):
        x = rows(count, device)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_plan_holds_for_compiled_code(compiler: str, model: Blocks, device: torch.device) -> None:
    fast = called(model, device, compiler=compiler)
    plan = pg.plan(fast)
    assert_as_planned(plan, captured(fast, device), device)


def test_plan_by_formula(model: Blocks, device: torch.device) -> None:
    fast = called(model, device)
    plan = pg.plan(fast)
    assert [b.tokens for b in plan.buckets] == sorted(SIZES, reverse=True)
    assert {b.graphs for b in plan.buckets} == {LAYERS + 1}
    if device.type == "cpu":
        # Per bucket: linear and residual of each layer's segments, and the last segment's result.
        outputs = [b.graph_bytes // (b.tokens * ROW) for b in plan.buckets]
        assert outputs == [outputs[0]] * len(SIZES)
        assert plan.pool_bytes == sum(SIZES) * outputs[0] * ROW
    # the input and one bridge, for the largest bucket
    assert [b.buffer_bytes for b in plan.buckets] == [2 * max(SIZES) * ROW, 0]


def test_planning_captures_nothing_and_counts_nothing(model: Blocks, device: torch.device) -> None:
    fast = called(model, device)
    before, pool = pg.counters.snapshot(), pool_of(fast)
    pg.plan(fast)
    assert pg.counters.snapshot() == before
    assert pool.bytes() == pg.explain(fast).buffer_bytes == 0
    assert pool.device is None


def test_planning_calls_no_splitting_op(device: torch.device) -> None:
    """What it would append to a cache would stay there."""
    cache = torch.zeros(WIDTH, device=device)

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", cache)

        def forward(self, x: Tensor) -> Tensor:
            ops.append(x * 2, self.cache)
            return ops.mix(x) + 1

    fast = called(Caching(), device)
    before = cache.clone()
    assert pg.plan(fast).pool_bytes > 0
    assert_same(cache, before)


def test_what_an_op_would_have_filled_is_no_garbage(device: torch.device) -> None:
    """An illegal index would kill a CUDA context."""
    fast = called(Chooses().to(device), device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with the largest integer
    try:
        plan = pg.plan(fast)
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan.dropped == {}
    assert len(plan.buckets) == len(SIZES)


def test_subset_is_planned_by_itself(model: Blocks, device: torch.device) -> None:
    fast = called(model, device)
    plan = pg.plan(fast, sizes=[4])
    assert [b.tokens for b in plan.buckets] == [4]
    assert_as_planned(plan, captured(fast, device, sizes=[4]), device)


@pytest.mark.parametrize("sizes", [[3], [], [4, 16], ["4"]])
def test_sizes_that_are_no_capture_sizes_are_refused(
    sizes: list[Any], model: Blocks, device: torch.device
) -> None:
    with pytest.raises(CaptureError, match="capture sizes"):
        pg.plan(called(model, device), sizes=sizes)


def test_model_that_was_never_called_is_refused(model: Blocks) -> None:
    with pytest.raises(NotCompiledError, match="after at least one call"):
        pg.plan(compiled(model))


def test_trace_that_never_replays_takes_nothing(device: torch.device) -> None:
    fast = called(lambda x: ops.mix(x) + torch.rand_like(x), device)
    plan = pg.plan(fast)
    assert plan.buckets == ()
    assert plan.pool_bytes == plan.buffer_bytes == 0


def test_bucket_that_cannot_run_is_named_and_the_others_are_planned(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = called(Blocks(LAYERS).to(device), device, capture_sizes=[4, 6])
    fail_capture(monkeypatch, torch.OutOfMemoryError("wanted 12 GiB"), at=6, of="plan")
    plan = pg.plan(fast)
    assert [b.tokens for b in plan.buckets] == [4]
    assert "wanted 12 GiB" in plan.dropped[6]
    assert "not captured: 6 tokens" in str(plan)


def test_plan_reads_well_and_is_json(model: Blocks, device: torch.device) -> None:
    plan = pg.plan(called(model, device))
    assert str(plan).startswith("2 buckets will take ")
    assert max(map(len, str(plan).splitlines())) <= 110
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["pool_bytes"] == plan.pool_bytes == sum(b["graph_bytes"] for b in found["buckets"])


def test_reports_show_planned_beside_taken(model: Blocks, device: torch.device) -> None:
    fast = called(model, device)
    plan = pg.plan(fast)
    report = captured(fast, device)
    assert "planned" in str(report)
    (trace,) = pg.explain(fast).traces
    assert {b.tokens: b.planned_bytes for b in trace.buckets} == {
        b.tokens: b.graph_bytes for b in plan.buckets
    }


def test_without_a_plan_nothing_is_said_of_one(model: Blocks, device: torch.device) -> None:
    fast = called(model, device)
    report = captured(fast, device)
    assert [b.planned_bytes for b in report.captured] == [None] * len(SIZES)
    assert "planned" not in str(report)


def test_traces_of_one_model_share_the_planned_pool(device: torch.device) -> None:
    """A graph break makes two traces of one forward; each has its rows, under its number in pg.explain.

    Behind the break Dynamo sees a fixed size first: that trace, number 1, serves no capture size.
    """

    def broken(x: Tensor) -> Tensor:
        x = ops.mix(x * 2)
        torch._dynamo.graph_break()
        return ops.mix(x * 3) + 1

    fast = called(broken, device)
    fast(rows(5, device))
    plan = pg.plan(fast)
    report = captured(fast, device)
    assert [(b.trace, b.tokens) for b in plan.buckets] == [(0, 8), (2, 8), (0, 4), (2, 4)]
    assert plan.buffer_bytes == report.buffer_bytes
    taken = {(n, b.tokens): b.graph_bytes for n, t in enumerate(pg.explain(fast).traces) for b in t.buckets}
    planned = {(b.trace, b.tokens): b.graph_bytes for b in plan.buckets}
    assert set(taken) == set(planned)
    assert all(abs(taken[key] - planned[key]) <= slack(device) for key in taken)


def test_llama_is_planned_with_all_default_sizes(device: torch.device) -> None:
    model = models.build("llama", layers=3, device=device)
    fast = pg.compile(model, compiler="eager", capture="explicit", max_tokens=512)

    def make(n: int) -> dict[str, Any]:
        return models.call("llama", models.random_ids(n, device=device))

    fast(**make(7))
    plan = pg.plan(fast)
    report = pg.capture(fast, make, progress=False)
    assert [b.tokens for b in plan.buckets] == sorted(default_capture_sizes(512), reverse=True)
    assert len(plan.buckets) == 19
    assert_as_planned(plan, report, device)


# --- the budget ---------------------------------------------------------------------------------------


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
    """A model for 64, 2 and 1 tokens whose budget has room for 2 and 1."""
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
    with pytest.raises(CaptureError, match=r"(?s)captured nothing.*over_budget.*max_graph_bytes is 1"):
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
    """Plain torch.compile traces its first size as a constant, whatever the capture sizes are."""
    options = {"compiler": "eager", "capture_sizes": [2], "max_tokens": 64, "max_graph_bytes": 1}
    model = Blocks(LAYERS).to(device)
    fast = torch.compile(model, backend="piecewise", options=options)
    with pg.counters.expect(tapes=0, **{"fallbacks:over_budget": 2}):
        for _ in range(2):
            x = rows(3, device)
            assert_same(fast(x), model(x))


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


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_planning_gives_its_memory_back(device: torch.device) -> None:
    fast = called(Blocks(LAYERS, width=WIDTH).to(device), device, capture_sizes=[64, 4096], max_tokens=4096)
    pg.plan(fast)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(3):
        assert pg.plan(fast).pool_bytes > 0
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_model_of_real_widths_is_planned_within_10_percent(compiler: str, device: torch.device) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    fast = pg.compile(model, compiler=compiler, capture="explicit", max_tokens=512)

    def make(n: int) -> dict[str, Any]:
        ids = torch.randint(0, 32000, (1, n), device=device)
        return {"input_ids": ids, "use_cache": False}

    fast(**make(512))
    plan = pg.plan(fast)
    report = pg.capture(fast, make, progress=False)
    assert len(plan.buckets) == 19
    assert_as_planned(plan, report, device)
