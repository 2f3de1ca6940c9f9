"""The planner: what it chooses from times and acceptance, and what that costs on a draft that is no good."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from piecewise_graph.eagle import DraftShape
from piecewise_graph.eagle.serving.shape_planner import (
    PROBE_AT_LEAST_EVERY,
    PROBE_EVERY,
    REPLAN_EVERY,
    Planner,
)

PLAIN = DraftShape(0)
CHAINS = [PLAIN, *map(DraftShape, range(1, 6))]
TREE = DraftShape(5, 4, 16)
SECONDS = {"draft": 0.3e-3, "verify": 4.0e-3, "extend": 0.4e-3}  # per draft forward, of the others per round
CATCH_UP = 4e-3  # seconds before a draft that follows plain rounds, as measured on an H200


def phases(shape: DraftShape, scale: float = 1.0) -> Mapping[str, float]:
    """A target that reads its weights once whatever it verifies, and a head of a tenth."""
    verify = SECONDS["verify"] * (1 + 0.01 * shape.nodes)
    if not shape.steps:
        return {"draft": 0.0, "verify": verify * scale}
    draft = SECONDS["draft"] * shape.steps
    return {"draft": draft * scale, "verify": verify * scale, "extend": SECONDS["extend"] * scale}


def planner_for(shapes: Sequence[DraftShape], scale: float = 1.0) -> Planner:
    planner = Planner(shapes)
    planner.measure((1,), {shape: phases(shape, scale) for shape in shapes})
    return planner


def accepted(generator: random.Random, shape: DraftShape, rate: float) -> int:
    """Tokens of a round in which each depth is accepted with `rate`, if the one above it is."""
    length = 1
    while length <= shape.steps and generator.random() < rate:
        length += 1
    return length


def simulate(
    planner: Planner, rate: float, tokens: int, scale: float = 1.0, catch_up: float = CATCH_UP
) -> tuple[float, list[DraftShape]]:
    """(seconds for so many tokens of each request, shapes that ran)."""
    generator = random.Random(0)
    spent, made, ran = 0.0, 0.0, []
    while made < tokens:
        shape = planner.choose((1,)).shape
        length = accepted(generator, shape, rate)
        planner.observe(shape, [length])
        behind = shape.steps and ran and not ran[-1].steps
        spent += sum(phases(shape, scale).values()) + catch_up * bool(behind)
        ran.append(shape)
        made += length
    return spent, ran


def tokens_per_second(shape: DraftShape, rate: float) -> float:
    return sum(rate**depth for depth in range(shape.steps + 1)) / sum(phases(shape).values())


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
def test_finds_the_best_length_of_a_chain(rate: float) -> None:
    planner = planner_for(CHAINS)
    spent, ran = simulate(planner, rate, tokens=3000)
    best = max(CHAINS, key=lambda shape: tokens_per_second(shape, rate))
    assert 3000 / spent >= 0.96 * tokens_per_second(best, rate)
    late = ran[len(ran) // 2 :]
    good = [shape for shape in late if tokens_per_second(shape, rate) >= 0.95 * tokens_per_second(best, rate)]
    assert len(good) >= 0.95 * len(late)


@pytest.mark.parametrize("scale", [1.0, 0.25], ids=["4 ms", "1 ms"])
@pytest.mark.parametrize("shapes", [[PLAIN, DraftShape(3)], CHAINS, [PLAIN, DraftShape(3), TREE]])
def test_draft_that_is_always_wrong_costs_less_than_two_percent(
    shapes: Sequence[DraftShape], scale: float
) -> None:
    """What counts are also the rounds in which it finds out: from no knowledge, over 2000 tokens or 4000."""
    tokens = 2000 if scale == 1.0 else 4000
    spent, _ = simulate(planner_for(shapes, scale), 0.0, tokens, scale)
    plain = tokens * sum(phases(PLAIN, scale).values())
    assert spent <= 1.02 * plain


def test_draft_that_stays_bad_costs_less_than_one_percent_once_that_is_known() -> None:
    """With many requests too, whose missed tokens take as long as 20 rounds to read."""
    planner, plain = planner_for([PLAIN, DraftShape(3)]), sum(phases(PLAIN).values())
    simulate(planner, 0.0, tokens=PROBE_AT_LEAST_EVERY)
    tokens = 4 * PROBE_AT_LEAST_EVERY
    spent, _ = simulate(planner, 0.0, tokens, catch_up=20 * plain)
    assert spent <= 1.01 * tokens * plain


def test_draft_that_stays_bad_is_looked_at_ever_more_seldom() -> None:
    _, ran = simulate(planner_for([PLAIN, DraftShape(3)]), 0.0, tokens=6 * PROBE_AT_LEAST_EVERY)
    probes = [index for index, shape in enumerate(ran) if shape.steps and index >= PROBE_EVERY // 2]
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    wanted = [min(2**n * PROBE_EVERY, PROBE_AT_LEAST_EVERY) for n in range(1, len(gaps) + 1)]
    assert all(abs(gap - w) <= REPLAN_EVERY for gap, w in zip(gaps, wanted, strict=True))
    assert wanted.count(PROBE_AT_LEAST_EVERY) >= 3


def test_draft_that_becomes_good_is_found_by_probing() -> None:
    planner = planner_for([PLAIN, DraftShape(3)])
    simulate(planner, 0.0, tokens=1000)
    assert planner.choose((1,)).shape == PLAIN
    _, ran = simulate(planner, 0.95, tokens=8000)
    waited = 16 * PROBE_EVERY  # what four failed probes lead to
    assert next(index for index, shape in enumerate(ran) if shape.steps) <= waited
    assert ran.count(DraftShape(3)) > len(ran) / 2


def probes_of(planner: Planner, tokens: Mapping[int, int], rounds: int, late: bool = False) -> list[int]:
    """Rounds in which a draft was probed, whose n-th accepts `tokens[n]`, or nothing.

    Args:
        late: rounds are observed after the next one was chosen, as with overlap.
    """
    found: list[int] = []
    pending: list[tuple[DraftShape, int]] = []
    for index in range(rounds):
        choice = planner.choose((1,))
        if choice.probe:
            found.append(index)
        pending.append((choice.shape, tokens.get(len(found), 1) if choice.shape.steps else 1))
        if len(pending) > late:
            shape, length = pending.pop(0)
            planner.observe(shape, [length])
    return found


@pytest.mark.parametrize("late", [False, True], ids=["", "overlap"])
def test_a_probe_that_did_better_brings_the_next_one_near(late: bool) -> None:
    """After a history so bad that one good round changes no plan."""
    planner = planner_for([PLAIN, DraftShape(3)])
    for _ in range(300):
        planner.observe(DraftShape(3), [1])
    probes = probes_of(planner, {4: 4}, 3000, late)
    gaps = [later - earlier for earlier, later in pairwise(probes)]
    wanted = [2, 4, 8, 1, 2, 4, 8]  # the fourth did better
    assert len(gaps) >= len(wanted)
    for gap, times in zip(gaps, wanted, strict=False):
        assert abs(gap - times * PROBE_EVERY) <= REPLAN_EVERY


def test_probes_of_drafts_beside_a_good_one_go_on_and_plain_decoding_needs_none() -> None:
    """A plain round makes one token, whoever tries it, and a draft misses that token."""
    planner = planner_for([PLAIN, DraftShape(3), TREE])
    for _ in range(100):
        planner.observe(DraftShape(3), [4])
        planner.observe(TREE, [1])
    ran = []
    for _ in range(3000):
        shape = planner.choose((1,)).shape
        planner.observe(shape, [4 if shape == DraftShape(3) else 1])
        ran.append(shape)
    assert ran.count(DraftShape(3)) > 0.97 * len(ran)
    assert ran.count(TREE) > 15
    assert PLAIN not in ran


def test_a_probe_that_nobody_observes_is_forgotten() -> None:
    """Its requests may all have ended: a later round of the shape is judged by nobody."""
    planner = planner_for([PLAIN, DraftShape(3)])
    for _ in range(300):
        planner.observe(DraftShape(3), [1])
    while not planner.choose((1,)).probe:
        planner.observe(PLAIN, [1])
    for _ in range(10):
        planner.observe(PLAIN, [1])
    planner.observe(DraftShape(3), [1])  # of another engine
    probes = probes_of(planner, {}, 400)
    assert abs(probes[0] - PROBE_EVERY) <= REPLAN_EVERY


@pytest.mark.parametrize("rate, tokens", [(0.0, 2 ** len(CHAINS)), (0.95, 6 * (len(CHAINS) + 1))])
def test_every_draft_runs_now_and_then(rate: float, tokens: int) -> None:
    """Within as many probes as there are shapes, where they are cheap; a round of 5 steps makes 6 tokens."""
    planner = planner_for(CHAINS)
    _, ran = simulate(planner, rate, tokens=PROBE_EVERY * tokens)
    assert set(ran) == set(CHAINS) - ({PLAIN} if rate else set())  # plain decoding is best, or needs no probe


def test_tree_that_has_not_run_is_taken_to_be_better_than_the_chain_and_tried() -> None:
    planner = planner_for([DraftShape(5), TREE])
    for _ in range(20):
        planner.observe(DraftShape(5), [accepted(random.Random(1), DraftShape(5), 0.5)])
    tokens = {each.shape: each.tokens for each in planner.choose((1,)).estimates}
    assert tokens[TREE] > tokens[DraftShape(5)]


def test_each_batch_size_has_its_own_times_and_shares_what_is_accepted() -> None:
    planner = Planner([PLAIN, DraftShape(3)])
    planner.measure((1,), {shape: phases(shape) for shape in planner.shapes})
    dear = phases(DraftShape(3), scale=10.0)  # a large batch that is bound by compute
    planner.measure((32,), {PLAIN: phases(PLAIN), DraftShape(3): dear})
    simulate(planner, 0.8, tokens=400)
    assert planner.choose((1,)).shape == DraftShape(3)
    assert planner.choose((32,)).shape == PLAIN
    assert not planner.knows((4,))


def test_choice_prints_the_numbers_behind_it() -> None:
    planner = planner_for([PLAIN, DraftShape(3)])
    choice = planner.choose((1,))
    best = choice.estimates[0]
    assert best.rate == max(each.rate for each in choice.estimates)
    assert best.rate == pytest.approx(best.tokens / sum(best.seconds.values()))
    text = str(choice)
    for word in ("plain decoding", "a chain of 3", "tokens/s", "draft 0.900, verify 4.160, extend 0.400"):
        assert word in text


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(1, 8), st.integers(0, 99))
def test_expectation_follows_what_was_observed(rates: list[float], requests: int, seed: int) -> None:
    """After many rounds of one shape its expected tokens are the observed mean, whatever survives."""
    shape, generator = DraftShape(len(rates)), random.Random(seed)
    planner = planner_for([shape, PLAIN])
    lengths: list[int] = []
    for _ in range(600):
        found = []
        for _ in range(requests):
            length = 1
            while length <= shape.steps and generator.random() < rates[length - 1]:
                length += 1
            found.append(length)
        planner.observe(shape, found)
        lengths += found
    estimate = next(each for each in planner.choose((1,)).estimates if each.shape == shape)
    recent = lengths[-128 * requests :]
    assert estimate.tokens == pytest.approx(sum(recent) / len(recent), abs=0.6)
