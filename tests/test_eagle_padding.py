"""Greedy rounds beside padding, on pages, in other dtypes: the tokens stay those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from eagle_cases import (
    CHAINS,
    GRAPH_MODES,
    QUICK,
    TREES,
    all_free,
    assert_greedy,
    byte_llama,
    byte_prompts,
    greedy,
    one_state_for_all_tests,
    small_pair,
    small_prompts,
    small_target,
    spoil,
    spoil_padding,
    twin,
)

import piecewise_graph as pg
from piecewise_graph.eagle import DraftShape, Sampling, Speculator

PLAIN = DraftShape(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


# Padding.


@pytest.fixture(scope="module")
def small_loops() -> Callable[[str], Speculator]:
    """Rounds of one size alone, so that smaller batches are padded."""

    @cache
    def loop(kind: str) -> Speculator:
        target, _, draft = small_pair(kind)
        return Speculator(
            target, draft, shapes=[CHAINS[2], TREES[2], PLAIN], max_requests=16, batch_sizes=[16],
            max_seq_len=40, graphs="full" if kind == "twin" else "eager", **QUICK,
        )  # fmt: skip

    return loop


@pytest.mark.parametrize("shape", [CHAINS[2], TREES[2], PLAIN], ids=str)
@pytest.mark.parametrize("kind", ["twin", "eagle3"])
def test_padding_is_inert(kind: str, shape: DraftShape, small_loops: Any) -> None:
    """Three requests in a round of sixteen rows, beside rows that are spoiled again before every round."""
    loop, prompts = small_loops(kind), small_prompts([7, 1, 12])
    alone = [loop.generate([prompt], max_new_tokens=16, shape=shape)[0] for prompt in prompts]
    assert loop.generate(prompts, max_new_tokens=16, shape=shape) == alone
    spoil(loop)
    engine, requests = loop.session(prompts, max_new_tokens=16, shape=shape)
    while engine.unfinished:
        engine.step()
        spoil_padding(loop)
    assert [request.tokens for request in requests] == alone
    assert_greedy(alone, greedy(small_pair(kind)[1], prompts, 16), [16] * 3)


@pytest.mark.parametrize("graphs", GRAPH_MODES)
def test_nothing_is_read_that_no_request_wrote(graphs: str, small_loops: Any) -> None:
    """Caches, state and buffers full of NaN before the first prompt change no token."""
    loop, prompts = small_loops("twin"), small_prompts([1, 9, 4, 16, 2])
    asked: Any = {"max_new_tokens": [3, 14, 1, 9, 20], "graphs": graphs, "return_stats": True}
    clean = loop.generate(prompts, shape=TREES[2], **asked)
    spoil(loop)
    assert loop.generate(prompts, shape=TREES[2], **asked) == clean
    spoil(loop)
    assert loop.generate(prompts, shape=CHAINS[2], **asked)[0] == clean[0]


def test_sampled_requests_do_not_notice_padding(small_loops: Any) -> None:
    loop, prompts = small_loops("eagle3"), small_prompts([1, 9, 4])
    how = [Sampling(temperature=30.0, seed=1), Sampling(temperature=9.0, top_k=5, top_p=0.9), Sampling()]
    for shape in loop.shapes:
        asked: Any = {"max_new_tokens": 9, "shape": shape}
        clean = [loop.generate([p], sampling=s, **asked)[0] for p, s in zip(prompts, how, strict=True)]
        spoil(loop)
        assert loop.generate(prompts, sampling=how, **asked) == clean


def test_second_generation_captures_and_compiles_nothing(small_loops: Any) -> None:
    """Every phase of every round is one replay."""
    loop, prompts = small_loops("twin"), small_prompts([9, 4, 17])
    loop.prepare()
    for shape, phases in ((CHAINS[2], 3), (TREES[2], 3), (PLAIN, 2)):
        engine, _ = loop.session(prompts, max_new_tokens=10, shape=shape)
        rounds = 0
        before = pg.counters.snapshot()["phase_replays"]
        with pg.counters.expect(traces=0, compiles=0, tapes=0, captures=0, phase_captures=0, not_full=0):
            engine.step()  # the prompts
            while engine.unfinished:
                engine.step()
                rounds += 1
        assert pg.counters.snapshot()["phase_replays"] - before == phases * rounds


# Options of a speculator.


@pytest.mark.parametrize("page_size", [4, 16])
def test_chains_on_pages(page_size: int) -> None:
    """Lengths around the ends of pages."""
    target, plain, draft = small_pair("twin")
    loop = Speculator(
        target,
        draft,
        shapes=CHAINS[1::3],
        max_requests=3,
        max_seq_len=48,
        page_size=page_size,
        graphs="eager",
    )
    prompts, counts = small_prompts([15, 16, 17, 1, 30]), [18, 2, 17, 33, 1]
    wanted = greedy(plain, prompts, counts)
    for shape in loop.shapes:
        assert_greedy(loop.generate(prompts, max_new_tokens=counts, shape=shape), wanted, counts)
        assert all_free(loop)


@pytest.mark.parametrize(
    "options",
    [{"merge_linears": True}, pytest.param({"compiler": "inductor"}, marks=pytest.mark.slow)],
    ids=["merged", "inductor"],
)
def test_options_of_compiling_change_no_token(options: dict[str, Any]) -> None:
    """All parts of a draft share its weights, merged or not."""
    target, plain = small_target(), small_target("sdpa")
    both: Any = {
        "options": {"compiler": "eager", **options},
        "draft_options": {"compiler": "eager", **options},
    }
    loop = Speculator(
        target,
        twin(target),
        shapes=[DraftShape(2, 3)],
        max_requests=4,
        batch_sizes=[4],
        max_seq_len=32,
        **both,
    )
    prompts, counts = small_prompts([3, 8, 5, 1]), [9, 3, 12, 6]
    found = loop.generate(prompts, max_new_tokens=counts)
    assert_greedy(found, greedy(plain, prompts, counts), counts)


def test_bfloat16() -> None:
    """One row and many may be rounded differently: ties are as wide as in test_paged_generation."""
    target = byte_llama(dtype=torch.bfloat16)
    loop = Speculator(
        target, twin(target), shapes=[CHAINS[2], TREES[2]], max_requests=8, max_seq_len=80, graphs="eager"
    )
    prompts = byte_prompts(50, longest=60)[6::6]
    wanted = greedy(byte_llama("sdpa", torch.bfloat16), prompts, 12)
    for shape in loop.shapes:
        tokens, statistics = loop.generate(prompts, max_new_tokens=12, shape=shape, return_stats=True)
        assert_greedy(tokens, wanted, [12] * len(prompts), tie=0.25)
        assert statistics.mean_acceptance_length > 3
