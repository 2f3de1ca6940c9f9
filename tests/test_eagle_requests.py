"""Requests of the speculative loop: where they end, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
from eagle_cases import (
    QUICK,
    VOCABULARY,
    all_free,
    assert_greedy,
    greedy,
    one_state_for_all_tests,
    rounds_of,
    small_pair,
    small_prompts,
    small_target,
    twin,
)
from eagle_request_cases import LENGTH, LOOKAHEAD, SHAPES, answers, make
from hypothesis import given, settings, strategies as st

import piecewise_graph as pg
from piecewise_graph.eagle import DraftShape, Speculator


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def loop() -> Speculator:
    return make()


# Where a request ends.


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ends_after_as_many_tokens_as_were_asked_for(shape: DraftShape, loop: Speculator) -> None:
    """Every number of them, so at every place of a window."""
    prompt, counts = small_prompts([6])[0], list(range(1, 15))
    asked: Any = {"max_new_tokens": counts, "shape": shape, "return_stats": True}
    found, statistics = loop.generate([prompt] * 14, **asked)
    assert found == [answers([prompt], 14)[0][:n] for n in counts]
    for count, of in zip(counts, statistics.requests, strict=True):
        assert of.num_tokens >= count - 1  # the window's tail is counted, and dropped
        assert of.num_tokens - (count - 1) <= shape.steps


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stop_token_is_the_last_one(shape: DraftShape, loop: Speculator) -> None:
    """Wherever it stands; the same answer is stopped at each of its tokens in turn."""
    prompt = small_prompts([7])[0]
    answer = answers([prompt], 14)[0]
    for token in answer:
        found = loop.generate([prompt], max_new_tokens=14, stop=[token], shape=shape)
        assert found == [answer[: answer.index(token) + 1]]
    assert loop.generate([prompt], max_new_tokens=14, stop=answer, shape=shape) == [answer[:1]]
    absent = next(token for token in range(VOCABULARY) if token not in answer)
    assert loop.generate([prompt], max_new_tokens=14, stop=[absent], shape=shape) == [answer]
    assert all_free(loop)


def test_stop_tokens_of_an_iterator_are_those_of_every_prompt(loop: Speculator) -> None:
    prompts = small_prompts([7, 3])
    stop = [answer[4] for answer in answers(prompts, 9)]
    wanted = loop.generate(prompts, max_new_tokens=9, stop=stop)
    assert loop.generate(prompts, max_new_tokens=9, stop=iter(stop)) == wanted
    assert all(tokens[-1] in stop for tokens in wanted)


def test_stopped_requests_make_room_for_others(loop: Speculator) -> None:
    prompts = small_prompts([3, 8, 5, 2, 9, 4, 6, 7, 1])
    wanted = answers(prompts, 12)
    stop = sorted({answer[4] for answer in wanted})
    ends = [next((i for i, t in enumerate(answer) if t in stop), 11) for answer in wanted]
    found = loop.generate(prompts, max_new_tokens=12, stop=stop)
    assert found == [answer[: end + 1] for answer, end in zip(wanted, ends, strict=True)]
    assert all_free(loop)


def test_one_token_takes_no_round() -> None:
    """Prefill made it."""
    loop = make(graphs={"prefill": "eager"})
    with pg.counters.expect(phase_captures=0, phase_replays=0):
        found, statistics = loop.generate([[1, 2], [3]] * 9, max_new_tokens=1, return_stats=True)
    assert found == answers([[1, 2], [3]], 1) * 9
    assert statistics.total.num_rounds == statistics.total.num_drafts == 0
    assert statistics.mean_acceptance_length == 1
    assert statistics.acceptance_rates == ()


def test_nothing_is_asked_for(loop: Speculator) -> None:
    found, statistics = loop.generate([], return_stats=True)
    assert found == []
    assert statistics.requests == ()
    assert statistics.to_dict()["num_rounds"] == 0


def test_request_fills_its_sequence_to_the_end(loop: Speculator) -> None:
    prompts = small_prompts([LENGTH - 1, LENGTH - 6, 1])
    counts = [LENGTH - len(prompt) for prompt in prompts]
    for shape in SHAPES:
        found = loop.generate(prompts, max_new_tokens=counts, shape=shape)
        assert_greedy(found, greedy(small_pair("twin")[1], prompts, counts), counts)


# Plain decoding.


@pytest.mark.parametrize("with_draft", [False, True])
def test_plain_decoding_makes_one_token_a_round(with_draft: bool) -> None:
    target, _, draft = small_pair("twin")
    loop = Speculator(
        target, draft if with_draft else None, shapes=[0], max_requests=2, max_seq_len=LENGTH, graphs="eager"
    )
    prompts, counts = small_prompts([4, 1, 11]), [7, 1, 12]
    found, statistics = loop.generate(prompts, max_new_tokens=counts, return_stats=True)
    assert found == [answer[:n] for answer, n in zip(answers(prompts, 12), counts, strict=True)]
    assert [of.num_rounds for of in statistics.requests] == [rounds_of(n, 1) for n in counts]
    assert [of.num_tokens for of in statistics.requests] == [n - 1 for n in counts]
    total = statistics.total
    assert total.num_drafts == total.num_draft_tokens == total.num_accepted_tokens == 0
    assert statistics.mean_acceptance_length == 1
    assert all_free(loop)


# Waiting.


def test_requests_wait_for_a_slot(loop: Speculator) -> None:
    prompts, counts = small_prompts([2, 5, 3, 9, 1, 4, 6]), [12, 1, 3, 9, 14, 2, 7]
    engine, requests = loop.session(prompts, max_new_tokens=counts)
    highest = 0
    while engine.unfinished:
        engine.step()
        highest = max(highest, len(engine.running))
        assert len(engine.running) + len(engine.waiting) == engine.unfinished
    assert highest <= loop.max_requests
    wanted = answers(prompts, max(counts))
    assert [r.tokens for r in requests] == [a[:n] for a, n in zip(wanted, counts, strict=True)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_wait_for_pages(page_size: int) -> None:
    """Each takes pages for all its tokens and its lookahead slots; as many run as fit, in order."""
    count, shapes = 6, [3] if page_size > 1 else SHAPES
    lookahead = max(DraftShape(3).lookahead if page_size > 1 else LOOKAHEAD, 1)
    prompts = small_prompts([10] * 5)
    needed = -(-(10 + count + lookahead) // page_size)
    loop = make(shapes=shapes, page_size=page_size, num_pages=1 + 2 * needed + needed // 2)
    engine, requests = loop.session(prompts, max_new_tokens=count)
    together = []
    while engine.unfinished:
        engine.step()
        together.append(len(engine.running))
    assert max(together) <= 2
    assert [request.tokens for request in requests] == answers(prompts, count)
    assert all_free(loop)


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), min_size=1, max_size=6),
    st.integers(29 + LOOKAHEAD, 120), st.integers(1, 5), st.sampled_from(SHAPES), st.integers(0, 99),
)  # fmt: skip
def test_any_page_pressure(
    asked: list[tuple[int, int]], pages: int, at_once: int, shape: DraftShape, seed: int
) -> None:
    """Enough pages for each alone is enough for all."""
    loop = make(num_pages=1 + pages, max_requests=at_once)
    prompts, counts = small_prompts([length for length, _ in asked], seed), [count for _, count in asked]
    found = loop.generate(prompts, max_new_tokens=counts, shape=shape)
    assert_greedy(found, greedy(small_pair("twin")[1], prompts, counts), counts)
    assert all_free(loop)


def test_prefill_takes_as_many_rows_as_it_may() -> None:
    """Prompts share a batch, and one that does not fit goes on in the next."""
    rows, lengths = 8, [30, 1, 5, 16, 2]
    modes = dict.fromkeys(("draft", "verify", "extend"), "eager")
    target = small_target()
    loop = Speculator(
        target, twin(target), shapes=[1], max_requests=5, max_seq_len=LENGTH, prefill_rows=rows,
        graphs=modes | {"prefill": "piecewise"}, **QUICK,
    )  # fmt: skip
    loop.prepare()
    prompts = small_prompts(lengths)
    batches = -(-sum(lengths) // rows)
    ends = {(end - 1) // rows for end in accumulate(lengths)}  # batches in which prompts end
    with pg.counters.expect(replays=2 * batches + len(ends), tapes=0, captures=0):  # target, draft, head
        found = loop.generate(prompts, max_new_tokens=1)  # more would begin rounds, which take rows
    assert_greedy(found, greedy(small_target("sdpa"), prompts, 1), [1] * 5)
