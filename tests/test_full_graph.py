"""FULL mode: one graph per bucket and key."""

from __future__ import annotations

import pytest
import torch
from full_graph_cases import LAYERS, Centring, LastRow, Setup
from hypothesis import given, settings, strategies as st
from internals import fail_capture
from torch import Tensor
from toys import SIZES, assert_same, ops, rows, watching

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def test_every_bucket_is_one_graph(device: torch.device) -> None:
    setup = Setup(device)
    expected = {"traces": 1, "captures": len(SIZES), "tapes": len(SIZES), "not_full": 0, "fallbacks": 0}
    with pg.counters.expect(**expected, replays=6, full_replays=6):
        for count in (3, 8, 4, 1, 2, 6, 8, 3):
            setup.call(count)


def test_budget_keeps_full_graphs_from_being_captured_too(device: torch.device) -> None:
    setup = Setup(device, max_graph_bytes=1)
    with pg.counters.expect(tapes=0, **{"not_full:over_budget": 3, "fallbacks:over_budget": 3}):
        for count in (3, 3, 8):
            setup.call(count)


def test_captures_once_per_bucket_and_key(device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(captures=2 * len(SIZES), full_replays=4):
        for key in ("decode", ("verify", 8)):
            for count in (3, 8, 4, 5):
                setup.call(count, key=key)


def test_both_modes_live_side_by_side(device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(captures=1 + (LAYERS + 1), full_replays=2, replays=4):
        for full in (True, False, True, False, True, False):
            setup.call(3, full=full)
    modes = {bucket.mode for bucket in pg.explain(setup.fast).traces[0].buckets}
    assert modes == {"full", "piecewise"}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_segments_become_one_graph(compiler: str, device: torch.device) -> None:
    setup = Setup(device, compiler=compiler)
    with pg.counters.expect(captures=1, full_replays=2):
        for count in (3, 2, 4):
            setup.call(count)


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_owned_and_static_outputs(outputs: str, device: torch.device) -> None:
    setup = Setup(device, outputs=outputs)
    x, y = rows(4, device), rows(4, device)
    setup.live.fill_(4)
    with pg.forward_context(live=setup.live, full_graph=True):
        setup.fast(x)
        first = setup.fast(x)
        kept = first.clone()
        setup.fast(y)
    assert torch.equal(first, kept) == (outputs == "copy")


# --- calls that cannot be one graph -------------------------------------------------------------------


def test_op_that_is_not_capturable_leaves_the_call_piecewise(device: torch.device) -> None:
    class Mixed(Centring):
        def forward(self, x: Tensor) -> Tensor:
            return ops.mix(super().forward(x)) + 1

    setup = Setup(device, Mixed())
    with pg.counters.expect(full_replays=0, replays=2, fallbacks=0, **{"not_full:op_not_capturable": 3}):
        for _ in range(3):
            setup.call(4)


def test_segment_that_must_not_be_padded_makes_full_graphs_exact(device: torch.device) -> None:
    setup = Setup(device, LastRow())
    with pg.counters.expect(full_replays=2):
        for count in (4, 4, 3, 3, 2, 4):
            setup.call(count)
    counts = pg.counters.snapshot()
    assert counts["not_full:no_padding_proof"] == counts["not_full"] > 0


def test_answer_of_the_call_that_captured_stays(device: torch.device) -> None:
    """A CPU's stand-in begins with copies of what the rehearsal returned: those are the caller's."""
    setup, x = Setup(device), rows(4, device)
    with pg.forward_context(live=setup.live.fill_(4), full_graph=True):
        kept = setup.fast(x)
        wanted = kept.clone()
        for _ in range(2):
            setup.fast(rows(4, device))
    assert_same(kept, wanted)


def test_capture_that_fails_costs_the_bucket_and_says_why(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, RuntimeError("the stream broke"), at=4, of="full")
    setup = Setup(device)
    setup.call(3)
    assert "the stream broke" in pg.explain(setup.fast).traces[0].failed[4]
    with pg.counters.expect(failed_captures=0, full_replays=1, replays=3, **{"not_full:capture_failed": 3}):
        for count in (3, 2, 4, 7, 8):  # piecewise: captured, replayed twice; then a full graph of 8
            setup.call(count)


def test_ops_run_once_per_forward(device: torch.device) -> None:
    """Rehearsal and capture count too."""
    if device.type == "cuda":
        pytest.skip("a replayed graph calls no Python")
    setup = Setup(device)
    for count in (3, 3, 2, 8):
        with pg.forward_context(live=setup.live.fill_(count), full_graph=True), watching() as seen:
            setup.fast(rows(count, device))
        ran = [call.tokens for call in seen]
        assert ran == [4 if count < 5 else 8] * LAYERS


@pytest.mark.parametrize("count", [9, 12])
def test_above_max_tokens_runs_compiled(count: int, device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(**{"fallbacks:above_max_tokens": 2}, full_replays=0):
        setup.call(count)
        setup.call(count)


def test_graphs_switched_off(device: torch.device) -> None:
    setup = Setup(device, cuda_graphs="off")
    with pg.counters.expect(**{"fallbacks:cuda_graphs_off": 2}, captures=0):
        setup.call(3)
        setup.call(3)


# --- any order of calls -------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 10), st.booleans(), st.sampled_from([None, "a", "b"])),
        min_size=1,
        max_size=12,
    ),
    last_row=st.booleans(),
)
def test_any_sequence_equals_eager(calls: list[tuple[int, bool, str | None]], last_row: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        setup = Setup(device, LastRow() if last_row else None)
        for count, full, key in calls:
            setup.call(count, full=full, key=key)
