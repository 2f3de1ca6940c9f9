"""Tables, speculators and requests for tests of sampling."""

from __future__ import annotations

from typing import Any

import eagle_bigrams as bigrams
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

import piecewise_graph as pg
from piecewise_graph.custom_ops.token_choice import uniforms
from piecewise_graph.eagle import (
    DraftConfig,
    DraftModel,
    DraftShape,
    Sampling,
    Speculator,
)

CHAIN, TREE2, TREE3 = DraftShape(3), DraftShape(2, 2), DraftShape(2, 3)
PRUNED, BUSHY = DraftShape(3, 3, 8), DraftShape(3, 4, 20)
LARGEST = 1 - 2**-24  # of the numbers that `uniforms` returns
INT64 = st.integers(-(2**63), 2**63 - 1)
TABLE, OTHER = bigrams.random_table(1), bigrams.random_table(2)
NEAR = TABLE + bigrams.random_table(3, scale=0.5)
REQUESTS, PROMPT = 256, [5, 2]
SETTINGS = (
    Sampling(),
    Sampling(0.7),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_k=3),
    Sampling(1.3, top_p=0.7),
    Sampling(1.5, top_k=4, top_p=0.8),
    Sampling(0.7, top_k=1),
)


def speculators_by_draft(target: Any) -> dict[str, Speculator]:
    """By their drafts: "loose" knows nothing of the target, "close" errs a little, "same" is the target."""
    tables = {"loose": OTHER, "close": NEAR, "same": None}
    drafts = {name: bigrams.bigram_draft(target, table) for name, table in tables.items()}
    drafts["hidden"] = bigrams.bigram_draft(target, OTHER, reads="hidden")
    shapes = (CHAIN, TREE2, TREE3, PRUNED, DraftShape(0))
    return {name: bigrams.speculator(target, draft, shapes) for name, draft in drafts.items()}


def numbers(device: torch.device, seed: Any, length: Any, use: Any) -> Tensor:
    """float64 on the CPU; each argument a number or a range."""

    def tensor(value: Any) -> Tensor:
        return torch.as_tensor(list(value) if isinstance(value, range) else value, device=device)

    return uniforms(tensor(seed), tensor(length), tensor(use)).double().cpu()


def generated(
    speculator: Speculator, samplings: list[Sampling], new: int, shape: DraftShape, batches: int = 1
) -> Tensor:
    """`[n, len(PROMPT) + new]` tokens; every batch has seeds of its own."""
    rows: list[list[int]] = []
    for batch in range(batches):
        fresh = [
            Sampling(s.temperature, s.top_k, s.top_p, seed=batch * len(samplings) + index)
            for index, s in enumerate(samplings)
        ]
        tokens = speculator.generate([PROMPT] * len(fresh), max_new_tokens=new, sampling=fresh, shape=shape)
        rows += [PROMPT + row for row in tokens]
    return torch.tensor(rows)


def attentive_target(device: torch.device) -> Any:
    """Two layers, whose attention and MLP decide as much as the token does."""
    pg.register_attention()
    torch.manual_seed(9)
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(bigrams.llama_config(**fields, initializer_range=0.4))
    return model.eval().requires_grad_(False).to(device)


def attentive_heads(attentive: Any) -> dict[str, DraftModel]:
    """Random EAGLE-1 and EAGLE-3 heads; the latter can say five of the eight tokens only."""
    torch.manual_seed(17)
    ids = torch.tensor([0, 2, 3, 5, 7])
    embedding = {"embed_tokens": attentive.get_input_embeddings(), "device": attentive.device}
    first = DraftConfig.for_target(attentive.config, "eagle1")
    third = DraftConfig.for_target(attentive.config, "eagle3", draft_vocab_size=len(ids))
    made = {
        "eagle1": DraftModel(first, lm_head=attentive.get_output_embeddings(), **embedding),
        "eagle3": DraftModel(third, d2t=ids - torch.arange(len(ids)), **embedding),
    }
    for head in made.values():
        head.eval().requires_grad_(False)
        for name, weight in head.named_parameters():
            if "proj" in name or "fc" in name:
                weight.mul_(2.5)  # so that what it attends to, and the hidden state, matter
    return made
