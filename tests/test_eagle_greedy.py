"""Greedy speculation says what the target alone would say, token for token, however it drafts and runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
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
    random_head,
    rounds_of,
    shapes_of_rounds,
    small_pair,
    small_prompts,
    small_target,
    trained_head,
    twin,
)
from hypothesis import HealthCheck, given, settings, strategies as st
from paged_generation import Alone

import piecewise_graph as pg
from piecewise_graph.eagle import DraftModel, DraftShape, Speculator
from piecewise_graph.eagle.serving.shape_planner import Choice, Planner

Loops = Callable[[str], Speculator]
PLAIN = DraftShape(0)
IN_ALL_MODES = (CHAINS[2], TREES[3])
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
    """Of different lengths and with different numbers of new tokens, sixteen at a time; some where rounds
    are many."""
    some = slice(None) if head == "twin" else slice(shape.nodes % 3, None, 3)
    counts = [min(count, MOST.get(head, 6)) for count in COUNTS[some]]
    found, statistics = loops(head).generate(
        PROMPTS[some], max_new_tokens=counts, shape=shape, return_stats=True
    )
    assert_greedy(found, answers[some], counts)
    assert all_free(loops(head))
    if head == "twin":  # or the acceptance that this is about did not happen
        assert statistics.mean_acceptance_length > 1 + 0.8 * shape.steps


@pytest.mark.parametrize("shape", CHAINS[::2] + TREES[1:], ids=str)
def test_graphs_change_neither_tokens_nor_statistics(
    shape: DraftShape, loops: Loops, answers: list[Alone]
) -> None:
    """Not one request's, at not one position."""
    asked: Any = {"max_new_tokens": COUNTS[4::4], "shape": shape, "return_stats": True}
    modes = (*GRAPH_MODES, *MIXED) if shape in IN_ALL_MODES else GRAPH_MODES
    outcomes = [loops("eagle1").generate(PROMPTS[4::4], graphs=graphs, **asked) for graphs in modes]
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
    window: int | None, shapes: Sequence[DraftShape], prefill_rows: int = 11, **options: Any
) -> tuple[Speculator, Any]:
    """A draft that sees all that its target sees, and the target with plain attention."""
    features: Any = {"window": window, "bigram": window is None}
    target = small_target(**features)
    loop = Speculator(
        target, twin(target), shapes=shapes, max_requests=4, batch_sizes=[1], max_seq_len=60,
        prefill_rows=prefill_rows,
        **options,
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
    """Every shape, one after the other. On a slow device more is launched than was observed."""

    chosen = 0

    def knows(self, key: Any) -> bool:
        return True

    def choose(self, key: Any) -> Choice:
        self.chosen += 1
        return Choice(self.shapes[(self.chosen - 1) % len(self.shapes)], key[0], (), False)


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


@pytest.mark.parametrize("behind", [1, 5, 20])
def test_a_draft_catches_up_with_tokens_of_any_number_where_prompts_are_replayed(behind: int) -> None:
    """In a tape where they fit, compiled where two requests missed more than a tape has rows."""
    chain = CHAINS[4]
    shapes = [*[PLAIN] * behind, chain, chain]
    loop, plain = exact_loop(None, shapes, prefill_rows=16, graphs={"prefill": "piecewise"})
    loop.planner = InTurn(shapes)
    prompts, count = small_prompts([3, 5]), 1 + behind + 2 * (chain.steps + 1)
    wanted, reason = greedy(plain, prompts, count), "fallbacks:above_max_tokens"
    before = pg.counters.snapshot().get(reason, 0)
    found, statistics = loop.generate(prompts, max_new_tokens=count, shape="auto", return_stats=True)
    assert_greedy(found, wanted, [count] * 2)
    assert [of.accepted_at for of in statistics.requests] == [[2] * chain.steps] * 2
    assert pg.counters.snapshot().get(reason, 0) - before == int(behind == 20)


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
