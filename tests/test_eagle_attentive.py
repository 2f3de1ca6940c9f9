"""Sampling from a target that attends; and seeds: a request gets the same tokens in any company.

Bounds are those of eagle_bigrams.py: each is exceeded by luck with probability 1e-6 at most.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import eagle_bigrams as bigrams
import pytest
import torch
from eagle_cases import one_state_for_all_tests
from eagle_sampling_cases import (
    BUSHY,
    CHAIN,
    PROMPT,
    REQUESTS,
    TABLE,
    TREE2,
    attentive_heads,
    attentive_target,
    generated,
    speculators_by_draft,
)
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaForCausalLM

from piecewise_graph.eagle import (
    DraftModel,
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


@pytest.fixture(scope="module")
def attentive(device: torch.device) -> Any:
    return attentive_target(device)


@pytest.fixture(scope="module")
def heads(attentive: Any) -> dict[str, DraftModel]:
    return attentive_heads(attentive)


# --- a target that attends


@pytest.fixture(scope="module")
def attentive_speculators(attentive: Any, heads: dict[str, DraftModel]) -> dict[str, Speculator]:
    return {name: bigrams.speculator(attentive, head, [CHAIN, BUSHY]) for name, head in heads.items()}


@pytest.fixture(scope="module")
def dense(attentive: Any) -> Any:
    """The same model with transformers' own attention, on whole sequences."""
    config = type(attentive.config)(**(attentive.config.to_dict() | {"attn_implementation": "eager"}))
    model = LlamaForCausalLM(config).eval().requires_grad_(False).to(attentive.device)
    model.load_state_dict(attentive.state_dict())
    return model


def probabilities_after(dense: Any, tokens: Tensor) -> Tensor:
    """float64 `[n, length, V]`: of what follows each token."""
    logits: Tensor = dense(input_ids=tokens.to(dense.device), use_cache=False).logits
    return logits.double().softmax(-1).cpu()


class DenseDraft:
    """A head on one sequence at a time, with attention over all of it."""

    def __init__(self, head: DraftModel, dense: Any) -> None:
        self.head, self.dense = copy.deepcopy(head), dense
        for layer in self.head.layers:
            layer.self_attn.attend = self._attend

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, **_: Any) -> Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(0, 1)

    def guesses(self, tokens: list[int], path: list[int], count: int) -> list[tuple[float, int]]:
        """The likeliest after `tokens` and a draft's `path`; the target has read `tokens` but the last."""
        ids = torch.tensor(tokens + path, device=self.dense.device)
        read = self.dense(input_ids=ids[None, : len(tokens) - 1], output_hidden_states=True)
        layers = self.head.config.feature_layers or [-1]
        hidden = self.head.project(torch.cat([read.hidden_states[layer][0] for layer in layers], -1))
        for rows in range(len(tokens) - 1, len(ids)):
            out = self.head(ids[1 : rows + 1], torch.arange(rows, device=ids.device), hidden)
            hidden = torch.cat([hidden, out[-1:]])
        best = self.head.logits(out[-1]).softmax(-1).topk(count)
        return list(zip(best.values.tolist(), self.head.to_target(best.indices).tolist(), strict=True))

    def tree(self, tokens: list[int], shape: DraftShape) -> list[list[int]]:
        """Paths that are drafted: EAGLE-2's expansion, then its reranking."""
        branches, candidates = [(1.0, list[int]())], list[tuple[float, list[int]]]()
        for _ in range(shape.steps):
            grown = [
                (score * chance, [*path, token])
                for score, path in branches
                for chance, token in self.guesses(tokens, path, shape.topk)
            ]
            candidates += grown
            branches = sorted(grown, reverse=True)[: shape.topk]
        return [path for _, path in sorted(candidates, reverse=True)[: shape.nodes - 1]]

    def accepted(self, tokens: list[int], shape: DraftShape) -> int:
        """How many tokens of a draft are the target's choices."""
        chosen = list(tokens)
        for _ in range(shape.steps):
            chosen.append(int(probabilities_after(self.dense, torch.tensor([chosen]))[0, -1].argmax()))
        path = chosen[len(tokens) :]
        return max((len(p) for p in self.tree(tokens, shape) if p == path[: len(p)]), default=0)


@pytest.mark.parametrize("shape", [CHAIN, BUSHY], ids=str)
@pytest.mark.parametrize("head", ["eagle1", "eagle3"])
class TestAnAttentiveTarget:
    def test_tokens_have_its_distribution(
        self, dense: Any, attentive_speculators: dict[str, Speculator], head: str, shape: DraftShape
    ) -> None:
        """By token and by rank, each given everything before it; and the first two by enumeration."""
        samplings = [Sampling(1.0)] * REQUESTS
        tokens = generated(attentive_speculators[head], samplings, 16, shape, batches=2)
        probs = probabilities_after(dense, tokens)[:, len(PROMPT) - 1 : -1]
        new = tokens[:, len(PROMPT) :, None]
        order = probs.argsort(dim=-1, descending=True)
        ranks = (order == new).int().argmax(-1, keepdim=True)
        for chances, found in ((probs, new), (probs.gather(-1, order), ranks)):
            counts = found.flatten().bincount(minlength=bigrams.VOCABULARY)
            distance = (counts - chances.sum((0, 1))).abs().sum() / 2 / new.numel()
            assert distance < bigrams.martingale_bound(bigrams.VOCABULARY, new.numel())
        joint = self.first_two(dense)
        assert bigrams.joint_distance(new[..., 0], joint) < bigrams.joint_bound(joint, len(new))

    def first_two(self, dense: Any) -> Tensor:
        prompts = torch.tensor([[*PROMPT, token] for token in range(bigrams.VOCABULARY)])
        probs = probabilities_after(dense, prompts)
        return probs[0, len(PROMPT) - 1][:, None] * probs[:, -1]

    def test_greedy_requests_get_its_choice(
        self, dense: Any, attentive_speculators: dict[str, Speculator], head: str, shape: DraftShape
    ) -> None:
        """Beside sampled ones."""
        samplings = [Sampling(), Sampling(1.2), Sampling(0.8, top_k=2)] * 8
        tokens = generated(attentive_speculators[head], samplings, 24, shape)[::3]
        probs = probabilities_after(dense, tokens)[:, len(PROMPT) - 1 : -1]
        assert probs.argmax(-1).equal(tokens[:, len(PROMPT) :])

    def test_greedy_drafts_are_what_the_head_would_say(
        self,
        heads: dict[str, DraftModel],
        dense: Any,
        attentive_speculators: dict[str, Speculator],
        head: str,
        shape: DraftShape,
    ) -> None:
        """Round by round and token by token: its caches, features and positions are right, beside others."""
        drafter = DenseDraft(heads[head], dense)
        prompts = [[a, b, (a + b) % 8, a][: 2 + a % 3] for a in range(8) for b in range(3)]
        samplings = [Sampling(0.0 if i % 2 else 1.0, seed=i) for i in range(len(prompts))]
        options = {"sampling": samplings, "shape": shape}
        found: list[int] = []
        for had, lengths in bigrams.first_rounds(attentive_speculators[head], prompts, 5, **options):
            greedy = [(list(had[i]), lengths[i] - 1) for i in range(1, len(prompts), 2)]
            assert [drafter.accepted(tokens, shape) for tokens, _ in greedy] == [n for _, n in greedy]
            found += [n for _, n in greedy]
        assert {0, 1} <= set(found)


# --- seeds

POOL = [
    ([3], Sampling(), 12),
    ([1, 2, 3, 4, 5], Sampling(1.0, seed=1), 12),
    ([1, 2, 3, 4, 5], Sampling(1.0, seed=2), 7),
    ([6, 0, 6], Sampling(1.4, top_k=4, seed=1), 12),
    ([7] * 11, Sampling(0.8, top_p=0.8, seed=2**62 - 1), 9),
    ([2, 2], Sampling(1.5, top_k=5, top_p=0.9, seed=7), 1),
    ([4, 1, 4, 1], Sampling(), 10),
    ([0], Sampling(2.0, seed=1), 12),
]


def served(speculator: Speculator, chosen: list[int], shape: DraftShape) -> list[list[int]]:
    """What requests of the pool get together."""
    prompts, samplings, lengths = zip(*(POOL[index] for index in chosen), strict=True)
    tokens: list[list[int]] = speculator.generate(
        prompts, max_new_tokens=lengths, sampling=samplings, shape=shape
    )
    return tokens


@pytest.fixture(scope="module")
def serving(attentive: Any, heads: dict[str, DraftModel]) -> Speculator:
    sizes = {"max_requests": 5, "batch_sizes": (1, 2, 5)}
    return bigrams.speculator(attentive, heads["eagle1"], [CHAIN, TREE2, 0], **sizes)


@pytest.fixture(scope="module")
def alone(serving: Speculator) -> dict[tuple[DraftShape, int], list[int]]:
    return {
        (shape, index): served(serving, [index], shape)[0]
        for shape in serving.shapes
        for index in range(len(POOL))
    }


class TestSeeds:
    @settings(max_examples=25)
    @given(chosen=st.lists(st.integers(0, len(POOL) - 1), min_size=1, max_size=9), which=st.integers(0, 2))
    def test_a_request_gets_the_same_in_any_batch(
        self,
        serving: Speculator,
        alone: dict[tuple[DraftShape, int], list[int]],
        chosen: list[int],
        which: int,
    ) -> None:
        """Padded, crowded, waiting for others to finish, beside itself, beside greedy and filtered ones."""
        shape = serving.shapes[which]
        assert served(serving, chosen, shape) == [alone[shape, index] for index in chosen]

    @pytest.mark.parametrize("graphs", ["full", "piecewise", "compiled"])
    def test_a_request_gets_the_same_in_every_graph_mode(
        self,
        attentive: Any,
        heads: dict[str, DraftModel],
        alone: dict[tuple[DraftShape, int], list[int]],
        graphs: str,
    ) -> None:
        options = {"graphs": graphs, "max_requests": 8, "prefill_rows": 16}
        fast = bigrams.speculator(attentive, heads["eagle1"], [CHAIN, TREE2], **options)
        everyone = list(range(len(POOL)))
        for shape in fast.shapes:
            assert served(fast, everyone, shape) == [alone[shape, index] for index in everyone]
            assert served(fast, everyone[::2], shape) == [alone[shape, index] for index in everyone[::2]]

    @pytest.mark.parametrize("shape", [CHAIN, TREE2, DraftShape(0)], ids=str)
    def test_other_seeds_give_other_tokens(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        tokens = generated(speculators["loose"], [Sampling(1.5)] * 64, 24, shape)
        assert len(tokens.unique(dim=0)) == 64

    @pytest.mark.parametrize("shape", [CHAIN, TREE2], ids=str)
    def test_sampled_neighbours_leave_greedy_requests_alone(
        self, speculators: dict[str, Speculator], shape: DraftShape
    ) -> None:
        """Their tokens, and what was accepted of their drafts."""
        among = [Sampling(), Sampling(1.5), Sampling(1.0, top_k=3)]
        alone, mixed = (
            speculators["close"].generate(
                [PROMPT] * 3, max_new_tokens=30, sampling=samplings, shape=shape, return_stats=True
            )
            for samplings in (Sampling(), among)
        )
        assert alone[0][0] == mixed[0][0]
        assert alone[1].requests[0] == mixed[1].requests[0]
