"""Requests of an engine: prompts in chunks, slots and pages, callbacks, aborts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from eagle_cases import (
    QUICK,
    all_free,
    one_state_for_all_tests,
    prefill,
    small_prompts,
)
from eagle_engine_cases import CHAIN, HOW, LENGTH, LOOKAHEAD, PLAIN, lone, make, run
from torch.utils._python_dispatch import TorchDispatchMode

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import implementations
from piecewise_graph.eagle import DraftShape, Request, Speculator, SpeculatorError
from piecewise_graph.eagle.rounds.prefill import Piece
from piecewise_graph.eagle.rounds.round_launch import Launch
from piecewise_graph.eagle.serving.pace import Pace, Timed
from piecewise_graph.errors import PiecewiseError


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


# Prompts in chunks, beside rounds.

ROWS = 16  # of a chunk


def chunked(shape: DraftShape) -> Speculator:
    """Its rounds are graphs, and prompts run through tapes of at most `ROWS` rows; all captured."""
    loop = make(
        shapes=[shape], prefill_rows=ROWS, batch_sizes=[1, 2], max_requests=2,
        graphs={"prefill": "piecewise"}, **QUICK,
    )  # fmt: skip
    loop.prepare()
    return loop


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=str)
def test_prompts_share_the_forwards_of_rounds(
    shape: DraftShape, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One forward of the target and its head per step, of a round and a whole chunk; one of the draft.

    Attention of both is one call, or one of each.
    """
    monkeypatch.setattr(Pace, "begin", lambda *_: Timed(True))
    monkeypatch.setattr(implementations, "served_apart", lambda batch, _: apart and bool(batch.parts))
    length, loop = 30, chunked(shape)
    engine = loop.engine(overlap=True)
    first = engine.add_request(small_prompts([3])[0], max_new_tokens=30)
    for _ in range(2):
        engine.step()
    second = engine.add_request(small_prompts([length], 1)[0], max_new_tokens=4)
    before = len(first.tokens)
    steps = -(-length // ROWS)
    models = 3 if shape.steps else 2
    with pg.counters.expect(replays=steps * models, captures=0, tapes=0):
        for _ in range(steps):
            engine.step()
    assert second in engine.running
    assert len(first.tokens) > before  # it went on meanwhile
    run(engine)
    for request in (first, second):
        assert request.tokens == lone(request, shape)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("alone", [True, False])
def test_prompts_go_the_faster_way(alone: bool, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, they leave rounds whole graphs. Either way a step takes all rows of a batch of prompts."""
    length, loop = 30, chunked(CHAIN)
    monkeypatch.setattr(Launch, "has_arrived", alone)
    monkeypatch.setattr(Pace, "begin", lambda *_: Timed(not alone))
    engine = loop.engine(overlap=overlap)
    first = engine.add_request(small_prompts([3])[0], max_new_tokens=30)
    for _ in range(2):
        engine.step()
    second = engine.add_request(small_prompts([length], 1)[0], max_new_tokens=4)
    steps = -(-length // ROWS)
    graphs = 3 if alone else 1  # the draft proposes before prompts join
    asked = 1 if alone else steps  # the head runs where a prompt ends, and with each round
    with pg.counters.expect(replays=steps * 2 + asked, phase_replays=steps * graphs, captures=0):
        for _ in range(steps):
            engine.step()
    assert second in engine.running
    run(engine)
    for request in (first, second):
        assert request.tokens == lone(request, CHAIN)


class Ops(TorchDispatchMode):
    """Counts the ops that run; views cost the device nothing."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not op.is_view
        return op(*args, **(kwargs or {}))


def test_prompts_are_sent_by_few_ops_however_many_come_together(loop: Speculator) -> None:
    counted = []
    for requests in (1, 4):
        engine = loop.engine(shape=CHAIN, overlap=False)
        added = [engine.add_request(prompt, max_new_tokens=9) for prompt in small_prompts([5] * requests)]
        engine.step()
        with torch.no_grad(), Ops() as ops:
            prefill(loop).send_state(added)
            prefill(loop).lay_out([Piece(request, 0, 5) for request in added])
        counted.append(ops.count)
        engine.close()
    assert counted[0] == counted[1] <= 8


def test_long_prompt_does_not_hold_up_those_that_run(loop: Speculator) -> None:
    engine = make(prefill_rows=16).engine(shape=PLAIN, overlap=False)
    first = engine.add_request(small_prompts([2])[0], max_new_tokens=20)
    engine.step()
    second = engine.add_request(small_prompts([30], 1)[0], max_new_tokens=3)
    while not second.tokens:
        before = len(first.tokens)
        engine.step()
        assert len(first.tokens) == before + 1
    run(engine)


# Slots, pages and preemption.


def test_first_come_first_served(loop: Speculator) -> None:
    engine = loop.engine(overlap=True)
    rng, came = random.Random(1), list[int]()

    def hear(request: Request, _: list[int]) -> None:
        if request.index not in came:
            came.append(request.index)

    for index in range(12):
        [prompt] = small_prompts([rng.randint(1, 9)], index)
        engine.add_request(prompt, max_new_tokens=rng.randint(1, 9), on_tokens=hear)
    run(engine)
    assert came == sorted(came)
    assert len(came) == 12


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_youngest_request_is_preempted_and_goes_on_later(page_size: int, overlap: bool) -> None:
    """Pages for one and a half: the second is computed again, its tokens are not chosen again."""
    shape = CHAIN
    needed = -(-(LENGTH + shape.lookahead) // page_size)
    loop = make(shapes=[shape], page_size=page_size, num_pages=1 + needed + needed // 2)
    engine = loop.engine(overlap=overlap)
    streamed: dict[int, list[int]] = {}

    def hear(request: Request, tokens: list[int]) -> None:
        streamed.setdefault(request.index, []).extend(tokens)

    asked = [(prompt, how) for prompt, how in zip(small_prompts([4] * 3), HOW, strict=True)]
    requests = [
        engine.add_request(prompt, max_new_tokens=LENGTH - 4, sampling=how, on_tokens=hear)
        for prompt, how in asked
    ]
    run(engine)
    assert engine.preemptions > 0
    for request in requests:
        assert request.tokens == lone(request, shape) == streamed[request.index]
        assert request.counts.num_tokens == LENGTH - 5 or request.counts.num_tokens >= LENGTH - 5
    assert all_free(loop)


def test_request_that_never_fits_is_refused_when_it_comes(loop: Speculator) -> None:
    small = make(num_pages=20 + LOOKAHEAD)
    engine = small.engine()
    fine = engine.add_request([1, 2, 3], max_new_tokens=5)
    with pytest.raises(PiecewiseError, match=r"a request of .* needs .* pages of 1 tokens; the cache has"):
        engine.add_request([1] * 10, max_new_tokens=20)
    with pytest.raises(PiecewiseError, match="its prompt is empty"):
        engine.add_request([])
    run(engine)
    assert fine.tokens == lone(fine, CHAIN)


# Callers.


@pytest.mark.parametrize("overlap", [True, False])
def test_rewound_request_is_heard_again_and_finishes(loop: Speculator, overlap: bool) -> None:
    engine, heard = loop.engine(overlap=overlap), list[int]()
    [prompt] = small_prompts([12])
    request = engine.add_request(prompt, max_new_tokens=10, on_tokens=lambda _, new: heard.extend(new))
    while len(request.tokens) < 3:
        engine.step()
    first = request.tokens[0]
    engine.rewind()
    heard.clear()
    finished = []
    while engine.unfinished:
        finished += engine.step()
    assert finished == [request]
    assert [first, *heard] == request.tokens == lone(request, CHAIN)


def test_callbacks_may_abort_and_add(loop: Speculator) -> None:
    engine = loop.engine(overlap=True)
    added: list[Request] = []

    def hear(request: Request, tokens: list[int]) -> None:
        if len(request.tokens) >= 4 and not request.aborted:
            engine.abort(request)
            added.append(engine.add_request(request.prompt, max_new_tokens=3))

    for prompt in small_prompts([4, 6]):
        engine.add_request(prompt, max_new_tokens=20, on_tokens=hear)
    run(engine)
    assert len(added) == 2
    assert all(request.tokens == lone(request, CHAIN) for request in added)
    assert all_free(loop)


@pytest.mark.parametrize("overlap", [True, False])
def test_callback_that_raises_loses_nothing(loop: Speculator, overlap: bool) -> None:
    engine = loop.engine(overlap=overlap)
    heard: dict[int, list[int]] = {0: [], 1: []}

    def hear(request: Request, tokens: list[int]) -> None:
        heard[request.index] += tokens
        if request.index == 0 and len(request.tokens) > 3:
            raise RuntimeError("the caller's own")

    requests = [
        engine.add_request(prompt, max_new_tokens=12, on_tokens=hear) for prompt in small_prompts([4, 6])
    ]
    raised, returned = 0, list[Request]()
    while engine.unfinished:
        try:
            returned += engine.step()
        except RuntimeError:
            raised += 1
    returned += engine.step()  # what the last exception kept back
    assert raised and sorted(request.index for request in returned) == [0, 1]
    for request in requests:
        assert request.tokens == lone(request, CHAIN) == heard[request.index]


def test_aborted_request_keeps_its_tokens_and_gets_no_more(loop: Speculator) -> None:
    engine = loop.engine(overlap=True)
    requests = [engine.add_request(p, max_new_tokens=20) for p in small_prompts([3, 5, 20, 2, 6])]
    for _ in range(4):
        engine.step()
    tokens = [list(request.tokens) for request in requests]
    for request in requests[1:]:
        engine.abort(request)
    engine.abort(requests[1])  # again: nothing happens
    run(engine)
    assert [request.tokens for request in requests[1:]] == tokens[1:]
    assert requests[0].tokens == lone(requests[0], CHAIN)
    assert all_free(loop)


@pytest.mark.parametrize("overlap", [True, False])
def test_request_aborted_by_anothers_callback_is_not_returned(loop: Speculator, overlap: bool) -> None:
    """Both have news in the same step; the second is aborted while the first is told."""
    engine = loop.engine(overlap=overlap)
    prompts, others = small_prompts([4, 4]), list[Request]()
    first = engine.add_request(prompts[0], max_new_tokens=8, on_tokens=lambda *_: engine.abort(others[0]))
    others.append(engine.add_request(prompts[1], max_new_tokens=8))
    returned = []
    while engine.unfinished:
        returned += engine.step()
    assert returned == [first]
    assert others[0].aborted and first.tokens == lone(first, CHAIN)
    assert all_free(loop)


def test_request_aborted_before_its_prompt_is_read_gets_no_token(loop: Speculator) -> None:
    """With overlap the host reads a step late: the first token is under way when the request ends."""
    engine, heard = loop.engine(overlap=True), list[int]()
    prompts = small_prompts([4, 6])
    stays = engine.add_request(prompts[0], max_new_tokens=6)
    goes = engine.add_request(prompts[1], max_new_tokens=6, on_tokens=lambda _, new: heard.extend(new))
    engine.step()
    assert goes in engine.running and not goes.tokens
    engine.abort(goes)
    run(engine)
    assert goes.tokens == heard == []
    assert stays.tokens == lone(stays, CHAIN)


def test_one_engine_at_a_time_has_requests(loop: Speculator) -> None:
    """Slots are not told apart by who opened them."""
    first, second = loop.engine(), loop.engine()
    mine = first.add_request([1, 2, 3], max_new_tokens=5)
    with pytest.raises(SpeculatorError, match="another engine of this speculator has 1 unfinished requests"):
        second.add_request([1, 2], max_new_tokens=5)
    with pytest.raises(SpeculatorError, match="request 0 is none of this engine's"):
        second.abort(mine)
    run(first)
    assert mine.tokens == lone(mine, CHAIN)
    other = second.add_request([1, 2], max_new_tokens=5)
    run(second)
    assert other.tokens == lone(other, CHAIN)
