"""Synthetic acceptance, and the statistics of drafts.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import eagle_bigrams as bigrams
import pytest
import torch
from eagle_cases import one_state_for_all_tests
from hypothesis import given, strategies as st

from piecewise_graph.eagle import DraftShape, Sampling, Speculator, SpeculatorError, Statistics
from piecewise_graph.eagle.rounds.synthetic import Synthetic
from piecewise_graph.eagle.statistics import Counts

CHAIN, TREE, WIDE, PRUNED = DraftShape(3), DraftShape(3, 2), DraftShape(3, 3), DraftShape(3, 3, 8)
SHAPES = (CHAIN, TREE, WIDE, PRUNED, DraftShape(0))
REQUESTS, NEW_TOKENS, PROMPT = 256, 50, [5, 2]


@pytest.fixture(scope="module", autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Of the whole file: its models are made once."""
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def models(device: torch.device) -> tuple[Any, Any]:
    """A target of eight tokens and a draft whose trees are awkward."""
    target = bigrams.bigram_target(bigrams.random_table(1), device)
    return target, bigrams.bigram_draft(target, awkward_table())


def awkward_table() -> torch.Tensor:
    """The best child of an even token leads nowhere, the second best goes deep; and trees hold all tokens."""
    table = torch.zeros(bigrams.VOCABULARY, bigrams.VOCABULARY)
    for token in range(bigrams.VOCABULARY):
        for step, logit in ((2, 0.3), (1, 0.2), (4, 0.1)) if token % 2 == 0 else ((2, 5), (1, 1), (4, 0.5)):
            table[token, (token + step) % bigrams.VOCABULARY] = logit
    return table


def synthetic_speculator(
    models: tuple[Any, Any], synthetic: float | Sequence[float] | None, **options: Any
) -> Speculator:
    return bigrams.speculator(*models, SHAPES, synthetic=synthetic, max_seq_len=80, **options)


# --- rates


class TestRates:
    @given(st.integers(1, 9), st.floats(0, 1))
    def test_of_a_mean_sum_to_it(self, steps: int, share: float) -> None:
        mean = 1 + share * steps
        found = Synthetic.of(mean, steps)
        assert len(found.rates) == steps
        assert found.accept_length == pytest.approx(mean)

    @given(st.integers(2, 9), st.floats(0.05, 1))
    def test_of_a_mean_fall_by_the_same_factor(self, steps: int, share: float) -> None:
        """Every position is as likely as the one before, given that one."""
        rates = Synthetic.of(1 + share * steps, steps).rates
        for before, rate in pairwise(rates):
            assert rate == pytest.approx(before * rates[0])

    def test_at_both_ends(self) -> None:
        assert Synthetic.of(5, 4).rates == (1.0,) * 4
        assert Synthetic.of(1.0, 4).rates == pytest.approx((0.0,) * 4)

    def test_as_given(self) -> None:
        """More than there are steps: speculators have shapes of several depths."""
        found = Synthetic.of([0.9, 0.5, 0.5, 0.0], 3)
        assert found.rates == (0.9, 0.5, 0.5)
        assert found.accept_length == pytest.approx(2.9)

    @pytest.mark.parametrize(
        "wanted, what",
        [
            (0.9, "a mean of 0.9 tokens from 3 steps"),
            (4.1, "a mean of 4.1 tokens from 3 steps"),
            (math.nan, "a mean of nan tokens from 3 steps"),
            ((0.9, 0.5), "2 rates for 3 steps"),
            ((), "0 rates for 3 steps"),
            ((0.5, 0.6, 0.1), r"\(0.5, 0.6, 0.1\)"),
            ((1.1, 0.6, 0.1), r"\(1.1, 0.6, 0.1\)"),
            ((0.5, 0.1, -0.1), r"\(0.5, 0.1, -0.1\)"),
            ((0.5, math.nan, 0.1), r"\(0.5, nan, 0.1\)"),
        ],
    )
    def test_that_cannot_be_are_refused_at_once(
        self, models: tuple[Any, Any], wanted: float | tuple[float, ...], what: str
    ) -> None:
        """By the speculator, before it serves anybody."""
        with pytest.raises(SpeculatorError, match=f"these are no acceptance rates: {what}"):
            Synthetic.of(wanted, 3)
        with pytest.raises(SpeculatorError, match=f"these are no acceptance rates: {what}"):
            bigrams.speculator(*models, [CHAIN], synthetic=wanted).generate([PROMPT], max_new_tokens=4)

    def test_must_fit_the_shape(self, models: tuple[Any, Any]) -> None:
        made = bigrams.speculator(*models, [CHAIN, DraftShape(2)], synthetic=3.5)
        with pytest.raises(SpeculatorError, match=r"a mean of 3\.5 tokens from 2 steps"):
            made.generate([PROMPT], shape=2, max_new_tokens=4)

    def test_do_not_matter_to_plain_decoding(self, models: tuple[Any, Any]) -> None:
        """Nothing is drafted, so nothing is accepted."""
        plain = bigrams.speculator(*models, [0], synthetic=9.0, max_requests=2)
        wanted = bigrams.speculator(*models, [0], max_requests=2)
        assert plain.generate([PROMPT], max_new_tokens=9) == wanted.generate([PROMPT], max_new_tokens=9)


# --- what comes of it


def run(
    speculator: Speculator, shape: DraftShape, sampling: Any = None, requests: int = REQUESTS
) -> Statistics:
    samplings = bigrams.seeded(Sampling(), requests) if sampling is None else sampling
    tokens, statistics = speculator.generate(
        [PROMPT] * requests, max_new_tokens=NEW_TOKENS, sampling=samplings, shape=shape, return_stats=True
    )
    assert all(0 <= token < bigrams.VOCABULARY for row in tokens for token in row)
    return statistics


def share_bound(statistics: Statistics) -> float:
    """How far a share of rounds may stray from its rate.

    A request stops when it has its tokens, which says something about its last rounds. So this is the bound
    of Azuma and Hoeffding on the martingale's maximum, over as many rounds as there could have been.
    """
    rounds = REQUESTS * NEW_TOKENS
    return bigrams.mean_bound(rounds) * rounds / statistics.total.num_drafts


@pytest.fixture(scope="module")
def of_a_mean(models: tuple[Any, Any]) -> Speculator:
    return synthetic_speculator(models, 2.5, batch_sizes=(8, REQUESTS))


@pytest.fixture(scope="module")
def of_rates(models: tuple[Any, Any]) -> Speculator:
    return synthetic_speculator(models, (0.9, 0.5, 0.4), batch_sizes=(8, REQUESTS))


@pytest.mark.parametrize("shape", [CHAIN, TREE, WIDE, PRUNED], ids=str)
class TestSyntheticAcceptance:
    def test_the_mean_is_what_was_asked_for(self, of_a_mean: Speculator, shape: DraftShape) -> None:
        statistics = run(of_a_mean, shape)
        tolerance = shape.steps * share_bound(statistics)
        assert statistics.mean_acceptance_length == pytest.approx(2.5, abs=tolerance)
        assert statistics.synthetic == pytest.approx(2.5)

    def test_so_is_every_position(self, of_rates: Speculator, shape: DraftShape) -> None:
        statistics = run(of_rates, shape)
        tolerance = share_bound(statistics)
        assert statistics.acceptance_rates == pytest.approx((0.9, 0.5, 0.4), abs=tolerance)
        assert statistics.synthetic == pytest.approx(2.8)

    def test_sampled_requests_are_accepted_like_greedy_ones(
        self, of_rates: Speculator, shape: DraftShape
    ) -> None:
        warm = run(of_rates, shape, bigrams.seeded(Sampling(1.2, top_k=4), 8), requests=8)
        assert warm.requests == run(of_rates, shape, requests=8).requests

    def test_one_accepts_nothing_and_all_everything(self, models: tuple[Any, Any], shape: DraftShape) -> None:
        for wanted, position in ((1.0, 0.0), (shape.steps + 1, 1.0)):
            statistics = run(synthetic_speculator(models, wanted, max_requests=8), shape, requests=8)
            assert statistics.mean_acceptance_length == wanted
            assert statistics.acceptance_rates == (position,) * shape.steps

    def test_requests_differ_without_seeds_of_their_own(
        self, of_a_mean: Speculator, shape: DraftShape
    ) -> None:
        """A batch in lockstep would measure one request many times."""
        statistics = run(of_a_mean, shape, Sampling())
        assert len({counts.num_rounds for counts in statistics.requests}) > 5
        tolerance = shape.steps * share_bound(statistics)
        assert statistics.mean_acceptance_length == pytest.approx(2.5, abs=tolerance)


def test_a_graph_accepts_the_same(models: tuple[Any, Any], of_rates: Speculator) -> None:
    modes = {"draft": "full", "verify": "full", "extend": "full", "prefill": "eager"}
    graphs = synthetic_speculator(models, (0.9, 0.5, 0.4), graphs=modes, max_requests=8)
    for shape in (CHAIN, PRUNED):
        assert run(graphs, shape, requests=8).requests == run(of_rates, shape, requests=8).requests


# --- what is said of it


class TestStatistics:
    def test_say_that_they_are_synthetic(self, of_rates: Speculator) -> None:
        statistics = run(of_rates, CHAIN, requests=8)
        assert str(statistics).startswith("SYNTHETIC acceptance: a mean of 2.80 was set, not measured\n")
        assert statistics.to_dict()["synthetic_acceptance_length"] == pytest.approx(2.8)

    def test_say_nothing_of_real_acceptance(self, models: tuple[Any, Any], of_rates: Speculator) -> None:
        """The target decides where there are no drafts, or no synthetic acceptance."""
        real = synthetic_speculator(models, None, max_requests=8)
        for statistics in (run(of_rates, DraftShape(0), requests=8), run(real, CHAIN, requests=8)):
            assert "SYNTHETIC" not in str(statistics)
            assert statistics.synthetic is statistics.to_dict()["synthetic_acceptance_length"] is None

    def test_of_plain_decoding(self, of_rates: Speculator) -> None:
        """A round per token but the first, which prefill makes."""
        statistics = run(of_rates, DraftShape(0))
        total = statistics.total
        assert total.num_rounds == total.num_tokens == REQUESTS * (NEW_TOKENS - 1)
        assert (total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens) == (0, 0, 0)
        assert (statistics.mean_acceptance_length, statistics.acceptance_rates) == (1.0, ())

    @pytest.mark.parametrize("shape", [CHAIN, PRUNED], ids=str)
    def test_of_each_request_are_what_it_went_through(self, of_rates: Speculator, shape: DraftShape) -> None:
        """Rounds taken one by one add up."""
        options = {"sampling": bigrams.seeded(Sampling(), 8), "shape": shape}
        wanted = [Counts() for _ in range(8)]
        for _, lengths in bigrams.first_rounds(of_rates, [PROMPT] * 8, 5, **options):
            for counts, length in zip(wanted, lengths, strict=True):
                counts.add_round(shape.steps, shape.nodes - 1, length)
        limits = [1 + counts.num_tokens for counts in wanted]
        tokens, statistics = of_rates.generate(
            [PROMPT] * 8, max_new_tokens=limits, return_stats=True, **options
        )
        assert statistics.requests == tuple(wanted)
        assert [len(row) for row in tokens] == limits

    def test_count_the_whole_last_round(self, models: tuple[Any, Any]) -> None:
        """Four tokens a round: of the second one only the first token is still wanted."""
        options = {"max_new_tokens": 6, "shape": CHAIN, "return_stats": True}
        tokens, statistics = synthetic_speculator(models, 4.0, max_requests=1).generate([PROMPT], **options)
        assert len(tokens[0]) == 6
        assert statistics.total == Counts(2, 6, 6, [2, 2, 2], num_rounds=2, num_tokens=8)

    def test_of_a_request_that_prefill_finishes(self, of_rates: Speculator) -> None:
        _, statistics = of_rates.generate([PROMPT], max_new_tokens=1, shape=CHAIN, return_stats=True)
        assert statistics.total == Counts()
        assert statistics.mean_acceptance_length == 1.0


ROUNDS = st.integers(0, 5).flatmap(
    lambda steps: st.tuples(st.just(steps), st.integers(steps, 9), st.integers(1, steps + 1))
)


class TestArithmetic:
    @given(st.lists(st.lists(ROUNDS, max_size=8), max_size=4))
    def test_is_by_formula(self, requests: list[list[tuple[int, int, int]]]) -> None:
        """Steps, drafted tokens and accept length (bonus included) of each round of each request."""
        found = Statistics(tuple(map(counted, requests)))
        drafted = [round for rounds in requests for round in rounds if round[0]]
        lengths = [length for rounds in requests for _, _, length in rounds]
        total, drafts = found.total, len(drafted)
        assert total.num_rounds == len(lengths)
        assert total.num_tokens == sum(lengths)
        assert total.num_drafts == drafts
        assert total.num_draft_tokens == sum(tokens for _, tokens, _ in drafted)
        assert total.num_accepted_tokens == sum(length - 1 for _, _, length in drafted)
        deepest = max((steps for steps, _, _ in drafted), default=0)
        wanted = [sum(length > i + 1 for _, _, length in drafted) / drafts for i in range(deepest)]
        assert found.acceptance_rates == pytest.approx(wanted)
        mean = sum(length for _, _, length in drafted) / drafts if drafts else 1.0
        assert found.mean_acceptance_length == pytest.approx(mean)
        assert found.mean_acceptance_length == pytest.approx(1 + sum(found.acceptance_rates))

    @given(st.lists(ROUNDS, max_size=6), st.lists(ROUNDS, max_size=6))
    def test_adding_counts_is_counting_both(self, one: list[Any], other: list[Any]) -> None:
        total = counted(one)
        total += counted(other)
        assert total == counted(one + other)

    def test_totals_leave_the_requests_as_they_are(self) -> None:
        statistics = Statistics((counted([(3, 3, 2)]), counted([(3, 3, 4)])))
        assert statistics.total == statistics.total == counted([(3, 3, 2), (3, 3, 4)])

    def test_prints_what_the_field_prints(self) -> None:
        statistics = Statistics((counted([(2, 6, 3), (2, 6, 1)]), counted([(2, 6, 2)])))
        assert str(statistics).splitlines() == [
            "num_drafts: 3",
            "num_draft_tokens: 18",
            "num_accepted_tokens: 3",
            "mean acceptance length: 2.00",
            "acceptance at token 0: 0.67",
            "acceptance at token 1: 0.33",
        ]

    def test_to_dict_is_plain(self) -> None:
        statistics = Statistics((counted([(2, 6, 3), (2, 6, 1), (0, 0, 1)]),), synthetic=2.0)
        wanted = {
            "num_rounds": 3,
            "num_tokens": 5,
            "num_drafts": 2,
            "num_draft_tokens": 12,
            "num_accepted_tokens": 2,
            "mean_acceptance_length": 2.0,
            "acceptance_rates": [0.5, 0.5],
            "synthetic_acceptance_length": 2.0,
        }
        assert json.loads(json.dumps(statistics.to_dict())) == wanted


def counted(rounds: Sequence[tuple[int, int, int]]) -> Counts:
    counts = Counts()
    for steps, tokens, length in rounds:
        counts.add_round(steps, tokens, length)
    return counts
