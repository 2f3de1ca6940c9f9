"""Threads, garbage collector, random state and grad modes of the caller stay as they were."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from internals import fail_capture
from torch import Tensor
from toys import (
    WIDTH,
    Blocks,
    assert_same,
    compiled,
    rows,
)

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def test_two_threads_call_one_model(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for count in (4, 8):
        fast(rows(count, device))
    work = {t: [rows(count, device) for count in (3, 8, 4, 6) * 10] for t in range(2)}
    wanted = {t: [model(x) for x in xs] for t, xs in work.items()}
    found: dict[int, list[Tensor]] = {0: [], 1: []}
    errors: list[BaseException] = []

    def serve(t: int) -> None:
        try:
            with torch.no_grad():
                for x in work[t]:
                    found[t].append(fast(x))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(t,)) for t in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for t in work:
        assert_same(found[t], wanted[t])


def test_a_thread_beside_a_capture_captures_nothing(model: Blocks, device: torch.device) -> None:
    fast = compiled(model, capture="explicit", capture_sizes=[4, 8])
    fast(rows(3, device))

    def serve() -> None:
        with torch.no_grad():
            fast(rows(4, device))

    def inputs(size: int) -> Tensor:
        other = threading.Thread(target=serve)
        other.start()
        other.join()
        return rows(size, device)

    pg.capture(fast, inputs, sizes=[8], progress=False)
    assert pg.counters.snapshot()["fallbacks:not_captured"] == 2
    assert pg.counters.snapshot()["tapes"] == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(enabled: bool, model: Blocks, device: torch.device) -> None:
    was = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        fast = compiled(model)
        fast(rows(3, device))
        pg.capture(fast, lambda n: rows(n, device), progress=False)
        assert gc.isenabled() == enabled
    finally:
        gc.enable() if was else gc.disable()


def test_collector_is_on_again_after_a_failed_capture(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, RuntimeError("broken"))
    compiled(model)(rows(3, device))
    assert gc.isenabled()


def test_callers_random_state_is_untouched_by_compile_and_capture(
    model: Blocks, device: torch.device
) -> None:
    x = rows(3, device)
    states = [torch.get_rng_state()]
    if torch.device(device).type == "cuda":
        states.append(torch.cuda.get_rng_state())
    fast = compiled(model)
    for _ in range(3):
        fast(x)
    pg.capture(fast, lambda n: x.new_ones(n, WIDTH), progress=False)
    found = [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state()] if torch.device(device).type == "cuda" else []
    )
    for before, after in zip(states, found, strict=True):
        assert torch.equal(before, after)


def test_grad_and_inference_mode_of_the_caller_stay(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    with torch.inference_mode():
        for _ in range(3):
            fast(rows(3, device))
        assert torch.is_inference_mode_enabled()
    assert not torch.is_grad_enabled()


def test_modes_may_alternate(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        for count in (3, 8):
            with mode():
                x = rows(count, device)
                assert_same(fast(x), model(x))


@pytest.mark.parametrize("dims", ["one", "two"])
def test_writes_reach_an_argument_of_other_strides(dims: str, device: torch.device) -> None:
    """A trace that writes an argument is made anew for other strides."""

    def model(x: Tensor) -> Tensor:
        x.add_(x)
        return x + x

    fast = compiled(model)
    given = [
        torch.randn(9, 8, device=device).repeat_interleave(2, -1)[..., ::2],
        torch.randn(8, 9, device=device).t(),
        torch.randn(9, 16, device=device)[:, :8],
    ]
    for x in given if dims == "two" else given[1:]:
        want, before = model(x.clone()), x.clone()
        torch.testing.assert_close(fast(x), want)
        torch.testing.assert_close(x, before * 2)
