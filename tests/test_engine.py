"""The engine: requests that come and go get the tokens of a lone run, whatever they share batches with."""

from __future__ import annotations

import gc
import random
import resource
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from eagle_cases import (
    CHAINS,
    QUICK,
    TREES,
    VOCABULARY,
    all_free,
    one_state_for_all_tests,
    small_pair,
    small_prompts,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import count_frozen_plans

import piecewise_graph as pg
from piecewise_graph.eagle import DraftShape, Engine, Request, Sampling, Speculator, SpeculatorError
from piecewise_graph.eagle.rounds.results import Result
from piecewise_graph.errors import PiecewiseError

PLAIN, CHAIN, TREE = DraftShape(0), CHAINS[2], TREES[2]
SHAPES = [CHAIN, TREE, PLAIN]
LENGTH = 40  # max_seq_len
ROOM = max(shape.room for shape in SHAPES)
HOW = [Sampling(), Sampling(temperature=20.0, seed=3), Sampling(temperature=9.0, top_k=5, top_p=0.9, seed=4)]


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


def make(**asked: Any) -> Speculator:
    target, _, draft = small_pair("twin")
    options = {"shapes": SHAPES, "max_requests": 4, "max_seq_len": LENGTH, "graphs": "eager"}
    return Speculator(target, draft, **(options | asked))


@pytest.fixture(scope="module")
def eager() -> Speculator:
    return make()


@pytest.fixture
def loop(eager: Speculator) -> Iterator[Speculator]:
    yield eager
    eager.close()  # whatever a failed test has left


@pytest.fixture(scope="module")
def graphs() -> Speculator:
    """Everything captured before the first request."""
    made = make(graphs="full", batch_sizes=[4], **QUICK)
    made.prepare()
    return made


@cache
def _alone() -> Speculator:
    return make(max_requests=1, max_seq_len=LENGTH)


@cache
def _lone_tokens(prompt: tuple[int, ...], how: Sampling, shape: DraftShape, count: int) -> list[int]:
    asked: Any = {"max_new_tokens": count, "sampling": how, "shape": shape, "overlap": False}
    [tokens] = _alone().generate([prompt], **asked)
    return list(tokens)


def lone(request: Request, shape: DraftShape) -> list[int]:
    """What a run of this request alone, in eager mode, gives."""
    how = request.sampling
    count = min(14 if request.max_new_tokens <= 14 else LENGTH, LENGTH - len(request.prompt))
    shape = PLAIN if how.greedy else shape
    tokens = _lone_tokens(request.prompt, how, shape, count)[: request.max_new_tokens]
    ends = [place + 1 for place, token in enumerate(tokens) if token in request.stop]
    return tokens[: min(ends, default=len(tokens))]


def run(engine: Engine, most: int = 2000) -> None:
    for _ in range(most):
        if not engine.unfinished:
            return
        engine.step()
    raise AssertionError(f"{engine.unfinished} requests are unfinished after {most} steps")


# Any schedule.


@st.composite
def schedules(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests with the step in which they come, and the one in which they are aborted, if they are."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    asked = []
    for _ in range(draw(st.integers(1, 9))):
        prompt = rng.choice([1, 2, 7, 12, 20])
        asked.append(
            {
                "arrives": rng.randint(0, 12),
                "prompt": small_prompts([prompt], rng.randint(0, 1))[0],
                "max_new_tokens": rng.randint(1, min(14, LENGTH - prompt)),
                "sampling": rng.choice(HOW),
                "stop": rng.sample(range(VOCABULARY), rng.choice([0, 0, 2, 8])),
                "aborted": rng.choice([None, None, None, rng.randint(0, 20)]),
            }
        )
    return asked


class Watched:
    """A schedule as it runs: what is streamed has to be what the requests hold in the end."""

    def __init__(self, engine: Engine, schedule: Sequence[dict[str, Any]]) -> None:
        self.engine, self.schedule = engine, list(schedule)
        self.requests: list[tuple[dict[str, Any], Request]] = []
        self.streamed: dict[int, list[int]] = {}
        self.finished: list[Request] = []

    def run(self) -> None:
        step = 0
        while self.engine.unfinished or len(self.requests) < len(self.schedule):
            for asked in [each for each in self.schedule if each["arrives"] == step]:
                keys = ("prompt", "max_new_tokens", "sampling", "stop")
                request = self.engine.add_request(**{key: asked[key] for key in keys}, on_tokens=self.hear)
                self.requests.append((asked, request))
            for asked, request in self.requests:
                if asked["aborted"] == step - asked["arrives"]:
                    self.engine.abort(request)
            self.finished += self.engine.step()
            step += 1
            assert step < 2000

    def hear(self, request: Request, tokens: list[int]) -> None:
        assert tokens
        self.streamed.setdefault(request.index, []).extend(tokens)


@settings(max_examples=25)
@given(
    schedules(), st.sampled_from(SHAPES), st.booleans(), st.integers(1, 4), st.integers(0, 60),
    st.sampled_from([1, 7, 24]),
)  # fmt: skip
def test_any_schedule_gives_the_tokens_of_a_lone_run(
    schedule: list[dict[str, Any]], shape: DraftShape, overlap: bool, at_once: int, spare: int, rows: int
) -> None:
    """Arrivals, lengths, stop tokens, aborts and page pressure; prompts in chunks of any size."""
    loop = make(max_requests=at_once, num_pages=1 + LENGTH + ROOM + spare, prefill_rows=rows)
    engine = loop.engine(shape=shape, overlap=overlap)
    watched = Watched(engine, schedule)
    watched.run()
    for asked, request in watched.requests:
        wanted = lone(request, shape)
        if request.aborted:
            assert asked["aborted"] is not None
            assert request.tokens == wanted[: len(request.tokens)]
        else:
            assert request.tokens == wanted
        assert watched.streamed.get(request.index, []) == request.tokens
    done = [request for _, request in watched.requests if not request.aborted]
    assert sorted(r.index for r in watched.finished) == sorted(r.index for r in done)
    assert all_free(loop)


@settings(max_examples=5)
@given(schedules(), st.booleans())
def test_planner_chooses_every_round(schedule: list[dict[str, Any]], overlap: bool) -> None:
    """The draft catches up with plain rounds, results of which may still be under way."""
    greedy = [asked | {"sampling": HOW[0]} for asked in schedule]
    loop = make(prefill_rows=24)
    watched = Watched(loop.engine(shape="auto", overlap=overlap), greedy)
    watched.run()
    for _, request in watched.requests:
        assert request.tokens == lone(request, PLAIN)[: len(request.tokens)]
        assert request.aborted or len(request.tokens) == len(lone(request, PLAIN))
    assert all_free(loop)


# Overlap.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("how", HOW, ids=["greedy", "sampled", "filtered"])
def test_overlap_changes_no_token_and_no_statistics(
    graphs: Speculator, shape: DraftShape, how: Sampling
) -> None:
    prompts, counts = small_prompts([7, 1, 12, 4, 9, 2]), [9, 1, 14, 20, 3, 8]
    asked: Any = {"max_new_tokens": counts, "sampling": how, "shape": shape, "return_stats": True}
    late, late_counts = graphs.generate(prompts, overlap=True, **asked)
    found, counted = graphs.generate(prompts, overlap=False, **asked)
    assert late == found
    assert late_counts == counted
    assert all_free(graphs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_overlap_costs_a_request_one_round_at_most(graphs: Speculator, shape: DraftShape) -> None:
    """None where its length ends it, one where a token does: that is known one round late."""
    [prompt] = small_prompts([6])
    tokens = _lone_tokens(tuple(prompt), HOW[0], PLAIN, 30)
    for count, stop, wasted in ((12, (), (0, 1)), (30, (tokens[8],), (1, 1))):
        rounds = {}
        for overlap in (False, True):
            before = pg.counters.snapshot()["phase_replays"]
            [found] = graphs.generate([prompt], max_new_tokens=count, stop=stop, shape=shape, overlap=overlap)
            assert found == (tokens[:count] if not stop else tokens[: tokens.index(stop[0]) + 1])
            rounds[overlap] = pg.counters.snapshot()["phase_replays"] - before
        phases = 3 if shape.steps else 2
        assert wasted[0] * phases <= rounds[True] - rounds[False] <= wasted[1] * phases
        if shape == PLAIN and not stop:  # each result under way is one token: the end is known beforehand
            assert rounds[True] == rounds[False] == (count - 1) * phases


def test_a_round_is_launched_before_the_result_of_the_one_before_is_read(
    graphs: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    wait, of = Result.wait, Result.of
    monkeypatch.setattr(Result, "has_arrived", False)  # the device is busy
    monkeypatch.setattr(Result, "wait", lambda self: (order.append("read"), wait(self))[1])
    monkeypatch.setattr(Result, "of", lambda *tensors: (order.append("launch"), of(*tensors))[1])
    for overlap in (True, False):
        engine = graphs.engine(shape=PLAIN, overlap=overlap)
        engine.add_request(small_prompts([3])[0], max_new_tokens=5)
        order.clear()
        run(engine)
        one_each = ["launch", "read"] * 5
        assert order == (["launch", *["launch", "read"] * 4, "read"] if overlap else one_each)


def test_the_round_too_many_of_a_tree_keeps_no_page() -> None:
    """It runs past the pages of a finished request: its commit must not move one where nobody takes it back.

    The next request in that row would write there, into a page of its neighbour.
    """
    loop = make(shapes=[DraftShape(5, 2, 12)], max_requests=2)

    def serve(*asked: tuple[list[int], int]) -> list[Request]:
        engine = loop.engine(overlap=True)
        requests = [engine.add_request(prompt, max_new_tokens=count) for prompt, count in asked]
        run(engine)
        return requests

    [short], [other], [neighbour] = small_prompts([5], 1), small_prompts([5], 4), small_prompts([20])
    serve((short, 11))
    table = loop._workshop.table
    table.flush()
    assert not table.block_table.any()
    for request in serve((other, 11), (neighbour, 20)):
        assert request.tokens == lone(request, CHAIN)


def busy(engine: Engine, rounds: int, how: Sequence[Sampling]) -> list[Request]:
    """Requests join and leave while so many steps run."""
    rng, requests = random.Random(0), list[Request]()
    for step in range(rounds):
        if step % 3 == 0:
            [prompt] = small_prompts([rng.randint(1, 12)], step)
            asked: Any = {"max_new_tokens": rng.randint(1, 12), "sampling": how[step % len(how)]}
            requests.append(engine.add_request(prompt, **asked))
        engine.step()
    run(engine)
    return requests


# Prompts in chunks, beside rounds.


@pytest.mark.parametrize("shape", [PLAIN, CHAIN], ids=str)
def test_prompts_share_the_forwards_of_rounds(shape: DraftShape) -> None:
    """One forward of the target per step, of decoding rows and a chunk together; one of the draft."""
    rows, length = 16, 30
    loop = make(
        shapes=[shape], prefill_rows=rows, batch_sizes=[1, 2], max_requests=2,
        graphs={"prefill": "piecewise"}, **QUICK,
    )  # fmt: skip
    loop.prepare()
    engine = loop.engine(overlap=True)
    first = engine.add_request(small_prompts([3])[0], max_new_tokens=30)
    for _ in range(2):
        engine.step()
    second = engine.add_request(small_prompts([length], 1)[0], max_new_tokens=4)
    before = len(first.tokens)
    steps = -(-length // (rows - shape.nodes))
    models = 2 if shape.steps else 1
    with pg.counters.expect(replays=steps * models, captures=0, tapes=0):
        for _ in range(steps):
            engine.step()
    assert second in engine.running
    assert len(first.tokens) > before  # it went on meanwhile
    run(engine)
    for request in (first, second):
        assert request.tokens == lone(request, shape)


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


# Slots, pages and giving way.


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
def test_youngest_request_gives_way_and_goes_on_later(page_size: int, overlap: bool) -> None:
    """Pages for one and a half: the second is computed again, its tokens are not chosen again."""
    shape = CHAIN
    needed = -(-(LENGTH + shape.room) // page_size)
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
    small = make(num_pages=20 + ROOM)
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


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("where", ["wait", "of", "accepted", "first_tokens"])
def test_interrupted_steps_are_gone_on_from(
    loop: Speculator, monkeypatch: pytest.MonkeyPatch, shape: DraftShape, where: str, overlap: bool
) -> None:
    """Every few steps, at a place where a step spends its time."""
    engine = loop.engine(shape=shape, overlap=overlap)
    requests = [engine.add_request(p, max_new_tokens=14) for p in small_prompts([5, 9, 2, 7, 3])]
    original, calls = getattr(Result, where), 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = original(*args)
        if calls % 4 == 0:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(Result, where, sometimes)
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
    release, interrupted = engine._scheduler.release, []

    def interrupts_once(request: Request) -> None:
        if not interrupted:
            interrupted.append(request)
            raise KeyboardInterrupt
        release(request)

    monkeypatch.setattr(engine._scheduler, "release", interrupts_once)
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
        patch.setattr(engine._scheduler.table, "reserve", lambda tokens: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    run(engine)
    assert request.tokens == lone(request, PLAIN)
    assert all_free(loop)


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


def test_engine_whose_step_failed_leaves_the_next_one_alone(
    loop: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has to put its own state right once; not when slots and pages are another's."""
    first, second = loop.engine(overlap=True), loop.engine(overlap=True)
    lost = first.add_request([1, 2, 3], max_new_tokens=9)
    monkeypatch.setattr(Result, "of", lambda *_: 1 / 0)
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
    monkeypatch.setattr(loop._workshop.table, "reserve", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.step()
    monkeypatch.undo()
    first.abort(lost)
    request = second.add_request([1, 2], max_new_tokens=3)
    for _ in range(10):
        second.step()
    assert request.tokens == lone(request, PLAIN)
    assert all_free(loop)


# For a long time.


def soak(loop: Speculator, count: int) -> list[Request]:
    """Requests of all lengths come whenever there are few; a tenth of them are aborted."""
    rng, engine = random.Random(0), loop.engine(overlap=True)
    some: list[Request] = []
    came = 0
    while came < count or engine.unfinished:
        while came < count and engine.unfinished < 2 * loop.max_requests:
            [prompt] = small_prompts([rng.randint(1, 6)], came % 50)
            request = engine.add_request(prompt, max_new_tokens=rng.randint(1, 6))
            came += 1
            if came % 100 == 0:
                some.append(request)
            elif came % 10 == 0:
                engine.abort(request)
        engine.step()
    return some


def alive() -> tuple[int, int]:
    """(objects of any kind, plans among them: of piecewise forwards there is one per row count)."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), count_frozen_plans(objects)


def check_soak(count: int, prefill: str) -> None:
    made = make(graphs={"prefill": prefill}, max_requests=16, batch_sizes=[16], **QUICK)
    made.prepare()
    soak(made, 200)  # whatever is made once is made
    objects, plans = alive()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_gpu = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    some = soak(made, count)
    assert all_free(made)
    objects_now, plans_now = alive()
    # Some are made once, however long it runs; those of a plan, and of each request that is kept.
    assert objects_now - objects < 300 + 45 * (plans_now - plans) + 20 * len(some)
    assert plans_now <= made._prefill.most
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host < 30_000  # KiB
    if torch.cuda.is_available():
        assert torch.cuda.memory_allocated() == on_gpu
    assert all(request.tokens == lone(request, CHAIN) for request in some)


@pytest.mark.parametrize("prefill", ["compiled", "piecewise"])
def test_soak(prefill: str) -> None:
    check_soak(500, prefill)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("prefill", ["compiled", "piecewise"])
def test_long_soak(prefill: str) -> None:
    check_soak(10_000, prefill)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_steady_loop_never_waits_for_the_device(shape: DraftShape) -> None:
    """200 steps with requests that join and leave: CUDA raises where the host would wait."""
    made = make(graphs="full", batch_sizes=[4], **QUICK)
    made.prepare(rules=("greedy", "sampled", "filtered"))
    engine = made.engine(shape=shape)
    busy(engine, 20, HOW)
    torch.cuda.set_sync_debug_mode("error")
    try:
        requests = busy(engine, 200, HOW)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [r.tokens for r in requests] == [lone(r, shape) for r in requests]
