"""Exceptions that end a step of the engine: no token, slot or page is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from eagle_cases import (
    all_free,
    one_state_for_all_tests,
    resources,
    scheduler,
    small_prompts,
)
from eagle_engine_cases import CHAIN, PLAIN, SHAPES, lone, make, run

from piecewise_graph.eagle import DraftShape, Request, Speculator, SpeculatorError
from piecewise_graph.eagle.rounds.round_launch import Launch


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def eager() -> Speculator:
    return make()


@pytest.fixture
def loop(eager: Speculator) -> Iterator[Speculator]:
    yield eager
    eager.close()  # whatever a failed test has left


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("where", ["wait", "__init__", "accepted", "first_tokens"])
def test_interrupted_steps_are_gone_on_from(
    loop: Speculator, monkeypatch: pytest.MonkeyPatch, shape: DraftShape, where: str, overlap: bool
) -> None:
    """Every few steps, at a place where a step spends its time."""
    engine = loop.engine(shape=shape, overlap=overlap)
    requests = [engine.add_request(p, max_new_tokens=14) for p in small_prompts([5, 9, 2, 7, 3])]
    original, calls = getattr(Launch, where), 0

    def sometimes(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(*args, **named)
        if calls % 4 == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Launch, where, sometimes)
    for _ in range(500):
        if not engine.unfinished:
            break
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    assert calls >= 4
    monkeypatch.undo()
    assert [request.tokens for request in requests] == [lone(request, shape) for request in requests]
    assert all_free(loop)


def test_interrupt_while_a_finished_request_is_released(
    loop: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known to be finished by then, and nobody else would ever release it."""
    [prompt] = small_prompts([6])
    engine = loop.engine(shape=PLAIN, overlap=True)
    request = engine.add_request(prompt, max_new_tokens=9)
    release, interrupted = scheduler(engine).release, []

    def interrupts_once(request: Request) -> None:
        if not interrupted:
            interrupted.append(request)
            raise KeyboardInterrupt
        release(request)

    monkeypatch.setattr(scheduler(engine), "release", interrupts_once)
    finished = []
    for _ in range(60):
        try:
            finished += engine.step()
        except KeyboardInterrupt:
            continue
    assert interrupted == finished == [request]
    assert request.tokens == lone(request, PLAIN)
    assert all_free(loop)


def test_interrupt_while_a_request_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot is open by then; without it nobody could be let in any more."""
    loop = make(max_requests=1)
    engine = loop.engine(shape=PLAIN)
    request = engine.add_request(small_prompts([6])[0], max_new_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler(engine).table, "reserve", lambda tokens: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    run(engine)
    assert request.tokens == lone(request, PLAIN)
    assert all_free(loop)


def test_engine_whose_step_failed_leaves_the_next_one_alone(
    loop: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to put its own state right once; not when slots and pages are another's."""
    first, second = loop.engine(overlap=True), loop.engine(overlap=True)
    lost = first.add_request([1, 2, 3], max_new_tokens=9)
    monkeypatch.setattr(Launch, "__init__", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.step()
    monkeypatch.undo()
    first.abort(lost)
    requests = [second.add_request(prompt, max_new_tokens=12) for prompt in small_prompts([5, 9])]
    for _ in range(3):
        second.step()
    with pytest.raises(SpeculatorError, match="another engine of this speculator has 2 unfinished requests"):
        first.step()
    first.close()
    third = small_prompts([7])[0]
    requests.append(second.add_request(third, max_new_tokens=12))
    run(second)
    assert [request.tokens for request in requests] == [lone(request, CHAIN) for request in requests]
    assert all_free(loop)
    again = first.add_request([1, 2, 3], max_new_tokens=9)
    run(first)
    assert again.tokens == lone(again, CHAIN)
    assert all_free(loop)


def test_what_a_failed_step_has_left_is_taken_back_by_the_next_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its slot was open and nobody's: with one slot, nobody else could have been served."""
    loop = make(shapes=[0], max_requests=1, max_seq_len=40)
    first, second = loop.engine(), loop.engine()
    lost = first.add_request([1, 2], max_new_tokens=3)
    monkeypatch.setattr(resources(loop).table, "reserve", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.step()
    monkeypatch.undo()
    first.abort(lost)
    request = second.add_request([1, 2], max_new_tokens=3)
    for _ in range(10):
        second.step()
    assert request.tokens == lone(request, PLAIN)
    assert all_free(loop)
