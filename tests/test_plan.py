"""pg.plan: planned bytes against the bytes that capturing takes."""

from __future__ import annotations

import json
from typing import Any

import models
import pytest
import torch
from internals import fail_capture, pool_of
from torch import Tensor, nn
from toys import (
    SIZES,
    WIDTH,
    Blocks,
    Chooses,
    assert_same,
    called,
    captured,
    compiled,
    ops,
    rows,
)

import piecewise_graph as pg
from piecewise_graph.buckets import default_capture_sizes
from piecewise_graph.errors import CaptureError, NotCompiledError

pytestmark = pytest.mark.usefixtures("no_grad")


LAYERS = 2
ROW = WIDTH * 4  # bytes of one float32 token
MIB = 2**20


def slack(device: torch.device) -> int:
    """Bytes of the GPU's allocator, which hands out 2 MiB at once; stand-ins on a CPU are exact."""
    return 2 * MIB if device.type == "cuda" else 0


def assert_as_planned(plan: Any, report: Any, device: torch.device) -> None:
    """Assert that every bucket and the sum are within 10 % of what was taken; exact on a CPU."""
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
    """Segments with outputs that share storage, one that only allocates, and one that casts."""

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
    """One segment divides by the token count, so it runs uncaptured, into buffers."""

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
    """The op would append to a cache, and the rows would stay there."""
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
    """A graph break makes two traces of one forward, each with rows under its number in pg.explain."""

    def broken(x: Tensor) -> Tensor:
        x = ops.mix(x * 2)
        torch._dynamo.graph_break()
        return ops.mix(x * 3) + 1

    fast = called(broken, device)
    plan = pg.plan(fast)
    report = captured(fast, device)
    assert [(b.trace, b.tokens) for b in plan.buckets] == [(0, 8), (1, 8), (0, 4), (1, 4)]
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
