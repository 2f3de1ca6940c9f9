"""Targets and drafts whose distributions are known exactly, and how far samples may stray from them.

A Llama layer whose output projections are zero passes its residual on, so a model of such layers is a table:
the logits after a token are a row of it, whatever came before. An EAGLE-1 head that copies the embedding (or
the hidden state) through `fc` is a table, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import piecewise_graph as pg
from piecewise_graph.eagle import DraftConfig, DraftModel, DraftShape, Sampling, Speculator

VOCABULARY = HIDDEN = 8
FAILURE = 1e-6  # chance that a bound of this file is exceeded by luck
EAGER = {"compiler": "eager"}


def random_table(seed: int, scale: float = 1.5) -> Tensor:
    """Logits `[V, V]`: row = the token before."""
    return scale * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def bigram_target(table: Tensor, device: torch.device) -> Any:
    """A Llama whose logits after token t are `table[t]`."""
    pg.register_attention()
    model = LlamaForCausalLM(llama_config(layers=1, rms_norm_eps=1e-12))
    with torch.no_grad():
        # Rows of RMS 1, which no norm changes.
        model.get_input_embeddings().weight.copy_(torch.eye(VOCABULARY) * HIDDEN**0.5)
        _tabulate(model.lm_head, table)
        _pass_on(model.model.layers[0])
    return model.eval().requires_grad_(False).to(device)


def bigram_draft(target: Any, table: Tensor | None = None, *, reads: str = "token") -> DraftModel:
    """An EAGLE-1 head whose logits are `table[t]`; None = the target's own.

    Args:
        reads: "token": t is the token before, as in the target. "hidden": the one before that, which comes
            as a feature of the target; further steps of a draft keep it.
    """
    config = DraftConfig.for_target(target.config, "eagle1")
    head = target.get_output_embeddings() if table is None else None
    shared = {"embed_tokens": target.get_input_embeddings(), "lm_head": head}
    draft = DraftModel(config, **shared, device=target.device).eval().requires_grad_(False)
    copied, dropped = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
    draft.fc.weight.copy_(torch.cat([copied, dropped] if reads == "token" else [dropped, copied], 1))
    _pass_on(draft.layers[0])
    if table is not None:
        _tabulate(draft.lm_head, table)
    return draft


def llama_config(*, attention: str = "piecewise", **changes: Any) -> LlamaConfig:
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_hidden_layers": changes.pop("layers", 2),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "attn_implementation": attention,
    }
    return LlamaConfig(**(fields | changes))


def _tabulate(head: Any, table: Tensor) -> None:
    head.weight.copy_(table.T / HIDDEN**0.5)


def _pass_on(layer: Any) -> None:
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        nn.init.zeros_(projection.weight)


class AlwaysSynthetic(Speculator):
    """Uses the same synthetic acceptance in every generation."""

    synthetic: Any = None

    def generate(self, prompts: Any, **asked: Any) -> Any:
        return super().generate(prompts, **({"synthetic": self.synthetic} | asked))


def speculator(
    target: Any, draft: Any, shapes: Sequence[DraftShape | int], synthetic: Any = None, **options: Any
) -> AlwaysSynthetic:
    """Quick to make: phases run as they are written, and one batch size serves all."""
    max_requests = options.setdefault("max_requests", 256)
    defaults = {
        "batch_sizes": (max_requests,), "max_seq_len": 64, "graphs": "eager",
        "options": EAGER, "draft_options": EAGER,
    }  # fmt: skip
    made = AlwaysSynthetic(target, draft, shapes=shapes, **(defaults | options))
    made.synthetic = synthetic
    return made


def probabilities(table: Tensor, sampling: Sampling) -> Tensor:
    """float64 rows that a request samples from, token by token as the words say it."""
    return torch.tensor([_row(row.double().tolist(), sampling) for row in table], dtype=torch.float64)


def _row(logits: list[float], sampling: Sampling) -> list[float]:
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.greedy:
        return [float(token == ranked[0]) for token in range(len(logits))]
    kept = ranked[: sampling.top_k or None]
    weights = {t: math.exp((logits[t] - logits[ranked[0]]) / sampling.temperature) for t in kept}
    goal = sampling.top_p * sum(weights.values()) if sampling.top_p < 1 else math.inf
    reached, nucleus = 0.0, list[int]()
    for token in kept:
        if nucleus and reached >= goal:
            break
        nucleus.append(token)
        reached += weights[token]
    return [weights[token] / reached if token in nucleus else 0.0 for token in range(len(logits))]


def transition_distance(tokens: Tensor, probs: Tensor, memory: int = 1) -> float:
    """Total variation distance between what follows `memory` tokens of `tokens [n, length]` and `probs`.

    Every context counts as often as it was visited. Infinite where something came that never should.

    Args:
        probs: `[V, V]`, of what follows each token.
    """
    width = probs.shape[0]
    windows = tokens.unfold(1, memory + 1, 1).reshape(-1, memory + 1)
    code = (windows * width ** torch.arange(memory, -1, -1)).sum(1)
    counts = code.bincount(minlength=width ** (memory + 1)).view(-1, width).double()
    expected = counts.sum(1, keepdim=True) * probs.repeat(width ** (memory - 1), 1)
    return _distance(counts, expected)


def transition_bound(tokens: Tensor, probs: Tensor, memory: int = 1) -> float:
    """Noise of `transition_distance`."""
    cells = int((probs > 0).sum()) * probs.shape[0] ** (memory - 1)
    return martingale_bound(cells, tokens.shape[0] * (tokens.shape[1] - memory))


def martingale_bound(cells: int, samples: int) -> float:
    """What a total variation distance exceeds with probability `FAILURE` at most.

    The distance is the largest excess of any set of cells. Whatever decided the contexts, the excess of one
    set is a martingale with increments in an interval of length 1: Azuma and Hoeffding bound it by t with
    probability 1 - exp(-2 n t²), and there are 2^cells sets.
    """
    return math.sqrt((cells * math.log(2) - math.log(FAILURE)) / (2 * samples))


def joint_distance(tokens: Tensor, joint: Tensor) -> float:
    """Total variation distance between the rows of `tokens [n, m]` and `joint [V, ..., V]`."""
    width, length = joint.shape[0], joint.dim()
    code = (tokens[:, :length] * width ** torch.arange(length - 1, -1, -1)).sum(1)
    return _distance(code.bincount(minlength=joint.numel()).double(), joint.flatten() * len(tokens))


def joint_bound(joint: Tensor, samples: int) -> float:
    """Noise of `joint_distance` of independent samples: its mean (Jensen, cell by cell) and McDiarmid."""
    mean = (joint * (1 - joint) / samples).sqrt().sum() / 2
    return float(mean) + math.sqrt(-math.log(FAILURE) / (2 * samples))


def mean_bound(samples: int) -> float:
    """How far the mean of numbers from an interval of length 1 may stray from theirs (Azuma, two-sided)."""
    return math.sqrt(math.log(2 / FAILURE) / (2 * samples))


def _distance(counts: Tensor, expected: Tensor) -> float:
    if (counts[expected == 0] > 0).any():
        return math.inf
    return float((counts - expected).abs().sum() / 2 / counts.sum())


def seeded(sampling: Sampling, count: int, first: int = 0) -> list[Sampling]:
    """The same for `count` requests, each with a seed of its own."""
    how = (sampling.temperature, sampling.top_k, sampling.top_p)
    return [Sampling(*how, seed=seed) for seed in range(first, first + count)]


def first_rounds(
    speculator: Speculator, prompts: Sequence[Sequence[int]], rounds: int, **options: Any
) -> Iterator[tuple[list[tuple[int, ...]], list[int]]]:
    """For each of the first rounds: what every request had when it began, prompt included, and accepted.

    A request that may have one token more than it has runs one round more, and says what came of it.
    """
    made = [1] * len(prompts)
    for _ in range(rounds):
        wanted = [count + 1 for count in made]
        tokens, statistics = speculator.generate(prompts, max_new_tokens=wanted, return_stats=True, **options)
        before = [(*p, *t[:n]) for p, t, n in zip(prompts, tokens, made, strict=True)]
        after = [1 + counts.num_tokens for counts in statistics.requests]
        yield before, [now - then for now, then in zip(after, made, strict=True)]
        made = after
