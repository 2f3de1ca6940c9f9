"""Every causal LM of transformers as a target: greedy as by itself, or refused when it is handed in."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from eagle_cases import resources
from test_served_families import ELSEWHERE, FAMILIES, SERVED, scale_up
from tiny_models import build

import piecewise_graph as pg
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.eagle import Speculator, SpeculatorError

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")
UNKNOWN = {name for name, (error, _) in ELSEWHERE.items() if error is KeyError}  # to transformers' table
PROMPTS = (1, 21, 5)  # the window is 16, a prefill batch has 7 rows
NEW = 4
TIE = 1e-3  # two sums of the same numbers may differ by so much


def losses(model: Any, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """How far below the best logit of the plain model each token of the answer is."""
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.amax(-1) - logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]


def speculator_of(model: Any) -> Speculator:
    return Speculator(
        model, None, shapes=[0], max_requests=2, max_seq_len=64, page_size=4, graphs="eager", prefill_rows=7,
        num_pages=24,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in UNKNOWN])
def test_a_family_is_greedy_or_refused_when_the_speculator_is_made(name: str) -> None:
    pg.register_attention()
    model, plain = build(name, "piecewise"), build(name)
    scale_up(model)
    scale_up(plain)
    try:
        speculator = speculator_of(model)
    except (SpeculatorError, AttentionError, CacheError):
        assert name not in SERVED
        return
    chance = random.Random(0)
    prompts = [[chance.randrange(8, 120) for _ in range(count)] for count in PROMPTS]
    answers = speculator.generate(prompts, max_new_tokens=NEW)
    weights = resources(speculator).weights
    weights.hold()  # as if graphs had been captured: a generation changes nothing that they take for granted
    assert speculator.generate(prompts, max_new_tokens=NEW) == answers
    weights.check()
    assert [len(answer) for answer in answers] == [NEW] * len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert losses(plain, prompt, answer).max() < TIE


def test_what_stands_around_a_decoder_may_not_change_what_it_is_given() -> None:
    pg.register_attention()
    model = build("gemma3", "piecewise")
    body = model.model
    body.forward = lambda **given: type(body).forward(
        body, **given | {"position_ids": 2 * given["position_ids"]}
    )
    with pytest.raises(SpeculatorError, match=r"Gemma3ForConditionalGeneration .* compute something else"):
        speculator_of(model)


def test_a_head_that_does_not_run_alone_is_refused() -> None:
    pg.register_attention()
    model = build("llama", "piecewise")

    class Reading(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            assert len(self.model.layers)
            return super().forward(*args, **kwargs)

    model.__class__ = Reading
    with pytest.raises(SpeculatorError, match=r"Reading cannot run as its text decoder.*'layers'"):
        speculator_of(model)
