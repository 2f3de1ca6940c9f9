"""The target in two parts: its decoder over all rows, and its head over those that are asked for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch import nn

from piecewise_graph.eagle import SpeculatorError, TargetModel

VOCABULARY, ROWS = 97, 7
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_LIKE = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
# What lies between the decoder's output and the logits is another thing in each.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": LLAMA_LIKE,
    "Gemma2": LLAMA_LIKE | {"head_dim": 8, "final_logit_softcapping": 0.1},
    "Cohere": LLAMA_LIKE | {"logit_scale": 0.25},
    "Granite": LLAMA_LIKE | {"logits_scaling": 3.0},
    "Mixtral": LLAMA_LIKE | {"num_local_experts": 4},
    "OPT": SIZES | {"ffn_dim": 64, "word_embed_proj_dim": 16},
    "GPTNeoX": SIZES | {"intermediate_size": 64},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "ModernBertDecoder": SIZES | {"intermediate_size": 64, "pad_token_id": 0},  # its head is named `decoder`
}


def model_of(family: str) -> Any:
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=ROWS + 2))
@torch.no_grad()
def test_the_head_gives_the_logits_of_the_rows_that_are_asked_for(family: str, rows: list[int]) -> None:
    model, ids, places = model_of(family), torch.randint(3, VOCABULARY, (1, ROWS)), torch.arange(ROWS)[None]
    target = TargetModel(model)
    hidden, features = target(ids, places)
    whole = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    torch.testing.assert_close(target.head(hidden[rows]), whole[rows])
    assert features is hidden


@torch.no_grad()
def test_features_are_the_inputs_of_layers_or_what_the_head_reads() -> None:
    model, ids, places = model_of("Llama"), torch.randint(3, VOCABULARY, (1, ROWS)), torch.arange(ROWS)[None]
    seen = model(input_ids=ids, position_ids=places, use_cache=False, output_hidden_states=True).hidden_states
    target = TargetModel(model, (1, 0))
    hidden, features = target(ids, places)
    torch.testing.assert_close(features, torch.cat([seen[1][0], seen[0][0]], -1))
    torch.testing.assert_close(hidden, seen[-1][0])
    assert features.shape[1] == target.feature_size
    assert TargetModel(model_of("OPT")).feature_size == FAMILIES["OPT"]["word_embed_proj_dim"]


@torch.no_grad()
def test_a_model_that_answers_for_its_decoder_is_taken_apart_all_the_same() -> None:
    """As Mllama does. A forward of its own is that of the whole model, which the head must not run."""
    model = model_of("Llama")
    model.get_decoder = lambda: model
    whole = model(input_ids=torch.arange(3)[None], use_cache=False).logits[0]
    model.forward = functools.partial(type(model).forward, model)
    target = TargetModel(model)
    hidden, _ = target(torch.arange(3)[None], torch.arange(3)[None])
    torch.testing.assert_close(target.head(hidden), whole)


def test_the_parts_hold_all_weights_of_the_model_and_no_copies() -> None:
    model = model_of("Llama")
    target = TargetModel(model, (0, 1))
    assert {each.data_ptr() for each in target.parameters()} == {
        each.data_ptr() for each in model.parameters()
    }
    assert not any(isinstance(each, type(target.taps[0])) for each in model.modules())


@torch.no_grad()
def test_a_decoder_inside_of_another_body_is_followed_when_it_is_replaced() -> None:
    model, ids = model_of("OPT"), torch.arange(3, 3 + ROWS)[None]
    target = TargetModel(model)
    assert not target.follow()
    model.model.decoder = model_of("OPT").model.decoder
    assert target.follow()
    places = torch.arange(ROWS)[None]
    whole = model(input_ids=ids, position_ids=places, use_cache=False).logits[0]
    torch.testing.assert_close(target.head(target(ids, places)[0]), whole)


def test_a_model_that_is_its_own_decoder_is_refused() -> None:
    class Bare(nn.Embedding):
        def get_decoder(self) -> nn.Module:
            return self

        def get_input_embeddings(self) -> nn.Module:
            return self

        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(SpeculatorError, match="Bare has no decoder of its own"):
        TargetModel(Bare(2, 2))
