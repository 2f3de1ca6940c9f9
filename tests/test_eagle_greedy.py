"""Greedy speculation says what the target alone would say, token for token, however it drafts and runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from eagle_cases import (
    CHAINS,
    QUICK,
    TREES,
    WAYS,
    all_free,
    assert_greedy,
    byte_llama,
    byte_prompts,
    greedy,
    one_state_for_all_tests,
    random_head,
    rounds_of,
    shapes_of_rounds,
    small_pair,
    small_prompts,
    small_target,
    spoil,
    spoil_padding,
    trained_head,
    twin,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_generation import Alone

import piecewise_graph as pg
from piecewise_graph.eagle import DraftModel, DraftShape, Sampling, Speculator
from piecewise_graph.eagle.serving.shape_planner import Choice, Planner

Loops = Callable[[str], Speculator]
PLAIN = DraftShape(0)
ALL_WAYS = (CHAINS[2], TREES[3])
MIXED: tuple[dict[str, str], ...] = (
    {"draft": "eager", "verify": "full", "extend": "compiled"},
    {"draft": "full", "verify": "piecewise", "extend": "eager"},
)


@pytest.fixture(autouse=True, scope="module")
def fresh_process_state() -> Iterator[None]:
    with one_state_for_all_tests():
        yield


# The trained model, and 50 prompts.

PROMPTS = byte_prompts(50, longest=60)
LATEST = 11  # tokens that are asked for at most
COUNTS = [1 + index % LATEST for index in range(len(PROMPTS))]
MOST: dict[str, int] = {"twin": LATEST, "random": 3}  # others: few rounds are enough


@pytest.fixture(scope="module")
def answers() -> list[Alone]:
    return greedy(byte_llama("sdpa"), PROMPTS, LATEST)


@pytest.fixture(scope="module")
def loops() -> Loops:
    """A speculator for each kind of head, made once."""
    target = byte_llama()
    drafts: dict[str, Callable[[], DraftModel]] = {
        "twin": lambda: twin(target),
        "eagle1": lambda: trained_head(target, "eagle1"),
        "eagle3": lambda: trained_head(target, "eagle3"),
        "random": lambda: random_head(target, "eagle3", vocabulary=132),
    }

    @cache
    def loop(head: str) -> Speculator:
        return Speculator(
            target, drafts[head](), shapes=CHAINS + TREES, max_requests=16, batch_sizes=[16],
            max_seq_len=71, prefill_rows=256, **QUICK,
        )  # fmt: skip

    return loop


CASES = [(head, shape) for head in ("twin", "eagle1", "eagle3") for shape in CHAINS + TREES]
CASES += [("random", shape) for shape in (CHAINS[2], TREES[2])]


@pytest.mark.parametrize(("head", "shape"), CASES, ids=str)
def test_fifty_prompts_equal_plain_decoding(
    head: str, shape: DraftShape, loops: Loops, answers: list[Alone]
) -> None:
    """Of different lengths and with different numbers of new tokens, sixteen at a time."""
    counts = [min(count, MOST.get(head, 6)) for count in COUNTS]
    found, statistics = loops(head).generate(PROMPTS, max_new_tokens=counts, shape=shape, return_stats=True)
    assert_greedy(found, answers, counts)
    assert all_free(loops(head))
    if head == "twin":  # or the acceptance that this is about did not happen
        assert statistics.mean_acceptance_length > 1 + 0.8 * shape.steps


@pytest.mark.parametrize("shape", CHAINS[::2] + TREES[1:], ids=str)
def test_graphs_change_neither_tokens_nor_statistics(
    shape: DraftShape, loops: Loops, answers: list[Alone]
) -> None:
    """Not one request's, at not one position."""
    asked: Any = {"max_new_tokens": COUNTS[4::4], "shape": shape, "return_stats": True}
    ways = (*WAYS, *MIXED) if shape in ALL_WAYS else WAYS
    outcomes = [loops("eagle1").generate(PROMPTS[4::4], graphs=graphs, **asked) for graphs in ways]
    assert_greedy(outcomes[0][0], answers[4::4], COUNTS[4::4])
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0][1].mean_acceptance_length > 1.3


@pytest.mark.parametrize("head", ["twin", "eagle1", "eagle3"])
def test_trees_accept_no_less_than_chains_of_their_depth(head: str, loops: Loops) -> None:
    """They hold the chain and more: what they lost if branches attended to their siblings."""

    def accept_length(shape: DraftShape) -> float:
        asked: Any = {"max_new_tokens": COUNTS[1::5], "return_stats": True}
        return loops(head).generate(PROMPTS[1::5], shape=shape, **asked)[1].mean_acceptance_length

    for chain, tree in ((CHAINS[1], TREES[0]), (CHAINS[2], TREES[2]), (CHAINS[4], TREES[1])):
        assert accept_length(tree) >= accept_length(chain)


# A draft that is the target.

BEHIND = 17  # tokens from which on the first one is outside of a window of 16


def exact_loop(
    window: int | None, shapes: Sequence[DraftShape], prefill_rows: int = 11
) -> tuple[Speculator, Any]:
    """A draft that sees all that its target sees, and the target with plain attention."""
    features: Any = {"window": window, "bigram": window is None}
    target = small_target(**features)
    loop = Speculator(
        target, twin(target), shapes=shapes, max_requests=4, batch_sizes=[1], max_seq_len=60,
        prefill_rows=prefill_rows,
        **QUICK,
    )  # fmt: skip
    return loop, small_target("sdpa", **features)


@pytest.mark.parametrize("window", [None, 16], ids=["bigram", "window"])
def test_draft_that_is_the_target_is_accepted_whole(window: int | None) -> None:
    """Attention included: behind a window, the target's K and V are what the draft has to have as well."""
    shapes = CHAINS + [shape for shape in TREES if window is None or shape.nodes <= window]
    loop, plain = exact_loop(window, shapes)
    prompts = small_prompts([1, 5, 12, 2, 30] if window is None else [BEHIND, 30, 20, 25, 18])
    counts = [13, 1, 30, 2, 19]
    wanted = greedy(plain, prompts, max(counts))
    for shape in shapes:
        found, statistics = loop.generate(prompts, max_new_tokens=counts, shape=shape, return_stats=True)
        assert_greedy(found, wanted, counts)
        for count, of in zip(counts, statistics.requests, strict=True):
            rounds = rounds_of(count, shape.steps + 1)
            assert of.num_drafts == of.num_rounds == rounds
            assert of.num_draft_tokens == rounds * (shape.nodes - 1)
            assert of.num_accepted_tokens == rounds * shape.steps
            assert of.accepted_at == [rounds] * (shape.steps if rounds else 0)
            assert of.num_tokens == rounds * (shape.steps + 1)
        assert statistics.mean_acceptance_length == shape.steps + 1
        assert statistics.acceptance_rates == (1.0,) * shape.steps


class InTurn(Planner):
    """Every shape, one after the other."""

    def knows(self, place: Any) -> bool:
        return True

    def choose(self, place: Any) -> Choice:
        return Choice(self.shapes[self._rounds % len(self.shapes)], place[0], (), False)


def test_rounds_of_all_shapes_follow_each_other() -> None:
    """The draft catches up with plain rounds, and is right again at once: each round is accepted whole."""
    shapes = [CHAINS[4], PLAIN, TREES[0], PLAIN, PLAIN, CHAINS[0], TREES[4], CHAINS[2]]
    loop, plain = exact_loop(16, shapes, prefill_rows=64)  # both requests begin together
    loop.planner = InTurn(shapes)
    prompts, count = small_prompts([BEHIND, 20]), 40
    wanted = greedy(plain, prompts, count)
    found, statistics = loop.generate(prompts, max_new_tokens=count, shape="auto", return_stats=True)
    assert_greedy(found, wanted, [count] * 2)
    of, made = statistics.requests[0], 0
    ran: list[DraftShape] = []
    while made < count - 1:
        ran.append(shapes[len(ran) % len(shapes)])
        made += ran[-1].steps + 1
    assert statistics.requests == (of, of)
    assert (of.num_rounds, of.num_tokens) == (len(ran), made)
    assert of.num_drafts == sum(shape.steps > 0 for shape in ran)
    assert of.accepted_at == [sum(shape.steps > depth for shape in ran) for depth in range(5)]


# Any shape, any batch: small models, without compiling.


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes_of_rounds(), st.sampled_from(["twin", "eagle1", "eagle3"]), st.integers(1, 16), st.integers(1, 6),
    st.integers(1, 40), st.integers(0, 99),
)  # fmt: skip
def test_any_shape_equals_plain_decoding(
    shape: DraftShape, kind: str, requests: int, at_once: int, prefill_rows: int, seed: int
) -> None:
    """Requests wait, join and leave at any time; prompts go through prefill in pieces of any size."""
    target, plain, draft = small_pair(kind)
    rng = random.Random(seed)
    prompts = small_prompts([rng.randint(1, 30) for _ in range(requests)], seed)
    counts = [rng.randint(1, 10) for _ in range(requests)]
    loop = Speculator(
        target, draft, shapes=[shape], max_requests=at_once, max_seq_len=40, prefill_rows=prefill_rows,
        graphs="eager",
    )  # fmt: skip
    found, statistics = loop.generate(prompts, max_new_tokens=counts, return_stats=True)
    assert_greedy(found, greedy(plain, prompts, counts), counts)
    assert all_free(loop)
    total = statistics.total
    assert total.num_draft_tokens == total.num_drafts * (shape.nodes - 1)
    assert total.num_tokens == total.num_drafts + total.num_accepted_tokens
    assert total.num_accepted_tokens == sum(total.accepted_at)
    assert total.accepted_at == sorted(total.accepted_at, reverse=True)


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


@pytest.mark.parametrize("graphs", WAYS)
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


# Ways to make a loop.


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


@pytest.mark.parametrize("options", [{"merge_linears": True}, {"compiler": "inductor"}], ids=str)
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
    prompts = PROMPTS[6::6]
    wanted = greedy(byte_llama("sdpa", torch.bfloat16), prompts, 12)
    for shape in loop.shapes:
        tokens, statistics = loop.generate(prompts, max_new_tokens=12, shape=shape, return_stats=True)
        assert_greedy(tokens, wanted, [12] * len(prompts), tie=0.25)
        assert statistics.mean_acceptance_length > 3


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
