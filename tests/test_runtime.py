"""What holds across calls: ownership of outputs, addresses of weights, the proof of padding, failures."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from internals import fail_capture
from torch import Tensor, nn
from toys import (
    BOTH,
    HOOK,
    WIDTH,
    Blocks,
    assert_same,
    check,
    compiled,
    fallbacks,
    ops,
    rows,
    through_torch,
    watching,
)

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, CaptureError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- outputs ------------------------------------------------------------------------------------------


@BOTH
def test_kept_outputs_stay_right(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    inputs = [rows(count, device) for count in (3, 3, 4, 2, 8, 3, 6)]
    outputs = [fast(x) for x in inputs]
    for x, output in zip(inputs, outputs, strict=True):
        assert_same(output, model(x))


def test_static_outputs_are_overwritten_by_the_next_replay(model: Blocks, device: torch.device) -> None:
    fast = compiled(model, outputs="static")
    first, second = rows(3, device), rows(3, device)
    fast(first)
    kept = fast(first)
    assert_same(kept, model(first))
    again = fast(second)
    assert kept.data_ptr() == again.data_ptr()
    assert_same(kept, model(second))


def test_copied_outputs_have_memory_of_their_own(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x)
    fast(x).fill_(float("nan"))
    assert_same(fast(x), model(x))


def test_padded_call_returns_the_live_rows_only(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for count in (4, 3, 1):
        fast(rows(count, device))
        assert fast(rows(count, device)).shape == (count, WIDTH)


def test_callers_input_is_not_written(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    before = x.clone()
    for _ in range(3):
        fast(x)
    assert torch.equal(x, before)


def test_input_of_other_strides_is_read_right(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    for count in (3, 3, 5, 5):
        x = torch.randn(WIDTH, count, device=device).t()
        assert_same(fast(x), model(x))
        wide = torch.randn(count, 2 * WIDTH, device=device)[:, ::2]
        assert_same(fast(wide), model(wide))


def test_bucket_leaves_nothing_of_a_longer_call_behind(device: torch.device) -> None:
    """5 tokens after 8 in one bucket: rows of the longer call must not be seen."""
    model = Blocks().to(device)
    fast = compiled(model, capture_sizes=[8])
    for count in (8, 8, 5, 8, 1):
        x = rows(count, device) * 1e3
        assert_same(fast(x), model(x))


# --- weights ------------------------------------------------------------------------------------------


@BOTH
def test_moved_weight_raises_and_names_it(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    x = rows(3, device)
    fast(x), fast(x)
    weight = model.linears[1].weight
    old = weight.data
    weight.data = old.clone()
    with pytest.raises(AddressMovedError, match=r"linears.*1.*weight"):
        fast(x)
    weight.data = old
    assert_same(fast(x), model(x))


@BOTH
def test_reset_recovers_from_a_moved_weight(entry: Any, model: Blocks, device: torch.device) -> None:
    fast = entry(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight.data = torch.randn(WIDTH, WIDTH, device=device)
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1, traces=0):
        assert_same(fast(x), model(x))
        assert_same(fast(x), model(x))


def test_weight_moved_before_another_buckets_capture_raises_too(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    fast(rows(3, device))
    model.linears[0].weight.data = model.linears[0].weight.data.clone()
    with pytest.raises(AddressMovedError, match="linears"):
        fast(rows(8, device))


def test_weight_updated_in_place_is_seen(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight.copy_(torch.randn(WIDTH, WIDTH, device=device))
    assert_same(fast(x), model(x))


def test_state_dict_loaded_after_capture_is_seen(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.load_state_dict(Blocks().to(device).state_dict())
    assert_same(fast(x), model(x))


def test_old_weight_stays_alive_while_it_is_captured(model: Blocks, device: torch.device) -> None:
    """With check="off" graphs read a swapped weight at its old address, which must stay allocated."""
    fast = compiled(model, check="off")
    x = rows(3, device)
    wanted = fast(x)
    model.linears[0].weight.data = torch.full((WIDTH, WIDTH), float("nan"), device=device)
    gc.collect()
    filler = [torch.full((WIDTH, WIDTH), float("nan"), device=device) for _ in range(64)]
    assert_same(fast(x), wanted)
    assert filler


def test_replaced_parameter_object_is_right(model: Blocks, device: torch.device) -> None:
    """Dynamo sees another Parameter object: the answer follows the new weight, or the call raises."""
    fast = compiled(model)
    x = rows(3, device)
    fast(x), fast(x)
    model.linears[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    try:
        found = fast(x)
    except AddressMovedError:
        pg.reset()
        found = fast(x)
    assert_same(found, model(x))


# --- padding proof ------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [torch.zeros(4, WIDTH), torch.ones(1, WIDTH)])
def test_proof_of_padding_does_not_trust_degenerate_values(first: Tensor, device: torch.device) -> None:
    """On zeros `x / T` is the same at every size, so zeros prove nothing.

    Warm-up inputs are often zeros, and so is the centred value of a single token.
    """

    def model(x: Tensor) -> Tensor:
        return ops.mix(ops.mix(x) / x.shape[0]) + 1

    fast = compiled(model)
    fast(first.to(device))
    for count in (8, 6, 6, 3, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


# --- the rest -----------------------------------------------------------------------------------------


def test_graphs_off_runs_segments_only(model: Blocks, device: torch.device) -> None:
    with pg.counters.expect(tapes=0, captures=0, replays=0, **{"fallbacks:cuda_graphs_off": 3}):
        check(model, device, counts=(3, 3, 9), cuda_graphs="off")


def test_dynamo_reset_drops_graphs_and_traces_anew(model: Blocks, device: torch.device) -> None:
    fast = through_torch(model, dynamic=True)
    x = rows(3, device)
    fast(x)
    torch._dynamo.reset()
    with pg.counters.expect(traces=1, tapes=1):
        assert_same(fast(x), model(x))


def test_each_replay_runs_each_op_once_at_the_live_count(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    layers = 2
    for count in (3, 3, 2, 8, 5, 9):
        with watching() as seen:
            fast(rows(count, device))
            assert [call.tokens for call in seen] == [count] * layers


# --- failures of capture ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (RuntimeError("stream is broken"), "RuntimeError: stream is broken"),
        (torch.OutOfMemoryError("wanted 12 GiB"), "out of memory while capturing 4 tokens: wanted 12 GiB"),
    ],
)
def test_failed_capture_costs_its_bucket_only(
    error: Exception, shown: str, model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, error, at=4)
    fast = compiled(model)
    with pg.counters.expect(failed_captures=1, tapes=1, replays=1, **{"fallbacks:capture_failed": 2}):
        for count in (3, 3, 2, 8, 8):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    trace = pg.explain(fast).traces[0]
    assert list(trace.failed) == [4]
    assert trace.failed[4].startswith(shown)
    assert shown in str(pg.explain(fast))
    assert [bucket.tokens for bucket in trace.buckets] == [8]
    assert fallbacks(fast) == {"capture_failed": 2}


def test_out_of_memory_says_what_to_set() -> None:
    assert "max_tokens or capture_sizes" in CaptureError.out_of_memory(4, "cause")


def test_reset_tries_a_failed_bucket_again(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled(model)
    with monkeypatch.context() as broken:
        fail_capture(broken, RuntimeError("broken"))
        fast(rows(3, device))
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1, fallbacks=0):
        fast(rows(3, device)), fast(rows(3, device))


def test_op_that_raises_while_its_bucket_is_rehearsed_leaves_the_model_usable(device: torch.device) -> None:
    fast = compiled(lambda x: torch.ops.toy.call_back(x * 2) + 1)
    x = rows(3, device)

    def broken(x: Tensor) -> Tensor:
        raise ZeroDivisionError("from the op")

    HOOK[0] = broken
    with pytest.raises(ZeroDivisionError, match="from the op"):
        fast(x)
    HOOK[0] = lambda x: x + 0
    with pg.counters.expect(tapes=1, replays=1):
        assert_same(fast(x), x * 2 + 1)
        assert_same(fast(x), x * 2 + 1)
