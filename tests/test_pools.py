"""Graph pools are shared, released, rebuilt, and freed with their models."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from internals import no_memory_for_input, state, tape, traces
from torch import Tensor
from toys import (
    HOOK,
    Blocks,
    assert_same,
    centred,
    compiled,
    new_pool,
    ops,
    rows,
)

import piecewise_graph as pg
from piecewise_graph.errors import GraphPoolError, InputError
from piecewise_graph.sizes import ShapeMiss

pytestmark = pytest.mark.usefixtures("no_grad")


# --- pools --------------------------------------------------------------------------------------------


def test_two_models_of_one_pool_interleaved_stay_right(device: torch.device) -> None:
    pool = new_pool()
    models = [Blocks(2).to(device), Blocks(3).to(device)]
    fast = [compiled(model, pool=pool) for model in models]
    kept = []
    for count in (3, 8, 3, 8, 4, 6, 3):
        for model, call in zip(models, fast, strict=True):
            x = rows(count, device)
            kept.append((call(x), model(x)))
    for found, wanted in kept:
        assert_same(found, wanted)


def test_two_engines_one_torn_down_leaves_the_other_right(device: torch.device) -> None:
    pool = new_pool()
    stays, goes = Blocks(2).to(device), Blocks(3).to(device)
    fast, doomed = compiled(stays, pool=pool), compiled(goes, pool=pool)
    x = rows(3, device)
    for call in (fast, doomed, fast, doomed):
        call(x)
    del doomed, goes
    gc.collect()
    with pg.counters.expect(replays=1, tapes=0):
        assert_same(fast(x), stays(x))


def test_release_of_one_pool_leaves_other_pools_alone(device: torch.device) -> None:
    pools = [new_pool(), new_pool()]
    model = Blocks().to(device)
    fast = [compiled(model, pool=pool) for pool in pools]
    x = rows(3, device)
    for call in fast:
        call(x)
    pools[0].release()
    with pg.counters.expect(replays=1, tapes=1):
        assert_same(fast[0](x), model(x))  # captures again
        assert_same(fast[1](x), model(x))  # replays


def test_release_gives_everything_back_and_the_pool_can_be_used_again(
    model: Blocks, device: torch.device
) -> None:
    pool = new_pool()
    fast = compiled(model, pool=pool)
    x = rows(3, device)
    fast(x), fast(x)
    pool.release()
    assert pool.device is None
    assert pool.bytes() == 0
    assert pg.explain(fast).traces[0].buckets == ()
    assert pg.explain(fast).buffer_bytes == 0
    with pg.counters.expect(traces=0, compiles=0, tapes=1, replays=1):
        assert_same(fast(x), model(x))
        assert_same(fast(x), model(x))


def test_release_after_pg_capture_runs_compiled(model: Blocks, device: torch.device) -> None:
    """pg.capture sealed the model: nothing is captured lazily."""
    pool = new_pool()
    fast = compiled(model, pool=pool, capture="explicit")
    pg.capture(fast, lambda n: rows(n, device), progress=False)
    pool.release()
    with pg.counters.expect(tapes=0, **{"fallbacks:not_captured": 1}):
        fast(rows(3, device))


def test_release_twice_and_of_an_unused_pool_is_harmless() -> None:
    pool = pg.GraphPool()
    pool.release()
    pool.release()
    assert pool.bytes() == 0


@pytest.mark.parametrize("warm", [0, 1], ids=["while capturing", "while replaying"])
def test_release_inside_a_forward_is_refused(warm: int, device: torch.device) -> None:
    pool = new_pool()
    model = torch.ops.toy.call_back
    fast = compiled(lambda x: model(x * 2) + 1, pool=pool)
    x = rows(3, device)
    HOOK[0] = lambda x: x + 0
    for _ in range(warm):
        fast(x)

    def release(x: Tensor) -> Tensor:
        pool.release()
        return x + 0

    HOOK[0] = release
    with pytest.raises(GraphPoolError, match="between forwards"):
        fast(x)
    HOOK[0] = lambda x: x + 0
    for _ in range(2):
        assert_same(fast(x), x * 2 + 1)


@pytest.mark.gpu
def test_memory_that_a_late_stream_still_fills_is_given_to_nobody(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool's first capture fills memory on a stream of its own, and a busy GPU does so later."""
    pool, owner = pg.GraphPool(), torch.nn.Module()
    torch.full((1,), 7.0, device=device), torch.zeros(1, device=device)  # loads what fills memory
    torch.cuda.synchronize()
    for stream in [torch.cuda.Stream() for _ in range(32)]:  # as many as torch has
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        pool.join(device, owner)
    given = [torch.full((1,), 7.0, device=device) for _ in range(8)]
    torch.cuda.synchronize()
    assert [tensor.item() for tensor in given] == [7.0] * 8


@pytest.mark.gpu
def test_pool_of_a_gpu_is_left_alone_by_a_model_on_the_cpu(device: torch.device) -> None:
    pool = pg.GraphPool()
    compiled(Blocks().to(device), pool=pool)(rows(3, device))
    serving, model, x = pool.device, Blocks(), rows(3, torch.device("cpu"))
    assert_same(compiled(model, pool=pool)(x), model(x))
    assert pool.device == serving
    with pytest.raises(GraphPoolError, match=r"(?s)cuda.*cpu"):
        pool.capture_call(lambda: None, device="cpu")


def test_pool_joined_by_two_devices_is_refused() -> None:
    class Owner:
        def drop_graphs(self) -> None: ...

    owner, pool = Owner(), pg.GraphPool()
    pool.join(torch.device("cpu"), owner)
    with pytest.raises(GraphPoolError, match=r"(?s)cpu.*meta"):
        pool.join(torch.device("meta"), owner)


@pytest.mark.gpu
def test_graphs_of_smaller_buckets_reuse_the_memory_of_the_largest(device: torch.device) -> None:
    model = Blocks(4, width=512).to(device)
    sizes = [64, 128, 256, 512]
    fast = compiled(model, capture_sizes=sizes, max_tokens=512)
    report = pg.capture(fast, lambda n: rows(n, device, 512), progress=False)
    assert [bucket.graph_bytes for bucket in report.captured[1:]] == [0, 0, 0]


# --- lifetimes ----------------------------------------------------------------------------------------


def test_deleted_model_frees_its_graphs(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    fast(rows(3, device))
    recorded = weakref.ref(tape(fast, 4))
    del fast
    gc.collect()
    assert recorded() is None


def test_deleted_model_and_weights_are_collected(device: torch.device) -> None:
    model = Blocks().to(device)
    fast = compiled(model)
    fast(rows(3, device))
    weight = weakref.ref(model.linears[0].weight)
    shared = weakref.ref(state(fast))
    del fast, model
    torch._dynamo.reset()
    gc.collect()
    assert weight() is None
    assert shared() is None


def live_tensors() -> tuple[int, int]:
    """Count (Python tensors, bytes of device memory) that are alive.

    `isinstance` would ask every object for its class, and lazy modules import themselves then: seconds.
    """
    gc.collect()
    count = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    return count, torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


@pytest.mark.filterwarnings("ignore")  # looking at every object wakes deprecated ones
def test_release_and_rebuild_does_not_leak(device: torch.device) -> None:
    pool = new_pool()
    fast = compiled(Blocks(2, width=64).to(device), pool=pool)
    x = rows(8, device, 64)
    seen = []
    for _ in range(4):
        fast(x), fast(x)
        pool.release()
        seen.append(live_tensors())
    assert seen[-1] == seen[1]


def test_rebuilt_models_do_not_pile_up(device: torch.device) -> None:
    made: list[Any] = []
    for _ in range(5):
        fast = compiled(Blocks().to(device))
        fast(rows(3, device))
        made += [weakref.ref(one) for one in traces(fast)]
        del fast
        torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in made] == [None] * 5


def test_static_inputs_that_did_not_fit_are_allocated_by_a_later_call(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled(lambda x, y: ops.mix(x + y) * 2, token_dim={"x": 0, "y": 0})
    no_memory_for_input(monkeypatch, 1)
    x, y = rows(8, device), rows(8, device)
    expected = centred(x + y) * 2
    assert_same(fast(x, y), expected)  # the bucket of 8 fails, and the call has its answer
    with pg.counters.expect(tapes=1, failed_captures=0):
        for _ in range(2):
            assert_same(fast(x[:3], y[:3]), centred(x[:3] + y[:3]) * 2)


def test_miss_inside_of_a_forward_is_not_answered_by_another_trace(
    device: torch.device,
) -> None:
    """The splitting op has run: a second trace would run it again."""
    ran: list[int] = []

    def refuse(x: Tensor) -> Tensor:
        ran.append(x.shape[0])
        raise ShapeMiss("another model's input", sizes_differ=False)

    fast = compiled(lambda x: ops.call_back(x * 2) + 1)
    fast(rows(4, device))
    HOOK[0] = refuse
    try:
        with pytest.raises(InputError, match="another model's input"):
            fast(rows(4, device))
    finally:
        HOOK[0] = lambda x: x
    assert ran == [4]
