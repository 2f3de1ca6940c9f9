"""transformers' `generate`: its decode steps are replayed, and its tokens are eager's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import transformers
from transformers import CompileConfig, GenerationConfig

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
NEW = 12
# Beside the first, which is the prompt's, one step captures where the cache is a new one.
REPLAYED = NEW - 2


def by_compile_config(model: Any) -> Callable[..., Any]:
    config = CompileConfig(backend="piecewise", mode=None, options={"compiler": "eager"})
    config._compile_all_devices = True

    def generate(ids: torch.Tensor, **kwargs: Any) -> Any:
        return model.generate(ids, cache_implementation="static", compile_config=config, **kwargs)

    return generate


def by_pg_compile(model: Any) -> Callable[..., Any]:
    return pg.compile(model, compiler="eager").generate


each_way = pytest.mark.parametrize("way", [by_compile_config, by_pg_compile])


def prompts(batch: int, device: torch.device, tokens: int = 7) -> torch.Tensor:
    return models.random_ids(tokens, batch=batch, device=device)


def settings(**more: Any) -> dict[str, Any]:
    return {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, **more}


@each_way
@pytest.mark.parametrize(("name", "batch"), [("llama", 1), ("mixtral", 3)])
def test_decode_steps_are_replayed_with_eagers_tokens(
    way: Callable, name: str, batch: int, device: torch.device
) -> None:
    model = models.build(name, device=device)
    ids = prompts(batch, device)
    wanted = model.generate(ids, **settings(disable_compile=True))
    generate = way(model)
    for rehearsals in (1, 0):  # what one cache has shown holds for the next
        with pg.counters.expect(replays=REPLAYED, rehearsals=rehearsals, fallbacks=0):
            assert torch.equal(generate(ids, **settings()), wanted)
    report = pg.explain(model)  # some versions of transformers let go of a cache later than others
    served = report.ended.get("replays", 0) + sum(b.replays for t in report.traces for b in t.buckets)
    assert served == 2 * REPLAYED
    assert "replays" in report.summary() and len(report.summary().splitlines()) <= 10


@each_way
def test_padded_prompts_of_several_lengths(way: Callable, device: torch.device) -> None:
    model = models.build("llama", device=device)
    generate = way(model)
    for number, (batch, tokens) in enumerate(((2, 5), (3, 9), (2, 5), (3, 9), (2, 5))):
        ids = prompts(batch, device, tokens)
        mask = torch.ones_like(ids)
        mask[0, : tokens // 2] = 0
        given = settings(attention_mask=mask, pad_token_id=0)
        wanted = model.generate(ids, **given, disable_compile=True)
        # Once sizes vary, a combination has graphs when it returns, with whichever cache. The longest prompt
        # so far makes the cache longer, of the other batch too.
        new = int(number in (1, 2))
        with pg.counters.expect(replays=REPLAYED - new, fallbacks=new):
            assert torch.equal(generate(ids, **given), wanted)


def test_a_call_that_transformers_does_not_compile_is_counted(device: torch.device) -> None:
    model = models.build("llama", device=device)
    compiled = pg.compile(model, compiler="eager")
    ids = prompts(2, device)
    wanted = model.generate(ids, **settings())
    with pg.counters.expect(**{"fallbacks:generate_not_compiled": 1}):
        assert torch.equal(compiled.generate(ids, **settings(cache_implementation="dynamic")), wanted)
    assert pg.explain(compiled).fallbacks == {"generate_not_compiled": 1}


_TINY = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
_LAYERS = {"num_hidden_layers": 2, "intermediate_size": 64}
_DECODER = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_LOCAL = {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 4}
UNLIKE: dict[str, Callable[[], Any]] = {  # with a static cache they give other tokens, or raise
    "a local window": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(hidden_size=32, vocab_size=100, **_LOCAL, **_DECODER)
    ),
    "no decoder": lambda: transformers.BertLMHeadModel(transformers.BertConfig(**_TINY, **_LAYERS)),
    "ALiBi": lambda: transformers.FalconForCausalLM(
        transformers.FalconConfig(**_TINY, num_hidden_layers=2, alibi=True, **_DECODER)
    ),
}


def sharpened(model: Any, device: torch.device) -> Any:
    """Its tokens depend on what it attends to."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.copy_(torch.randn(weight.shape) / 10)
    return model.to(device).eval()


@pytest.mark.parametrize("name", UNLIKE)
def test_a_model_that_a_static_cache_changes_has_none(name: str, device: torch.device) -> None:
    model = sharpened(UNLIKE[name](), device)
    ids = torch.randint(5, 100, (1, 6), device=device)
    given = settings(attention_mask=torch.ones_like(ids), eos_token_id=None, pad_token_id=0)
    wanted = model.generate(ids, **given)
    with pg.counters.expect(**{"fallbacks:generate_not_compiled": 1}):
        assert torch.equal(pg.compile(model, compiler="eager").generate(ids, **given), wanted)


@pytest.mark.parametrize("window", [64, None])
def test_the_cache_of_a_result_has_room_for_another_turn(window: int | None, device: torch.device) -> None:
    config = transformers.MistralConfig(
        **_TINY, **_LAYERS, **_DECODER, num_key_value_heads=2, sliding_window=window
    )
    model = sharpened(transformers.MistralForCausalLM(config), device)

    def talk(generate: Callable[..., Any]) -> list[int]:
        ids, cache = torch.randint(5, 100, (1, 6), device=device), None
        for turn in range(3):
            told = generate(ids, **settings(past_key_values=cache, return_dict_in_generate=True))
            more = torch.full((1, 3), 7 + turn, device=device)
            cache, ids = told.past_key_values, torch.cat([told.sequences, more], 1)
        return told.sequences[0].tolist()

    found = []
    for generate in (model.generate, pg.compile(model, compiler="eager").generate):
        torch.manual_seed(1)
        found.append(talk(generate))
    assert found[0] == found[1]


def test_attentions_are_as_wide_as_the_tokens(device: torch.device) -> None:
    model = models.build("llama", device=device)
    model.set_attn_implementation("eager")  # the others return none
    ids = prompts(1, device)
    given = settings(return_dict_in_generate=True, output_attentions=True)
    ways = model.generate, pg.compile(model, compiler="eager").generate
    told = [generate(ids, **given) for generate in ways]
    shapes = [[layer.shape for step in each.attentions for layer in step] for each in told]
    assert shapes[0] == shapes[1] and torch.equal(told[0].sequences, told[1].sequences)


def test_a_cache_that_counts_in_python_is_named(device: torch.device) -> None:
    """A sliding window's: each step is another number."""
    model = models.build("gemma3", device=device)
    ids = prompts(2, device)
    wanted = model.generate(ids, **settings(disable_compile=True))
    compiled = pg.compile(model, compiler="eager")
    for _ in range(2):  # the numbers of the first call come again, and would not again
        with pg.counters.expect(replays=0):
            assert torch.equal(compiled.generate(ids, **settings()), wanted)
    report = pg.explain(compiled)
    counted = sum((Counter(trace.fallbacks) for trace in report.traces), Counter(report.fallbacks))
    assert set(counted) == {"number_varies"}


def test_what_the_call_says_of_compiling_is_kept(device: torch.device) -> None:
    model = models.build("llama", device=device)
    compiled = pg.compile(model, compiler="eager")
    with pg.counters.expect(traces=0, **{"fallbacks:generate_not_compiled": 1}):
        compiled.generate(prompts(1, device), **settings(disable_compile=True))


def test_its_forward_and_its_generate_share_a_report(device: torch.device) -> None:
    model = models.build("llama", device=device)
    compiled = pg.compile(model, compiler="eager")
    ids = prompts(1, device)
    wanted = model(input_ids=ids, use_cache=False).logits
    compiled.generate(ids, **settings())
    for _ in range(2):
        found = compiled(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    report = pg.explain(compiled)
    assert len(report.traces) + report.ended.get("traces", 0) == 2


OTHER_MODES: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "beams": {"num_beams": 2},
    "no cache": {"use_cache": False},
    "one token": {"max_new_tokens": 1, "min_new_tokens": 1},
}


@pytest.mark.parametrize("mode", OTHER_MODES.values(), ids=OTHER_MODES)
def test_modes_that_transformers_does_not_compile_answer_as_without_us(
    mode: dict[str, Any], device: torch.device
) -> None:
    model = models.build("llama", device=device)
    ids = prompts(1, device)
    wanted = model.generate(ids, **settings(**mode))
    with pg.counters.expect(**{"fallbacks:generate_not_compiled": 1}):
        assert torch.equal(pg.compile(model, compiler="eager").generate(ids, **settings(**mode)), wanted)


def test_a_configuration_says_as_much_as_keywords(device: torch.device) -> None:
    model = models.build("llama", device=device)
    compiled = pg.compile(model, compiler="eager")
    config = GenerationConfig(**settings(cache_implementation="dynamic"))
    for given in ((prompts(1, device), config), (prompts(1, device),)):
        more = {} if len(given) == 2 else {"generation_config": config}
        with pg.counters.expect(replays=0, **{"fallbacks:generate_not_compiled": 1}):
            compiled.generate(*given, **more)


def test_only_the_report_takes_the_model_itself(device: torch.device) -> None:
    model = models.build("llama", device=device)
    compiled = pg.compile(model, compiler="eager")
    compiled.generate(prompts(1, device), **settings())
    assert pg.explain(model).summary()
    with pytest.raises(pg.errors.PiecewiseError):
        pg.capture(model, lambda count: {"input_ids": prompts(1, device, count)}, sizes=[8], progress=False)
    assert not pg.explain(compiled).sealed
