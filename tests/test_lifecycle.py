"""Build, capture, release and tear down, a thousand times: nothing grows, and other engines stay right."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from internals import after_capture, state
from torch import Tensor, nn
from toys import WIDTH, Blocks, assert_same, compiled, new_pool, ops, rows

import piecewise_graph as pg

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings("ignore"),  # looking at every object wakes deprecated ones
]

MIB = 2**20
MANY = 300 if torch.cuda.is_available() else 120


@dataclass(frozen=True)
class Held:
    """What is alive: all objects, objects of this library, tensors with memory, and device bytes."""

    objects: int
    ours: int
    tensors: int
    allocated: int
    reserved: int


def held() -> Held:
    gc.collect()
    objects = gc.get_objects()
    ours = sum(type(thing).__module__.startswith("piecewise_graph") for thing in objects)
    tensors = sum(issubclass(kind, Tensor) and kind.__name__ != "FakeTensor" for kind in map(type, objects))
    device = (0, 0)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        device = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return Held(len(objects), ours, tensors, *device)


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs Linux to tell the size of the process")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def old_objects_aside() -> Iterator[None]:
    """Keep old objects out of garbage collections: the library collects before each capture on a GPU."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def assert_no_growth(
    cycle: Callable[[], None],
    cycles: int,
    *,
    objects: int,
    resident: int,
    below_us: Callable[[], int] = lambda: 0,
) -> None:
    """Assert as many device bytes, tensors and objects of ours after `cycles` as after a tenth of them.

    Args:
        objects: how many other objects may be left over.
        resident: bytes by which the process may grow.
        below_us: returns the bytes by which it may grow besides. It is asked after the cycles: they have used
            up what earlier tests gave back to the process, so that all that is kept makes the process larger.
    """
    with old_objects_aside():
        for _ in range(cycles // 10):
            cycle()
        before, size = held(), resident_bytes()
        for _ in range(cycles - cycles // 10):
            cycle()
        after = held()
        assert (after.ours, after.tensors) == (before.ours, before.tensors)
        assert (after.allocated, after.reserved) == (before.allocated, before.reserved)
        assert after.objects - before.objects <= objects
        grown = resident_bytes() - size
    assert grown <= resident or grown <= resident + below_us()


def left_by_bare_graphs(device: torch.device, graphs: int, cycles: int) -> int:
    """Bytes of resident memory that torch and the driver keep of freed graphs; 0 on a CPU.

    On an H200 (torch 2.11, driver 580) a cycle of seven bare graphs leaves 48.8 KB. Six of the library's, and
    the one that keeps its pool alive, leave 48.9 KB.
    """
    if device.type != "cuda":
        return 0
    x, stream, measured = torch.zeros(64, device=device), torch.cuda.Stream(), 100

    def cycle() -> None:
        pool, held = torch.cuda.MemPool(), []
        with torch.cuda.stream(stream):
            for _ in range(graphs):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool.id, capture_error_mode="thread_local")
                held.append((graph, x + 1))
                graph.capture_end()
            for graph, _ in held:
                graph.replay()
        torch.cuda.synchronize()
        held.clear()
        del graph, pool
        gc.collect()
        torch.cuda.empty_cache()

    with old_objects_aside():
        for _ in range(10):
            cycle()
        before = resident_bytes()
        for _ in range(measured):
            cycle()
        return (resident_bytes() - before) * cycles // measured


# --- cycles -------------------------------------------------------------------------------------------


def test_1000_captures_and_releases_leave_nothing(device: torch.device) -> None:
    cycles, sizes = 1000, 2
    pool = pg.GraphPool()
    fast = compiled(Blocks(2).to(device), pool=pool)
    batches = [rows(count, device) for count in (8, 3, 3)]

    def cycle() -> None:
        for x in batches:
            fast(x)
        pool.release()

    def below_us() -> int:
        return left_by_bare_graphs(device, graphs=3 * sizes + 1, cycles=cycles)

    with pg.counters.expect(tapes=cycles * sizes, replays=cycles, compiles=3, failed_captures=0, fallbacks=0):
        assert_no_growth(cycle, cycles, objects=50, resident=16 * MIB, below_us=below_us)
    assert pool.bytes() == pg.explain(fast).buffer_bytes == 0


def test_plans_and_captures_beforehand_leave_nothing(device: torch.device) -> None:
    cycles = 40
    pool = pg.GraphPool()
    fast = compiled(Blocks(2).to(device), pool=pool, max_graph_bytes=2**40, capture="explicit")
    fast(rows(3, device))

    def cycle() -> None:
        pg.plan(fast)
        pg.capture(fast, lambda n: rows(n, device), progress=False)
        fast(rows(3, device))
        pool.release()

    with pg.counters.expect(replays=cycles):
        assert_no_growth(cycle, cycles, objects=50, resident=16 * MIB)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return ops.mix(x * self.weight) + 1


@pytest.mark.parametrize(
    ("cycles", "shared"),
    [
        pytest.param(50, False, id="50, a pool each"),
        pytest.param(50, True, id="50, one pool"),
        pytest.param(MANY, False, id="many, a pool each", marks=pytest.mark.slow),
    ],
)
def test_models_are_built_and_dropped_without_growth(cycles: int, shared: bool, device: torch.device) -> None:
    """Torch keeps up to 500 objects (100 KB) of each trace, behind the sizes in its cache of fake tensors.

    It does so with backend="eager" too.
    """
    x = rows(3, device)
    one_pool = pg.GraphPool() if shared else None

    def cycle() -> None:
        pool = one_pool or pg.GraphPool()
        fast = compiled(Tiny().to(device), pool=pool, capture_sizes=[4], max_tokens=4)
        fast(x), fast(x)
        del fast
        torch._dynamo.reset()
        pool.release()

    with pg.counters.expect(traces=cycles, tapes=cycles, replays=cycles, fallbacks=0):
        assert_no_growth(cycle, cycles, objects=600 * cycles, resident=16 * MIB + cycles * 256 * 2**10)


def test_failed_captures_leave_nothing(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs captured before the failure are freed, and so is what the error's traceback holds."""

    def fail_at_the_third(outputs: Sequence[Tensor]) -> None:
        captured.append(weakref.ref(outputs[0]))
        if len(captured) == 3:  # of a bucket's three segments the last one
            raise torch.OutOfMemoryError("wanted 12 GiB")

    captured: list[weakref.ref[Tensor]] = []
    after_capture(monkeypatch, fail_at_the_third)
    pool = pg.GraphPool()
    fast = compiled(Blocks(2).to(device), pool=pool, capture_sizes=[4], max_tokens=4)
    x = rows(3, device)

    def cycle() -> None:
        captured.clear()
        fast(x)
        assert [ref() for ref in captured] == [None] * 3
        pool.release()

    with pg.counters.expect(tapes=0, failed_captures=100):
        assert_no_growth(cycle, 100, objects=50, resident=16 * MIB)


# --- two engines --------------------------------------------------------------------------------------

TEARDOWNS = ("deleted", "released", "dynamo reset", "reset", "all of it")


class Engine:
    """A model, its compiled model and its frozen call, compared with eager."""

    def __init__(self, layers: int, pool: pg.GraphPool, device: torch.device) -> None:
        self.model, self.pool, self.device = Blocks(layers).to(device), pool, device
        self.fast = compiled(self.model, pool=pool)
        self.frozen = pg.freeze(self.fast, rows(3, device))

    def serve(self) -> list[tuple[Tensor, Tensor]]:
        """Collect (found, wanted) of every path at several counts."""
        pairs = []
        for count in (8, 3, 3, 1, 6, 9, 8):
            x = rows(count, self.device)
            pairs += [(self.fast(x), self.model(x)), (self.frozen(x), self.model(x))]
        return pairs

    def check(self) -> None:
        for found, wanted in self.serve():
            assert_same(found, wanted)


def tear_down(engines: list[Engine], how: str) -> None:
    """Tear down the first engine of the list, which holds the only reference."""
    goes = engines.pop(0)
    pool, gone = goes.pool, weakref.ref(goes.fast)
    if how in ("deleted", "all of it"):
        del goes
        gc.collect()
        assert gone() is None
    if how in ("dynamo reset", "all of it"):
        torch._dynamo.reset()
    if how == "reset":
        pg.reset()
    if how in ("released", "all of it"):
        pool.release()


@pytest.mark.parametrize("shared", [False, True], ids=["pool each", "one pool"])
@pytest.mark.parametrize("how", TEARDOWNS)
def test_one_of_two_engines_goes_and_the_other_is_still_right(
    how: str, shared: bool, device: torch.device
) -> None:
    pools = [new_pool()] * 2 if shared else [new_pool(), new_pool()]
    engines = [Engine(layers, pool, device) for layers, pool in zip((3, 2), pools, strict=True)]
    stays = engines[1]
    kept = [pair for engine in engines for pair in engine.serve()]
    tear_down(engines, how)
    untouched = how == "deleted" or (how == "released" and not shared)
    with pg.counters.expect(**({"tapes": 0, "failed_captures": 0} if untouched else {"failed_captures": 0})):
        stays.check()
    third = Engine(1, pools[0], device)
    for engine in (third, stays, third, stays):
        engine.check()
    for found, wanted in kept:  # what callers hold from before
        assert_same(found, wanted)
    assert pg.explain(stays.fast).pool_bytes == stays.pool.bytes() > 0


@pytest.mark.parametrize("shared", [False, True], ids=["pool each", "one pool"])
def test_engine_that_stays_keeps_what_it_had(shared: bool, device: torch.device) -> None:
    """Its graphs stay; where pools are separate, the memory of the other engine is freed."""
    pools = [new_pool()] * 2 if shared else [new_pool(), new_pool()]
    engines = [Engine(layers, pool, device) for layers, pool in zip((3, 2), pools, strict=True)]
    for engine in engines:
        engine.check()
    stays, before = engines[1], pools[0].bytes()
    tear_down(engines, "deleted")
    if device.type == "cpu":
        assert pools[0].bytes() < before
        assert shared or pools[0].bytes() == 0
    if not shared:
        pools[0].release()
        assert pools[0].bytes() == 0
    with pg.counters.expect(tapes=0):
        stays.check()


def test_models_of_one_class_that_died_leave_no_state_behind(device: torch.device) -> None:
    """Dynamo's trace of the class lives on, with the latest model."""
    states = []
    for _ in range(4):
        model = Blocks().to(device)
        fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "max_tokens": 8})
        for count in (3, 4, 5, 4):
            fast(rows(count, device))
        states.append(weakref.ref(state(fast)))
        del fast, model
        gc.collect()
    assert [ref() for ref in states] == [None] * 4
