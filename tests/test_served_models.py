"""Models in which tokens meet outside of our attention, or by the longest position of a call: refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from test_served_families import served
from tiny_models import build
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import BatchBuffers, make_batch
from piecewise_graph.custom_ops.attention.served_models import check_model
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable
from piecewise_graph.custom_ops.rope_limit import rope_limit
from piecewise_graph.eagle import Speculator, SpeculatorError

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")

HYBRID = ["falcon_h1", "granitemoehybrid", "lfm2_moe", "minimax", "qwen3_5_text", "recurrent_gemma", "zaya"]
OWN_ATTENTION = ["bloom", "cpmant", "openai-gpt", "xlm", "xlnet", "prophetnet"]
REPEATING = ["diffllama", "hrm_text"]
LIMIT = 32


def named(name: str) -> Any:
    pg.register_attention()
    return build(name, "piecewise")


@pytest.mark.parametrize("name", [*HYBRID, *OWN_ATTENTION, *REPEATING])
def test_the_trial_refuses_what_a_forward_does(name: str) -> None:
    with pytest.raises(AttentionError) as caught:
        check_model(named(name))
    assert "What to do: " in str(caught.value)


@pytest.mark.parametrize("name", ["qwen3_5_text", "diffllama"])
def test_engine_and_continuous_batching_refuse_them(name: str) -> None:
    model = named(name)
    words = "more than once" if name == "diffllama" else "layers of kind 'linear_attention'"
    with pytest.raises(AttentionError, match=words):
        Speculator(model, None, shapes=[0], max_seq_len=64, graphs="eager")
    with pytest.raises(AttentionError, match=words):
        pg.continuous_batching(model)


def test_keys_of_other_heads_than_the_configuration_names_are_refused() -> None:
    """JetMoE repeats K and V before its attention."""
    words = "hands 4 KV heads of 16 to its attention, its configuration names 2 of 16"
    with pytest.raises(AttentionError, match=words):
        Speculator(named("jetmoe"), None, shapes=[0], max_seq_len=64, graphs="eager")
    with pytest.raises(AttentionError, match=words):
        pg.continuous_batching(named("jetmoe"))
    pg.register_attention()
    check_model(build("gpt_bigcode", "piecewise", num_key_value_heads=1))  # as its own default says


@pytest.mark.parametrize("name", ["lfm2_moe", "diffllama"])
def test_a_compiled_call_is_refused_when_it_is_traced(name: str) -> None:
    compiled = pg.compile(model := named(name), compiler="eager", capture_sizes=[4])
    compiled.config = model.config
    with pytest.raises(Exception, match=r"layers of kind 'conv'|more than once"):
        served(compiled, [[9, 10, 11, 12, 13]])


class Running(nn.Module):
    """A layer's part that adds up its tokens, which no configuration tells."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0 * x.cumsum(1)


def test_tokens_that_meet_in_a_part_of_a_layer_are_found() -> None:
    model = named("llama")
    check_model(model)
    model.model.layers[0].mlp = Running(model.model.layers[0].mlp)
    with pytest.raises(AttentionError, match="LlamaForCausalLM tokens meet outside"):
        check_model(model)
    # One scale for all rows of a call would be NaN for all, too.
    model.register_parameter("packed", nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False))
    check_model(model)


def test_weights_that_are_nan_themselves_are_no_sign_of_mixing() -> None:
    model = named("llama")
    model.get_input_embeddings().weight.fill_(float("nan"))
    check_model(model)


def test_the_trial_leaves_nothing_behind() -> None:
    model = named("llama")
    before = copy.deepcopy(model.state_dict())
    check_model(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model.get_input_embeddings()._forward_hooks


def of_model(model: Any) -> tuple[PagedKVCache, RequestTable]:
    cache = PagedKVCache.for_model(model, num_pages=64, page_size=4, dtype=torch.float32, device="cpu")
    return cache, RequestTable.for_cache(cache, max_requests=1, max_seq_len=128)


def batch_of(cache: PagedKVCache, table: RequestTable, tokens: int) -> Any:
    table.reserve({(slot := table.open()): tokens})
    try:
        return make_batch(cache, table, [slot], [tokens], [tokens])
    finally:
        table.close(slot)


def phi3() -> Any:
    pg.register_attention()
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": LIMIT,
    }  # fmt: skip
    return build(
        "phi3", "piecewise", rope_parameters=rope, max_position_embeddings=256,
        original_max_position_embeddings=LIMIT,
    )  # fmt: skip


ROPES = {
    "longrope": ({"rope_type": "longrope", "original_max_position_embeddings": 32}, 32),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, 64),
    "by kind of layer": ({"full_attention": {"rope_type": "dynamic"}, "other": {"rope_type": "default"}}, 64),
    "yarn": ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, None),
    "llama3": ({"rope_type": "llama3", "original_max_position_embeddings": 32}, None),
    "linear": ({"rope_type": "linear", "factor": 2.0}, None),
    "none": (None, None),
}


@pytest.mark.parametrize("case", ROPES)
def test_the_limit_of_a_rope(case: str) -> None:
    rope, limit = ROPES[case]
    config = transformers.PreTrainedConfig()
    config.rope_parameters, config.max_position_embeddings = rope, 64
    assert rope_limit(config) == limit


def test_batches_keep_to_the_limit() -> None:
    model = phi3()
    cache, table = of_model(model)
    batch_of(cache, table, LIMIT)
    with pytest.raises(AttentionError, match=f"{LIMIT + 1} tokens. Beyond {LIMIT}"):
        batch_of(cache, table, LIMIT + 1)
    table.reserve({(slot := table.open()): LIMIT + 1})
    buffers = BatchBuffers(cache, table, num_requests=1, num_tokens=1, max_query_len=1, uniform=True)
    buffers.fill([slot], [1], [LIMIT])
    with pytest.raises(AttentionError, match=f"Beyond {LIMIT}"):
        buffers.fill([slot], [1], [LIMIT + 1])


def test_a_cache_that_knows_no_model_is_refused_in_the_forward() -> None:
    model = phi3()
    cache, table = of_model(model)
    cache.rope_limit = None
    batch, positions = batch_of(cache, table, LIMIT + 1)
    ids = torch.zeros(1, LIMIT + 1, dtype=torch.long)
    with pytest.raises(AttentionError, match=f"Beyond {LIMIT}"), pg.forward_context(attention=batch):
        model(input_ids=ids, position_ids=positions[None].long(), use_cache=False)


def test_the_engine_keeps_to_the_limit() -> None:
    model = phi3()
    with pytest.raises(SpeculatorError, match=f"beyond {LIMIT} tokens"):
        Speculator(model, None, shapes=[0], max_seq_len=LIMIT + 1, graphs="eager")
    speculator = Speculator(model, None, shapes=[0], graphs="eager")
    assert speculator.max_seq_len == LIMIT
    prompts = [list(range(8, 8 + count)) for count in (24, 3)]
    together = speculator.generate(prompts, max_new_tokens=8)
    assert together == [speculator.generate([prompt], max_new_tokens=8)[0] for prompt in prompts]


def test_continuous_batching_keeps_to_the_limit() -> None:
    served_model = pg.continuous_batching(phi3(), compiler="eager")
    settings = transformers.GenerationConfig(max_new_tokens=9, do_sample=False, eos_token_id=-1)
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    with pytest.raises(AttentionError, match=f"{LIMIT + 1} tokens. Beyond {LIMIT}"):
        served_model.generate_batch(
            [list(range(8, 8 + LIMIT - 7))], generation_config=settings, continuous_batching_config=pages
        )


@pytest.mark.parametrize(("configured", "asked"), [(4, 40), (40, 4)])
def test_continuous_batching_limits_what_the_call_asks_for(configured: int, asked: int) -> None:
    """As in transformers, max_new_tokens of the call goes before that of the configuration."""
    served_model = pg.continuous_batching(phi3(), compiler="eager")
    settings = transformers.GenerationConfig(max_new_tokens=configured, do_sample=False, eos_token_id=-1)
    pages = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
    given = {"generation_config": settings, "continuous_batching_config": pages, "max_new_tokens": asked}
    if asked > LIMIT:
        with pytest.raises(AttentionError, match=f"{3 + asked - 1} tokens. Beyond {LIMIT}"):
            served_model.generate_batch([[8, 9, 10]], **given)
    else:
        (result,) = served_model.generate_batch([[8, 9, 10]], **given).values()
        assert len(result.generated_tokens) == asked
