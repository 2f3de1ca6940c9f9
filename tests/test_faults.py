"""Forks, streams, errors in the middle of a replay: the next call is right, and nothing waits for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full_graph_cases import Setup, calling_back
from internals import caller_captures, follow_streams, pool_of
from torch import Tensor
from toys import HOOK, Blocks, assert_same, compiled, frozen, new_pool, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

CPU = torch.device("cpu")


# --- an error in a splitting op in the middle of a replay --------------------------------------------------


def twice(x: Tensor) -> Tensor:
    """Two ops that tests may make fail, between three segments."""
    return ops.call_back(ops.call_back(x * 2) + 1) * 3


@pytest.fixture
def failing() -> Iterator[Callable[[int, BaseException], None]]:
    """Lets the n-th op call from now on raise an error, and later ones run."""

    def fail(call: int, error: BaseException) -> None:
        left = [call]

        def op(x: Tensor) -> Tensor:
            left[0] -= 1
            if left[0] == 0:
                raise error
            return x + 0

        HOOK[0] = op

    HOOK[0] = lambda x: x + 0
    yield fail
    HOOK[0] = lambda x: x


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError("no free page")])
def test_error_of_an_op_in_the_first_call_is_raised_as_it_is(
    error: BaseException, failing: Callable[[int, BaseException], None]
) -> None:
    fast, x = compiled(twice), rows(3, CPU)
    failing(1, error)
    with pytest.raises(type(error)) as raised:
        fast(x)
    assert raised.value is error
    assert_same(fast(x), twice(x))


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("entry", [compiled, lambda f: frozen(f, CPU)], ids=["call", "frozen"])
def test_call_after_an_error_in_a_replay_is_right(
    entry: Any, call: int, error: BaseException, failing: Callable[[int, BaseException], None]
) -> None:
    device = CPU
    fast = entry(twice)
    for count in (8, 8, 3, 3):
        fast(rows(count, device))
    failing(call, error)
    with pg.counters.expect(replays=0, fallbacks=0, tapes=0), pytest.raises(type(error)):
        fast(rows(5, device) * 1000)
    with pg.counters.expect(replays=4, fallbacks=0, tapes=0):
        for count in (5, 3, 8, 5):
            x = rows(count, device)
            assert_same(fast(x), (x * 2 + 1) * 3)


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_call_after_an_error_in_a_full_replay_is_right(error: BaseException) -> None:
    """On a GPU no op runs in a full replay; the CPU's stand-in stands for a launch that fails."""
    setup = Setup(CPU)
    setup.call(3), setup.call(3)

    def fail(hooks: list[Any]) -> None:
        hooks.clear()
        raise error

    setup.live.fill_(3)
    context = pg.forward_context(live=setup.live, full_graph=True)
    with (
        pg.counters.expect(replays=0, full_replays=0),
        calling_back(fail),
        pytest.raises(type(error)),
        context,
    ):
        setup.fast(rows(3, setup.device))
    with pg.counters.expect(replays=2, full_replays=2, tapes=0, not_full=0):
        setup.call(2), setup.call(3)


def test_pool_is_free_after_an_interrupt(failing: Callable[[int, BaseException], None]) -> None:
    """Another thread gets its turn, and the pool may be released."""
    device, pool = CPU, new_pool()
    fast = compiled(twice, pool=pool)
    fast(rows(3, device)), fast(rows(3, device))
    failing(2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        fast(rows(3, device))
    in_thread(lambda: assert_same(fast(torch.ones(3, 8)), torch.full((3, 8), 9.0)))
    pool.release()


def in_thread(body: Callable[[], None]) -> None:
    """Run `body` in another thread, without gradients; what it raises is raised here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]


# --- threads, streams, a caller's own capture ---------------------------------------------------------------


def test_threads_share_a_pool_between_two_models(device: torch.device) -> None:
    pool = new_pool()
    models = [Blocks(2).to(device), Blocks(3).to(device)]
    fast = [compiled(model, pool=pool) for model in models]
    calls = [*fast, pg.freeze(fast[0], rows(3, device)), pg.freeze(fast[1], rows(3, device))]
    wrong: list[int] = []

    def serve(index: int) -> None:
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            for count in (3, 8, 4, 6, 3) * 8:
                x = rows(count, device)
                if not torch.allclose(calls[index](x), models[index % 2](x), atol=1e-4):
                    wrong.append(index)

    for call in calls:
        for count in (8, 4):
            call(rows(count, device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    with pg.counters.expect(replays=4 * 40, fallbacks=0):
        threads = [threading.Thread(target=serve, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_caller_on_another_stream_waits_for_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams are stand-ins; `waits` lists (who waits, for whom)."""
    pool = new_pool()
    on, waits = follow_streams(monkeypatch, pool)
    for stream in (1, 1, 2, 2, 1, 3, 3):
        with on(stream), pool.using() as nested:
            assert not nested
            with on(9), pool.using():  # inside of a forward nobody new comes
                pass
    assert waits == [(2, 1), (1, 2), (3, 1)]
    with on(4, capturing=True), pool.using():
        pass
    assert len(waits) == 3  # a stream that is captured waits for nothing
    with on(4), pool.using():
        pass
    assert waits[3:] == [(4, 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["call", "frozen"])
def test_calls_on_two_streams_do_not_overwrite_each_other(kind: str) -> None:
    """The device is still busy with the first stream's forward when the second one begins."""
    device = torch.device("cuda")
    model = Blocks(4, width=1024).to(device)
    fast = compiled(model, capture_sizes=[64], max_tokens=64)
    call = pg.freeze(fast, rows(64, device, 1024)) if kind == "frozen" else fast
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream()]
    call(rows(64, device, 1024)), call(rows(64, device, 1024))
    slow = torch.randn(4096, 4096, device=device)
    batches = [rows(64 - i % 5, device, 1024) for i in range(30)]
    wanted = [model(x) for x in batches]
    torch.cuda.synchronize()
    found = []
    for index, x in enumerate(batches):
        with torch.cuda.stream(streams[index % 3]):
            if index % 2:
                slow = torch.mm(slow, slow) * 1e-4
            found.append(call(x))
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["call", "frozen"])
def test_callers_capture_passes_through(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours is replayed or captured there; afterwards replays go on."""
    device, model = CPU, Blocks()
    fast = compiled(model)
    call = pg.freeze(fast, rows(3, device)) if kind == "frozen" else fast
    call(rows(3, device)), call(rows(3, device))
    with (
        caller_captures(monkeypatch),
        pg.counters.expect(replays=0, tapes=0, **{"fallbacks:captured_by_caller": 3}),
    ):
        for count in (3, 8, 4):
            x = rows(count, device)
            assert_same(call(x), model(x))
    with pg.counters.expect(replays=1, fallbacks=0):
        x = rows(3, device)
        assert_same(call(x), model(x))


# --- forks --------------------------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")


def in_child(body: Callable[[], None]) -> int:
    """The exit status of a forked child that ran `body`: 0 fine, 1 an error, -9 it did not end."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the threads of the parent's pool are not here
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    for _ in range(600):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -9


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_goes_on() -> None:
    device, model = CPU, Blocks()
    fast = compiled(model)
    call = pg.freeze(fast, rows(3, device))
    for count in (3, 3, 4):
        fast(rows(count, device)), call(rows(count, device))

    def body() -> None:
        with pg.counters.expect(replays=5, tapes=1):
            for each in (fast, call):
                for count in (3, 4, 8):  # the bucket of 8 is captured in the child
                    x = rows(count, device)
                    assert_same(each(x), model(x))

    assert in_child(body) == 0
    x = rows(3, device)
    assert_same(fast(x), model(x))


@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_process_forked_while_another_thread_is_in_a_forward_goes_on() -> None:
    """That thread is not in the child, and never gives the pool back."""
    device = CPU
    fast = compiled(twice)
    HOOK[0] = lambda x: x + 0
    fast(rows(3, device)), fast(rows(3, device))
    inside, go_on = threading.Event(), threading.Event()

    def wait(x: Tensor) -> Tensor:
        inside.set()
        assert go_on.wait(60)
        return x + 0

    HOOK[0] = wait
    thread = threading.Thread(target=lambda: in_no_grad(fast, device))
    thread.start()
    assert inside.wait(60)

    def body() -> None:
        HOOK[0] = lambda x: x + 0
        for _ in range(3):
            x = rows(3, device)
            assert_same(fast(x), (x * 2 + 1) * 3)
        pool_of(fast).release()

    try:
        assert in_child(body) == 0
    finally:
        go_on.set()
        thread.join()


def in_no_grad(fast: Any, device: torch.device) -> None:
    with torch.no_grad():
        fast(rows(3, device))


@pytest.mark.gpu
@needs_fork
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_gets_torchs_plain_error_on_a_gpu() -> None:
    device, model = torch.device("cuda"), Blocks().to("cuda")
    fast = compiled(model)
    call, x = pg.freeze(fast, rows(3, device)), rows(3, device)
    fast(x), call(x), call(x)

    def body() -> None:
        for each in (fast, call):
            with pytest.raises(RuntimeError):
                each(x)

    assert in_child(body) == 0
    assert_same(fast(x), model(x))
