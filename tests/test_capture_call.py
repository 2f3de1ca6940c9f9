"""`GraphPool.capture_call`: one callable as one graph, in the memory of a pool."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.errors import GraphPoolError

pytestmark = pytest.mark.usefixtures("no_grad")


def accumulate(device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """A static input, what was added up so far, and one entry per run of the Python code."""
    return torch.ones(4, device=device), torch.zeros(4, device=device), []


def test_body_runs_once_to_warm_up_and_once_per_replay(device: torch.device) -> None:
    x, total, ran = accumulate(device)

    def body() -> None:
        ran.append(1)
        total.add_(x)

    replay = pg.GraphPool().capture_call(body, device=device)
    assert total.tolist() == [1.0] * 4  # the warm-up; the capture itself has no effect
    x.fill_(10.0)
    for count in (1, 2, 3):
        replay()
        assert total.tolist() == [1.0 + 10.0 * count] * 4
    assert len(ran) == (2 if device.type == "cuda" else 1 + 3)  # a CPU's stand-in runs the body again


@settings(max_examples=20)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_replays_of_two_calls_in_one_pool_come_in_any_order(order: list[int]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    state = torch.zeros(3, device=device)
    pool = pg.GraphPool()
    bodies = (lambda: state.mul_(2.0).add_(1.0), lambda: state.sub_(3.0))
    calls = [pool.capture_call(body, device=device) for body in bodies]
    state.zero_()
    expected = 0.0
    for index in order:
        calls[index]()
        expected = expected * 2.0 + 1.0 if index == 0 else expected - 3.0
    assert state.tolist() == [expected] * 3


@pytest.mark.parametrize("drop", ["reset", "release"])
def test_dropped_graph_is_refused_by_name_and_captured_again(drop: str, device: torch.device) -> None:
    x, total, _ = accumulate(device)
    pool = pg.GraphPool()
    compiled = pg.compile(lambda x: x * 2, compiler="eager", token_dim={"x": 0}, pool=pool)
    compiled(x)
    replay = pool.capture_call(lambda: total.add_(x), device=device, name="counting")
    if drop == "reset":
        pg.reset()
    else:
        pool.release()
    assert replay.replay is None
    with pytest.raises(GraphPoolError, match=r"(?s)counting was dropped.*capture it again"):
        replay()
    again = pool.capture_call(lambda: total.add_(x), device=device)
    total.zero_()
    again()
    assert total.tolist() == [1.0] * 4


def test_error_in_the_body_reaches_the_caller_and_leaves_the_pool_usable(device: torch.device) -> None:
    pool, total = pg.GraphPool(), torch.zeros(2, device=device)

    def broken() -> None:
        raise ValueError("no such luck")

    with pytest.raises(ValueError, match="no such luck"):
        pool.capture_call(broken, device=device)
    pool.capture_call(lambda: total.add_(1.0), device=device)()
    assert total.tolist() == [2.0, 2.0]  # the warm-up and one replay


def test_pool_of_another_device_is_refused() -> None:
    pool = pg.GraphPool()
    pool.join(torch.device("meta"), pool)
    with pytest.raises(GraphPoolError, match="give each device a GraphPool of its own"):
        pool.capture_call(lambda: None, device="cpu")


def test_replay_is_named_in_the_trace_of_a_profiler(device: torch.device) -> None:
    total = torch.zeros(2, device=device)
    replay = pg.GraphPool().capture_call(lambda: total.add_(1.0), device=device, name="sampling")
    with torch.profiler.profile() as profile:
        replay()
    assert "sampling" in {event.key for event in profile.key_averages()}


def test_release_inside_of_a_replay_is_refused(device: torch.device) -> None:
    """On a CPU the stand-in runs the body, which may call back; on a GPU nothing runs then."""
    pool, tried = pg.GraphPool(), []

    def body() -> None:
        if tried:
            with pytest.raises(GraphPoolError, match="release"):
                pool.release()

    replay = pool.capture_call(body, device=device)
    tried.append(1)
    replay()


def test_model_of_the_pool_called_inside_of_a_body_is_not_replayed(device: torch.device) -> None:
    """The body runs twice: to warm up and for the capture, or on a CPU in the replay."""
    pool, x = pg.GraphPool(), torch.ones(4, 8, device=device)
    fast = pg.compile(lambda x: x * 2, compiler="eager", token_dim={"x": 0}, pool=pool, capture_sizes=[4])
    for _ in range(2):
        fast(x)
    with pg.counters.expect(replays=0, **{"fallbacks:nested_forward": 2}):
        pool.capture_call(lambda: fast(x), device=device)()


def test_call_that_nobody_holds_is_freed_before_its_pool(device: torch.device) -> None:
    pool, total = pg.GraphPool(), torch.zeros(2, device=device)
    call = weakref.ref(pool.capture_call(lambda: total.add_(1.0), device=device))
    gc.collect()
    assert call() is None
    pool.release()


@pytest.mark.gpu
class TestOnTheGpu:
    def test_inside_of_another_capture_is_refused(self) -> None:
        pool, x = pg.GraphPool(), torch.zeros(2, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            x.add_(1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                x.add_(1)
                with pytest.raises(GraphPoolError, match="while the current stream is capturing"):
                    pool.capture_call(lambda: x.add_(1), device="cuda")

    def test_replay_is_ordered_with_the_stream_of_the_caller(self) -> None:
        x, y = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
        replay = pg.GraphPool().capture_call(lambda: y.copy_(x), device="cuda")
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                for value in range(20):
                    x.fill_(value)
                    replay()
                    found = y.sum()
                assert int(found.item()) == 19 << 20


def test_replay_inside_of_a_forward_of_its_pool_is_refused(device: torch.device) -> None:
    """It would overwrite what the forward has computed so far."""
    pool, total = pg.GraphPool(), torch.zeros(2, device=device)
    replay = pool.capture_call(lambda: total.add_(1.0), device=device, name="sampling")
    with pool.using(), pytest.raises(GraphPoolError, match=r"(?s)sampling was called.*between forwards"):
        replay()
    replay()
    assert total.tolist() == [2.0, 2.0]  # the warm-up and the last one
