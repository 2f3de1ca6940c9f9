"""transformers' continuous batching on our attention: the tokens of `sdpa`, and its steps are replayed."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
)

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import make_batch
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

MODEL = Path(__file__).parents[1] / "benchmarks" / "models" / "byte-llama"
MAX_TOKENS = 64
NEW = 20
TEXTS = ("Hello", "The quick brown fox jumps over", "import torch\n", "A", "graphs are " * 9, "def f(x):")
LONG = tuple("a prefix that all of these requests have in common. " + text for text in TEXTS)
PAGED = {field.name for field in fields(ContinuousBatchingConfig)}


def load(attention: str, device: torch.device) -> Any:
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation=attention, dtype=torch.float32)
    return model.eval().to(device)


def generated(
    model: Any, texts: tuple[str, ...], page_size: int = 16, persistent: bool = False, **more: Any
) -> list[list[int]]:
    prompts = [[1, *(byte + 3 for byte in text.encode())] for text in texts]
    settings = {"num_blocks": 4096 // page_size, "max_batch_tokens": MAX_TOKENS, **more}
    settings["page_size" if "page_size" in PAGED else "block_size"] = page_size
    if "auto_switch_to_flash" in PAGED:
        settings["auto_switch_to_flash"] = False
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        persistent_manager=persistent,
    )
    assert not [result.error for result in results.values() if result.error]
    return [result.generated_tokens for result in results.values()]


@cache
def by_sdpa(texts: tuple[str, ...], device: torch.device) -> list[list[int]]:
    model = load("sdpa", device)
    model._supports_flash_attn = False  # nor replaced by flash where there is one
    return generated(model, texts)


@pytest.fixture
def served(device: torch.device) -> Any:
    pg.register_attention()
    return pg.continuous_batching(load("piecewise", device), max_tokens=MAX_TOKENS, compiler="eager")


@pytest.mark.parametrize("page_size", [4, 16, 256])
def test_every_step_is_replayed_once_its_size_was_captured(served: Any, page_size: int) -> None:
    for _ in range(2):
        assert generated(served, TEXTS, page_size) == by_sdpa(TEXTS, served.device)
    # When requests enter depends on the thread.
    before = pg.counters.snapshot()
    assert generated(served, TEXTS, page_size) == by_sdpa(TEXTS, served.device)
    moved = {name: count - before.get(name, 0) for name, count in pg.counters.snapshot().items()}
    steps = moved["replays"] + moved["tapes"] + moved["fallbacks"]
    assert NEW <= steps <= NEW + 4
    assert moved["replays"] >= 0.95 * steps
    assert moved["fallbacks"] == moved["traces"] == 0


def test_shared_prefixes_and_prompts_in_chunks(served: Any) -> None:
    for _ in range(2):
        with pg.counters.expect(fallbacks=0):
            assert generated(served, LONG) == by_sdpa(LONG, served.device)


def test_requests_that_make_way_for_others(served: Any) -> None:
    with pg.counters.expect(fallbacks=0):
        assert generated(served, LONG, num_blocks=12) == by_sdpa(LONG, served.device)


def test_a_request_that_outgrows_the_cache_is_refused_and_the_others_go_on(served: Any) -> None:
    """In a step, it would end transformers' thread, and all requests with it."""
    settings = {"num_blocks": 4, "max_batch_tokens": MAX_TOKENS}
    settings["page_size" if "page_size" in PAGED else "block_size"] = 16
    if "auto_switch_to_flash" in PAGED:
        settings["auto_switch_to_flash"] = False
    manager = served.init_continuous_batching(
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
    )
    manager.start()
    try:
        for _ in range(2):
            with pytest.raises(CacheError, match="needs 5 pages of 16 tokens; the cache has 4"):
                manager.add_request([5] * 8, max_new_tokens=58)
            asked = manager.add_request([5] * 8, max_new_tokens=57)  # all of the cache
            result = manager.get_result(asked, timeout=60)
            assert result is not None and len(result.generated_tokens) == 57 and result.error is None
            manager.generation_config.max_new_tokens = None  # without a limit: as many as the cache holds
            result = manager.get_result(manager.add_request([5] * 20), timeout=60)
            assert result is not None and len(result.generated_tokens) == 45 and result.error is None
    finally:
        manager.stop(block=True)
    with pytest.raises(CacheError, match="the cache has 4"):
        generated(served, ("x" * 50,), num_blocks=4)


def test_a_batch_that_outgrows_the_cache_of_an_earlier_one_is_refused(served: Any) -> None:
    generated(served, TEXTS[:1], num_blocks=4, persistent=True)
    try:
        with pytest.raises(CacheError, match="the cache has 4"):
            generated(served, ("x" * 50,), persistent=True)
        assert generated(served, TEXTS[:1], persistent=True) == by_sdpa(TEXTS[:1], served.device)
    finally:
        served.destroy_cached_continuous_batching_manager()


def test_captured_before_serving(served: Any) -> None:
    device = served.device
    cache = PagedKVCache.for_model(
        served.config, num_pages=9, page_size=16, dtype=torch.float32, device=device
    )
    table = RequestTable.for_cache(cache, max_requests=1, max_seq_len=MAX_TOKENS)
    table.reserve({(slot := table.open()): MAX_TOKENS})

    def inputs(tokens: int) -> dict[str, Any]:
        ids = torch.randint(3, 259, (1, tokens), dtype=torch.int32, device=device)
        positions = torch.arange(tokens, dtype=torch.int32, device=device)[None]
        return {"input_ids": ids, "position_ids": positions, "use_cache": False}

    def context(tokens: int) -> dict[str, Any]:
        return {"attention": make_batch(cache, table, [slot], [tokens], [tokens])[0]}

    with torch.no_grad():
        pg.capture(served.compiled_body, inputs, context=context, progress=False)
    with pg.counters.expect(traces=0, captures=0, fallbacks=0):
        assert generated(served, TEXTS) == by_sdpa(TEXTS, served.device)


def test_the_model_stays_as_it_is(device: torch.device) -> None:
    pg.register_attention()
    model = load("piecewise", device)
    served = pg.continuous_batching(model, compiler="eager")
    assert list(served.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(served.parameters(), model.parameters(), strict=True))
    assert "forward" not in vars(model.base_model)
    with pytest.raises(AttentionError, match="without the cache of continuous batching"):
        served(input_ids=torch.tensor([[1, 2]], device=device))


def test_what_is_refused(device: torch.device) -> None:
    pg.register_attention()
    with pytest.raises(AttentionError, match="not our attention"):
        pg.continuous_batching(load("sdpa", device))
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = MistralConfig(**sizes, num_attention_heads=2, sliding_window=8, attn_implementation="piecewise")
    with pytest.raises(AttentionError, match="sliding window"):
        pg.continuous_batching(MistralForCausalLM(config))
    with pytest.raises(AttentionError, match="a MistralForSequenceClassification is no causal LM"):
        pg.continuous_batching(MistralForSequenceClassification(config))
    served = pg.continuous_batching(load("piecewise", device), compiler="eager")
    with pytest.raises(AttentionError, match="graphs of its own"):
        generated(served, TEXTS, default_compile_level=1)
    with pytest.raises(AttentionError, match="use_async_batching"):
        generated(served, TEXTS, use_async_batching=True)


def test_a_head_that_calls_past_its_body_is_refused_at_once() -> None:
    pg.register_attention()
    sizes = {"vocab_size": 32, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32}
    config = OPTConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, attn_implementation="piecewise")
    with pytest.raises(
        AttentionError, match=r"OPTForCausalLM does not call its body, model\.model"
    ) as caught:
        pg.continuous_batching(OPTForCausalLM(config).eval())
    assert "What to do: " in str(caught.value)
