"""Which sizes of vLLM's models get graphs, on doubles of vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import vllm_doubles as doubles
from vllm_worker_doubles import config, registered, worker

import piecewise_graph as pg
from piecewise_graph.integrations import vllm_sizes
from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.vllm_sizes import graph_sizes, prompt_sizes

LONG = [(3, list(range(12)))]  # above vLLM's largest capture size
UP_TO = vllm_sizes.SETTING


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)
    monkeypatch.setattr(vllm_sizes, "_FINE", 4)  # the doubles take 16 tokens at most


def test_sizes_of_speculative_decoding_are_multiples_of_its_step() -> None:
    assert graph_sizes([1, 2, 4, 8, 16], 3) == [1, 2, 3, 4, 6, 8, 9, 16]
    assert graph_sizes([], 3) == []


@pytest.mark.parametrize(("given", "found"), [({}, [12, 16]), ({UP_TO: 15}, [12, 15]), ({UP_TO: 0}, [])])
def test_prompts_have_graphs_up_to_what_was_set(given: dict[str, int], found: list[int]) -> None:
    served = worker(additional_config=dict(given))
    assert served._graphs.models[0].sizes == (*doubles.SIZES, *found)


@pytest.mark.parametrize(
    ("width", "most"),
    [(896, 4096), (2048, 4096), (3072, 2688), (4096, 2048), (5120, 1536), (0, 2048), (None, 2048)],
)
def test_prompts_of_narrow_models_have_graphs_of_more_tokens(width: int | None, most: int) -> None:
    model = None if width is None else doubles.ModelConfig(hidden_size=width)
    assert config(model_config=model).additional_config[UP_TO] == most


@pytest.mark.parametrize(
    "chosen", [{"cudagraph_capture_sizes": [1, 2]}, {"max_cudagraph_capture_size": 8}], ids=str
)
def test_sizes_that_the_user_chose_are_all_there_are(chosen: dict[str, Any]) -> None:
    made = config(compilation=chosen)
    made.__post_init__()  # as vLLM does for a draft model, with the sizes that it has made by then
    assert prompt_sizes(made.compilation_config.cudagraph_capture_sizes, made, doubles.MOST_TOKENS) == []


def test_sizes_of_prompts_are_further_apart_where_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_sizes, "_FINE", 64)
    found = prompt_sizes([1, 2, 200], config(), 900)
    assert found == [256, 320, 384, 448, 512, 640, 768, 896, 900]
    assert prompt_sizes([], config(), 900) == []


def test_a_long_prompt_is_replayed_and_answered_as_without_graphs() -> None:
    replaying = worker()
    with pg.counters.expect(replays=1, fallbacks=0):
        found = replaying.model_runner.execute_model(LONG)
    compiled = worker(additional_config={UP_TO: 0})  # its KV cache is bound, so the others' graphs go
    with pg.counters.expect(replays=0, **{"fallbacks:above_max_tokens": 1}):
        expected = compiled.model_runner.execute_model(LONG)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("value", [-1, 2.0, True, "2048"])
def test_a_limit_that_is_no_number_of_tokens_is_refused(value: Any) -> None:
    with pytest.raises(IntegrationError, match=UP_TO):
        config(additional_config={UP_TO: value})


def test_settings_of_another_kind_stay_as_they_are() -> None:
    made = config(additional_config=object())
    assert prompt_sizes(doubles.SIZES, made, doubles.MOST_TOKENS) == []


def test_logits_have_no_more_rows_for_it() -> None:
    served = worker()
    assert max(served._graphs.models[0].sizes) > max(doubles.SIZES)
    assert [each._most for each in served._graphs.logits] == [max(doubles.SIZES)]
