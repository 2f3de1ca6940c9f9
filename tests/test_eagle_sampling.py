"""Sampled output has the target's distribution whatever is drafted, and acceptance is what theory says.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import eagle_bigrams as bigrams
import pytest
import torch
from eagle_cases import one_state_for_all_tests
from eagle_sampling_cases import (
    CHAIN,
    NEAR,
    OTHER,
    PROMPT,
    PRUNED,
    REQUESTS,
    SETTINGS,
    TABLE,
    TREE2,
    TREE3,
    generated,
    speculators_by_draft,
)
from torch import Tensor

from piecewise_graph.eagle import (
    DraftShape,
    Sampling,
    Speculator,
)


@pytest.fixture(scope="module", autouse=True)
def fresh_process_state() -> Iterator[None]:
    """Of the whole file: its speculators are made once."""
    with one_state_for_all_tests():
        yield


@pytest.fixture(scope="module")
def target(device: torch.device) -> Any:
    return bigrams.bigram_target(TABLE, device)


@pytest.fixture(scope="module")
def speculators(target: Any) -> dict[str, Speculator]:
    return speculators_by_draft(target)


# --- the target's distribution, whatever is drafted

CASES = [
    pytest.param("loose", DraftShape(0), id="plain"),
    pytest.param("loose", CHAIN, id="loose-chain"),
    pytest.param("close", CHAIN, id="close-chain"),
    pytest.param("hidden", CHAIN, id="hidden-chain"),
    pytest.param("loose", TREE2, id="loose-tree2"),
    pytest.param("close", TREE3, id="close-tree3"),
    pytest.param("loose", PRUNED, id="loose-pruned"),
]


@pytest.mark.parametrize("draft, shape", CASES)
def test_tokens_have_the_targets_distribution(
    speculators: dict[str, Speculator], draft: str, shape: DraftShape
) -> None:
    """After one token, after two (no number is used twice), and of the first two over all requests."""
    tokens = generated(speculators[draft], [Sampling(1.0)] * REQUESTS, 24, shape, batches=3)
    probs = bigrams.probabilities(TABLE, Sampling(1.0))
    for memory in (1, 2):
        rows = tokens[:, len(PROMPT) - memory :]
        distance = bigrams.transition_distance(rows, probs, memory)
        assert distance < bigrams.transition_bound(rows, probs, memory)
    joint = probs[PROMPT[-1]][:, None] * probs
    first = tokens[:, len(PROMPT) :]
    assert bigrams.joint_distance(first, joint) < bigrams.joint_bound(joint, len(first))


@pytest.mark.parametrize("draft, shape", CASES)
def test_every_setting_has_its_distribution_in_one_batch(
    speculators: dict[str, Speculator], draft: str, shape: DraftShape
) -> None:
    each = REQUESTS // len(SETTINGS)
    mixture = [sampling for sampling in SETTINGS for _ in range(each)]
    tokens = generated(speculators[draft], mixture, 40, shape, batches=2)
    tokens = tokens.view(2, len(SETTINGS), each, -1).transpose(0, 1).flatten(1, 2)[..., len(PROMPT) - 1 :]
    for sampling, rows in zip(SETTINGS, tokens, strict=True):
        probs = bigrams.probabilities(TABLE, sampling)
        distance = bigrams.transition_distance(rows, probs)
        if (probs > 0).sum() == len(probs):  # nothing is left to chance
            assert distance == 0
        assert distance < bigrams.transition_bound(rows, probs)


@pytest.mark.parametrize(
    "wrong", [OTHER, NEAR, TABLE / 1.3, TABLE / 0.8], ids=["loose", "close", "warm", "cold"]
)
def test_the_bound_has_teeth(speculators: dict[str, Speculator], wrong: Tensor) -> None:
    """As many tokens as above would give away the drafts' distributions, and a wrong temperature."""
    tokens = generated(speculators["loose"], [Sampling(1.0)] * REQUESTS, 24, CHAIN, batches=3)
    tokens = tokens[:, len(PROMPT) - 1 :]
    probs = bigrams.probabilities(wrong, Sampling(1.0))
    assert bigrams.transition_distance(tokens, probs) > bigrams.transition_bound(tokens, probs)


def test_an_acceptance_without_test_shows(target: Any) -> None:
    """Of drafts that are all accepted, S of S + 1 tokens have the draft's distribution."""
    draft = bigrams.bigram_draft(target, OTHER)
    believing = bigrams.speculator(target, draft, [CHAIN], synthetic=CHAIN.steps + 1)
    tokens = generated(believing, [Sampling(1.0)] * REQUESTS, 24, CHAIN)
    right, drafted = (bigrams.probabilities(table, Sampling(1.0)) for table in (TABLE, OTHER))
    all_tokens = tokens[:, len(PROMPT) - 1 :]
    bound = bigrams.transition_bound(all_tokens, right)
    assert bigrams.transition_distance(all_tokens, right) > bound
    rounds = tokens[:, len(PROMPT) :].unfold(1, CHAIN.steps + 1, CHAIN.steps + 1).flatten(0, 1)
    assert bigrams.transition_distance(rounds, drafted) < bigrams.transition_bound(rounds, drafted)
    assert bigrams.transition_distance(rounds, right) > bound


# --- how much is accepted


def acceptance(
    probs: Tensor, drafted: Tensor, shape: DraftShape, position: int, root: int, before: int, reads: str
) -> float:
    """Chance that a draft is accepted up to `position`, 0 being the first, after `before` and `root`.

    A drawn token passes with min(1, p / q), so min(p, q) is the chance that it is drawn and passes; a chosen
    one passes with p.
    """
    if position < 0:
        return 1.0
    proposed = drafted[root if reads == "token" else before]
    passed = torch.minimum(probs[root], proposed)
    if shape.is_tree:
        passed = torch.zeros_like(passed).scatter(
            0, (best := proposed.topk(shape.topk).indices), probs[root][best]
        )
    return sum(
        chance
        * acceptance(probs, drafted, shape, position - 1, token, token if reads == "token" else before, reads)
        for token, chance in enumerate(passed.tolist())
        if chance
    )


class TestAcceptance:
    @pytest.mark.parametrize("draft", ["loose", "close", "hidden"])
    @pytest.mark.parametrize("shape", [CHAIN, TREE2, TREE3], ids=str)
    @pytest.mark.parametrize(
        "sampling", [Sampling(1.0), Sampling(1.4, top_k=5, top_p=0.9)], ids=["all", "some"]
    )
    def test_is_what_theory_says(
        self, speculators: dict[str, Speculator], draft: str, shape: DraftShape, sampling: Sampling
    ) -> None:
        """At every position, over the contexts that the first rounds were in."""
        probs = bigrams.probabilities(TABLE, sampling)
        table = {"loose": OTHER, "close": NEAR, "hidden": OTHER}[draft]
        # A tree's children are chosen from all that the draft knows.
        drafted = bigrams.probabilities(table, Sampling(1.0) if shape.is_tree else sampling)
        reads = "hidden" if draft == "hidden" else "token"
        chances = {
            (before, root, i): acceptance(probs, drafted, shape, i, root, before, reads)
            for before in range(len(probs))
            for root in range(len(probs))
            for i in range(shape.steps)
        }
        wanted, found, count = torch.zeros(shape.steps), torch.zeros(shape.steps), 0
        options = {"sampling": bigrams.seeded(sampling, REQUESTS), "shape": shape}
        for had, lengths in bigrams.first_rounds(speculators[draft], [PROMPT] * REQUESTS, 4, **options):
            for (*_, before, root), length in zip(had, lengths, strict=True):
                wanted += torch.tensor([chances[before, root, i] for i in range(shape.steps)])
                found += torch.arange(shape.steps) < length - 1
                count += 1
        assert ((found - wanted).abs() / count < bigrams.mean_bound(count)).all()

    @pytest.mark.parametrize("sampling", SETTINGS, ids=str)
    def test_a_chain_of_the_target_itself_is_accepted_whole(
        self, speculators: dict[str, Speculator], sampling: Sampling
    ) -> None:
        check_all_accepted(speculators["same"], bigrams.seeded(sampling, 64), CHAIN)

    @pytest.mark.parametrize("shape", [TREE2, TREE3], ids=str)
    def test_a_tree_of_the_target_itself_holds_the_greedy_path(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        check_all_accepted(speculators["same"], [Sampling()] * 8, shape)

    def test_as_many_children_as_tokens_are_accepted_whole(self, target: Any) -> None:
        """The children have all of the target's mass, whatever the draft thinks of them."""
        shape = DraftShape(1, bigrams.VOCABULARY, 1 + bigrams.VOCABULARY)
        tree = bigrams.speculator(target, bigrams.bigram_draft(target, OTHER), [shape], max_requests=64)
        check_all_accepted(tree, bigrams.seeded(Sampling(1.3), 64), shape)


def check_all_accepted(speculator: Speculator, samplings: list[Sampling], shape: DraftShape) -> None:
    prompts = [[index % bigrams.VOCABULARY] for index in range(len(samplings))]
    _, statistics = speculator.generate(
        prompts, max_new_tokens=25, sampling=samplings, shape=shape, return_stats=True
    )
    assert statistics.mean_acceptance_length == shape.steps + 1
    assert statistics.acceptance_rates == (1.0,) * shape.steps
