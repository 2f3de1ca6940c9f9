"""The engine: requests that come and go get the tokens of a lone run, whatever they share batches with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from eagle_cases import (
    QUICK,
    VOCABULARY,
    all_free,
    one_state_for_all_tests,
    resources,
    small_prompts,
)
from eagle_engine_cases import (
    CHAIN,
    HOW,
    LENGTH,
    LOOKAHEAD,
    PLAIN,
    SHAPES,
    lone,
    lone_tokens,
    make,
    prepared,
    run,
)
from hypothesis import given, settings, strategies as st

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import implementations
from piecewise_graph.eagle import DraftShape, Engine, Request, Sampling, Speculator
from piecewise_graph.eagle.rounds.phase_runner import PhaseRunner
from piecewise_graph.eagle.rounds.prefill import Prefill
from piecewise_graph.eagle.rounds.round_launch import Launch
from piecewise_graph.eagle.serving.pace import Pace, Timed
from piecewise_graph.errors import RankError


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def graphs() -> Speculator:
    return prepared()


@pytest.mark.parametrize("shares", [True, False])
def test_prompts_are_laid_out_while_the_device_has_work(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the draft of the round whose forwards they share, or behind the whole round."""
    monkeypatch.setattr(Pace, "begin", lambda *_: Timed(shares))
    engine = make(shapes=[CHAIN], batch_sizes=[1, 2], max_requests=2, **QUICK).engine(overlap=True)
    engine.add_request(small_prompts([3])[0], max_new_tokens=30)
    for _ in range(2):
        engine.step()
    order, run_phase, lay_out = list[str](), PhaseRunner.__call__, Prefill.lay_out
    monkeypatch.setattr(PhaseRunner, "__call__", lambda self: (order.append(self.name), run_phase(self)))
    monkeypatch.setattr(
        Prefill, "lay_out", lambda self, pieces: (order.append("prompts"), lay_out(self, pieces))[1]
    )
    engine.add_request(small_prompts([5], 1)[0], max_new_tokens=4)
    engine.step()
    assert order == (["draft", "prompts"] if shares else ["draft", "verify", "extend", "prompts"])
    run(engine)


@pytest.mark.parametrize("shares", [True, False])
def test_a_step_reads_what_the_step_before_launched(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never what it launched itself: first tokens would wait for the next round where prompts go alone."""
    monkeypatch.setattr(Pace, "begin", lambda *_: Timed(shares))
    steps, launched, late, begin, read = [0], dict[Launch, int](), list[int](), Launch.begin, Launch.read
    monkeypatch.setattr(Launch, "begin", lambda self: (launched.update({self: steps[0]}), begin(self)))
    monkeypatch.setattr(
        Launch, "read", lambda self, *args: (late.append(steps[0] - launched[self]), read(self, *args))
    )
    engine = make(shapes=[CHAIN], prefill_rows=8, **QUICK).engine(overlap=True)
    for _ in range(2):
        engine.add_request(small_prompts([20])[0], max_new_tokens=12)
        for _ in range(4):
            engine.step()
            steps[0] += 1
    while engine.unfinished:
        engine.step()
        steps[0] += 1
    assert len(late) >= 10
    assert set(late) == {1}


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
    st.sampled_from([1, 7, 24]), st.booleans(),
)  # fmt: skip
def test_any_schedule_gives_the_tokens_of_a_lone_run(
    schedule: list[dict[str, Any]], shape: DraftShape, overlap: bool, at_once: int, spare: int, rows: int,
    apart: bool,
) -> None:  # fmt: skip
    """Arrivals, lengths, stop tokens, aborts and page pressure; prompts in chunks of any size.

    Attention of prompts and of the requests beside them is one call, or one of each.
    """
    loop = make(max_requests=at_once, num_pages=1 + LENGTH + LOOKAHEAD + spare, prefill_rows=rows)
    engine = loop.engine(shape=shape, overlap=overlap)
    watched = Watched(engine, schedule)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(implementations, "served_apart", lambda batch, _: apart and bool(batch.parts))
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
    """None where its length ends it, one where a token does: that is known one round late.

    A GPU that is quicker than the host may have sent the token before the next round is launched.
    """
    least = 0 if torch.cuda.is_available() else 1
    [prompt] = small_prompts([6])
    tokens = lone_tokens(tuple(prompt), HOW[0], PLAIN, 30)
    for count, stop, wasted in ((12, (), (0, 1)), (30, (tokens[8],), (least, 1))):
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
    wait, made = Launch.wait, Launch.__init__
    monkeypatch.setattr(Launch, "has_arrived", False)  # the device is busy
    monkeypatch.setattr(Launch, "wait", lambda self: (order.append("read"), wait(self))[1])
    monkeypatch.setattr(Launch, "__init__", lambda *a, **k: (order.append("launch"), made(*a, **k))[1])
    for overlap in (True, False):
        engine = graphs.engine(shape=PLAIN, overlap=overlap)
        engine.add_request(small_prompts([3])[0], max_new_tokens=5)
        order.clear()
        run(engine)
        one_each = ["launch", "read"] * 5
        assert order == (["launch", *["launch", "read"] * 4, "read"] if overlap else one_each)


def test_no_request_is_given_tokens_behind_a_sum_that_waited_in_vain(
    graphs: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(ranks: pg.Ranks) -> None:
        raise RankError.late(1)

    engine = graphs.engine(shape=PLAIN, overlap=False)
    request = engine.add_request(small_prompts([3])[0], max_new_tokens=5)
    engine.step()
    before = list(request.tokens)
    with monkeypatch.context() as patch:
        patch.setattr(pg.Ranks, "check", check)
        with pytest.raises(RankError, match="rows of rank 1 in vain"):
            run(engine)
        assert request.tokens == before
    engine.close()


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
    table = resources(loop).table
    table.flush()
    assert not table.block_table.any()
    for request in serve((other, 11), (neighbour, 20)):
        assert request.tokens == lone(request, CHAIN)


# On a GPU.


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
