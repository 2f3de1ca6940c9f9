"""One forward of a trace shows what captures rely on; later buckets are captured at once, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from toys import SIZES, WIDTH, Blocks, assert_same, compiled, define, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.graph_pool import GraphPool

pytestmark = pytest.mark.usefixtures("no_grad")


class Appends(nn.Module):
    """Adds its rows up in a buffer: a forward that ran twice, or with padding, shows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        ops.append(y, self.cache)
        return ops.mix(y) + self.cache


@given(counts=st.lists(st.integers(1, 9), min_size=3, max_size=10))
@settings(max_examples=10)
def test_every_call_runs_every_op_once(counts: list[int]) -> None:
    torch._dynamo.reset()
    device = torch.device("cpu")
    model, mirror = Appends(), Appends()
    mirror.load_state_dict(model.state_dict())
    fast = compiled(model)
    with watching() as seen:
        for count in counts:
            x = rows(count, device)
            seen.clear()
            found = fast(x)
            assert [(call.op, call.tokens) for call in seen] == [("append", count), ("mix", count)]
            assert_same(found, mirror(x))
            assert_same(model.cache, mirror.cache)


def test_buckets_after_the_first_run_no_forward_beside_their_first_replay(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs segments without graphs is asked for the first bucket alone."""
    import piecewise_graph.runtime.bucket_capture as module

    model, rehearsed = Blocks().to(device), []
    real = module.rehearse
    monkeypatch.setattr(module, "rehearse", lambda *a, **k: rehearsed.append(a[3]) or real(*a, **k))
    fast = compiled(model, capture_sizes=[2, 4, 8, 16], max_tokens=16)
    with pg.counters.expect(tapes=4, replays=1):
        for count in (8, 4, 3, 16, 1):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    assert rehearsed == [8]


def test_the_first_call_before_pg_capture_is_the_rehearsal(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    import piecewise_graph.runtime.bucket_capture as module

    model = Blocks().to(device)
    fast = compiled(model, capture="explicit")
    assert_same(fast(x := rows(3, device)), model(x))
    monkeypatch.setattr(module, "rehearse", None)
    with watching() as seen, pg.counters.expect(tapes=len(SIZES), replays=0):
        pg.capture(fast, lambda count: rows(count, device), progress=False)
    assert [call.tokens for call in seen] == [size for size in reversed(SIZES) for _ in model.linears]


def _wrong_from(count: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.double() if x.shape[0] >= count else x * 2


define("widens(Tensor x) -> Tensor", _wrong_from(5), torch.empty_like)
pg.register_splitting_op("toy::widens")


@pytest.mark.parametrize("capture", ["lazy", "explicit"])
def test_an_op_that_breaks_its_promise_in_a_later_bucket_is_told_each_time(
    capture: str, device: torch.device
) -> None:
    fast = compiled(lambda x: ops.widens(x + 1) * 3, capture=capture)
    x = rows(3, device)
    assert_same(fast(x), (x + 1) * 6)
    if capture == "explicit":
        pg.capture(fast, lambda count: rows(count, device), sizes=[4], progress=False)
    for _ in range(3):
        with pytest.raises(pg.errors.SplittingOpError, match="toy::widens returned dtype"):
            fast(rows(7, device))
        assert_same(fast(x), (x + 1) * 6)


def test_a_capture_that_wants_a_rehearsal_gets_one(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that times or compiles at a new size cannot do so in a capture."""
    model = Blocks().to(device)
    fast = compiled(model)
    assert_same(fast(x := rows(3, device)), model(x))
    real, refused = GraphPool.capture, []

    def capture(self: GraphPool, run: Any, inputs: Sequence[object], **given: Any) -> Any:
        if not refused:
            refused.append(inputs)
            raise RuntimeError("operation not permitted when stream is capturing")
        return real(self, run, inputs, **given)

    monkeypatch.setattr(GraphPool, "capture", capture)
    with pg.counters.expect(tapes=1, replays=1, failed_captures=0), watching() as seen:
        for count in (7, 6):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    calls, sides = 2, 2
    assert refused and len(seen) == calls * sides * len(model.linears)


def test_a_bucket_that_never_runs_out_of_failures_costs_itself(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    fast(rows(3, device))

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no graph today")

    with monkeypatch.context() as patched, pg.counters.expect(failed_captures=1, tapes=0):
        patched.setattr(GraphPool, "capture", refuse)
        for count in (7, 6):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    with pg.counters.expect(replays=1):
        assert_same(fast(x := rows(3, device)), model(x))
