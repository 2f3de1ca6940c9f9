"""Several requests in one batch on paged KV equal each alone in eager transformers, token for token."""

from __future__ import annotations

import inspect
import random
from functools import cache
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from paged_generation import Alone, Generator, alone
from tiny_models import build
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import make_batch
from piecewise_graph.custom_ops.attention.implementations import load
from piecewise_graph.custom_ops.errors import AttentionError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

REPOSITORY_MODEL = Path(__file__).parents[1] / "benchmarks" / "models" / "byte-llama"
PROMPTS = [
    "def f(x):", "import os\nimport sys\n\n", "class Parser:\n    def __init__(self", "#", "for i in range(",
    '"""The ', "    return self.", "from typing import Any\n\n\ndef main(",
]  # fmt: skip
NEW_TOKENS = [12, 7, 9, 14, 5, 11, 3, 10]


# FlashInfer and flash-attn have no kernels for float32. In bfloat16 two ways to add up the same numbers may
# order two tokens differently whose logits are this close (eight steps of bfloat16 at logits around 8).
HALF = {"flashinfer", "flash_attn"}
TIE = 0.25


def byte_llama(device: torch.device, attention: str, dtype: torch.dtype) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        REPOSITORY_MODEL, attn_implementation=attention, dtype=dtype
    )
    return model.to(device).eval()


def encoded() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(REPOSITORY_MODEL)
    return [tokenizer(text, add_special_tokens=False).input_ids for text in PROMPTS]


@cache
def each_alone(dtype: torch.dtype) -> list[Alone]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = byte_llama(device, "eager", dtype)
    with torch.no_grad():
        return [alone(model, ids, n, device) for ids, n in zip(encoded(), NEW_TOKENS, strict=True)]


def assert_equal_but_for_ties(found: list[list[int]], wanted: list[Alone], tie: float) -> None:
    """Token for token; after a tie, requests may go different ways, but not most of them."""
    ties = 0
    for tokens, reference in zip(found, wanted, strict=True):
        at = reference.first_difference(tokens)
        if at is not None:
            assert reference.gaps[at] < tie, f"token {at} differs, {reference.gaps[at]} ahead of the next"
            ties += 1
    assert ties <= len(wanted) // 4


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
@pytest.mark.parametrize("implementation", ["torch", "triton", "flashinfer", "flash_attn"])
def test_eight_requests_equal_each_alone(
    implementation: str, full: bool, page_size: int, device: torch.device, no_grad: None
) -> None:
    """Prefill and decode mixed in one batch, then decode alone, requests leaving one after another."""
    if implementation != "torch" and (device.type == "cpu" or load(implementation).missing):
        pytest.skip(f"{implementation} does not run here")
    if (implementation, full, page_size) == ("flashinfer", True, 1):
        pytest.skip("FlashInfer's capturable kernel has no pages of one token")
    dtype = torch.bfloat16 if implementation in HALF else torch.float32
    name = f"piecewise-{implementation}".replace("flash", "f")  # 'flash' is transformers' own
    pg.register_attention(name, implementation)
    model = byte_llama(device, name, dtype)
    compiled = pg.compile(model, compiler="aot_eager", capture_sizes=[1, 2, 4, 8, 64, 256])
    generator = Generator(compiled, model.config, device=device, dtype=dtype, page_size=page_size, full=full)
    found = generator.run(encoded(), NEW_TOKENS, stagger=1)
    assert_equal_but_for_ties(found, each_alone(dtype), TIE if implementation in HALF else 0.0)
    assert generator.table.free_pages == generator.table.total_pages
    counts = pg.counters.snapshot()
    assert counts["traces"] == 1
    assert counts["fallbacks"] == 0
    assert bool(counts["full_replays"]) == full
    assert counts["not_full"] == 0


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "phi3", "gpt2", "mixtral"])
def test_other_models_equal_each_request_alone(name: str, device: torch.device, no_grad: None) -> None:
    """Windows and odd head sizes included; prompts are fed in chunks."""
    pg.register_attention("piecewise-torch", "torch")
    reference, model = models.build(name, device=device), models.build(name, device=device)
    model.set_attn_implementation("piecewise-torch")
    rng = random.Random(0)
    prompts = [[rng.randrange(1, models.VOCABULARY) for _ in range(n)] for n in (3, 30, 1, 17)]
    wanted = [alone(reference, prompt, 6, device).tokens for prompt in prompts]
    compiled = pg.compile(model, compiler="eager", capture_sizes=[4, 16, 64])
    generator = Generator(
        compiled, model.config, device=device, dtype=torch.float32, full=True, buckets=(4,), chunk=8
    )
    assert generator.run(prompts, [6] * 4, stagger=2) == wanted
    counts = pg.counters.snapshot()
    assert counts["full_replays"] > 0, counts


def test_attention_mask_is_refused(device: torch.device, no_grad: None) -> None:
    pg.register_attention("piecewise-torch", "torch")
    model = models.build("llama", device=device)
    model.set_attn_implementation("piecewise-torch")
    ids = models.random_ids(5, device=device)
    with pytest.raises(AttentionError, match="padding mask"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def test_rows_of_a_batch_are_refused(device: torch.device, no_grad: None) -> None:
    pg.register_attention("piecewise-torch", "torch")
    model = models.build("llama", device=device)
    model.set_attn_implementation("piecewise-torch")
    with pytest.raises(AttentionError, match="one row"):
        model(input_ids=models.random_ids(5, batch=2, device=device), use_cache=False)


CAUSAL = masking_utils.create_causal_mask
SLIDING = masking_utils.create_sliding_window_causal_mask
CHUNKED = masking_utils.create_chunked_causal_mask
MASKS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "or_mask_function": (CAUSAL, {}, {"or_mask_function": lambda b, h, q, k: q >= 0}, "a mask of its own"),
    "and_mask_function": (SLIDING, {}, {"and_mask_function": lambda b, h, q, k: q >= 0}, "a mask of its own"),
    "blocks": (CAUSAL, {}, {"block_sequence_ids": torch.zeros(1, 6, dtype=torch.long)}, "block_sequence_ids"),
    "blocks in a window": (
        SLIDING, {}, {"block_sequence_ids": torch.zeros(1, 6, dtype=torch.long)}, "block_sequence_ids",
    ),
    "bidirectional": (masking_utils.create_bidirectional_mask, {}, {}, "not causal"),
    "bidirectional window": (masking_utils.create_bidirectional_sliding_window_mask, {}, {}, "not causal"),
    "is_causal": (CAUSAL, {"is_causal": False}, {}, "not causal"),
    "chunks": (CHUNKED, {"attention_chunk_size": 3}, {}, "in chunks"),
}  # fmt: skip


def mask_of(make: Any, settings: dict[str, Any], arguments: dict[str, Any]) -> Any:
    pg.register_attention("piecewise-torch", "torch")
    config = transformers.MistralConfig(sliding_window=4, attn_implementation="piecewise-torch")
    for name, value in settings.items():
        setattr(config, name, value)
    given = {"config": config, "inputs_embeds": torch.zeros(1, 6, 8), "attention_mask": None, **arguments}
    if "position_ids" in inspect.signature(make).parameters:
        given = {"past_key_values": None, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), **given}
    return make(**given)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", MASKS)
def test_masks_that_say_more_than_the_batch_are_refused(case: str, packed: bool) -> None:
    """A mask that is dropped would be an answer to another question."""
    make, settings, arguments, what = MASKS[case]
    arguments = arguments if packed else {"position_ids": torch.arange(6)[None], **arguments}
    if "position_ids" not in inspect.signature(make).parameters:
        arguments = {name: value for name, value in arguments.items() if name != "position_ids"}
    with pytest.raises(AttentionError, match=what):
        mask_of(make, settings, arguments)


@pytest.mark.parametrize("make", [CAUSAL, SLIDING])
def test_masks_that_the_batch_replaces_are_none(make: Any) -> None:
    """Also where transformers sees by the positions that several sequences are packed into one row."""
    assert mask_of(make, {}, {"position_ids": torch.arange(6)[None]}) is None
    assert mask_of(make, {}, {}) is None


def one_request(model: Any, count: int, device: torch.device, **arguments: Any) -> Any:
    cache = PagedKVCache.for_model(
        model.config, num_pages=9, page_size=16, dtype=torch.float32, device=device
    )
    table = RequestTable.for_cache(cache, max_requests=1, max_seq_len=64)
    slot = table.open()
    table.reserve({slot: 2 * count})
    ids = models.random_ids(count, device=device)
    for end in (count, 2 * count):
        batch, positions = make_batch(cache, table, [slot], [count], [end])
        with pg.forward_context(attention=batch):
            model(input_ids=ids, position_ids=positions[None].long(), **arguments)


def test_a_second_cache_is_refused(device: torch.device, no_grad: None) -> None:
    """transformers' own cache would hand over all tokens' K and V, to be written over the new ones'."""
    pg.register_attention("piecewise-torch", "torch")
    model = models.build("llama", device=device)
    model.set_attn_implementation("piecewise-torch")
    one_request(model, 6, device, use_cache=False)
    with pytest.raises(AttentionError, match="use_cache=False"):
        one_request(model, 6, device, use_cache=True, past_key_values=transformers.DynamicCache())


SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": models.VOCABULARY, "max_position_embeddings": 128,
    "sliding_window": 8, "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "piecewise-torch",
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True])
def test_a_window_of_the_mask_alone_is_refused(compiled: bool, device: torch.device, no_grad: None) -> None:
    """Moshi's configuration has a window, and its attention is not told."""
    pg.register_attention("piecewise-torch", "torch")
    model = build("moshi", "piecewise-torch").to(device)
    run = pg.compile(model, compiler="eager", capture_sizes=[8]) if compiled else model
    run.config = model.config
    with pytest.raises(Exception, match="sliding window in its mask only"):
        one_request(run, 4, device, use_cache=False)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_window_that_is_switched_off_is_none(windowed: bool, device: torch.device, no_grad: None) -> None:
    pg.register_attention("piecewise-torch", "torch")
    config = transformers.Qwen2Config(**SMALL, use_sliding_window=windowed, max_window_layers=1)
    model = transformers.Qwen2ForCausalLM(config).to(device).eval()
    one_request(model, 4, device, use_cache=False)


def test_a_model_that_ignores_the_registry_is_refused(device: torch.device, no_grad: None) -> None:
    """Bloom would drop the mask and attend to everything."""
    pg.register_attention("piecewise-torch", "torch")
    config = transformers.BloomConfig(
        hidden_size=32, n_layer=2, n_head=4, vocab_size=64, attn_implementation="piecewise-torch"
    )
    model = transformers.BloomForCausalLM(config).to(device).eval()
    with pytest.raises(AttentionError, match="BloomConfig computes its attention itself"):
        model(input_ids=models.random_ids(5, device=device), use_cache=False)


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention"])
def test_names_that_transformers_has_are_refused(name: str) -> None:
    before = dict(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(AttentionError, match=f"'{name}' for an attention of its own"):
        pg.register_attention(name, "torch")
    assert dict(ALL_ATTENTION_FUNCTIONS) == before


def test_a_name_of_ours_may_be_registered_again() -> None:
    pg.register_attention("piecewise-again", "torch")
    pg.register_attention("piecewise-again", "auto")


def test_unknown_implementation_is_refused_at_registration() -> None:
    with pytest.raises(AttentionError, match="named 'flash'"):
        pg.register_attention("mine", "flash")


@pytest.mark.parametrize("name", ["piecewise-flashinfer", "paged|mine"])
def test_name_that_transformers_would_misread_is_refused(name: str) -> None:
    with pytest.raises(AttentionError, match="an attention of its own"):
        pg.register_attention(name, "torch")


@pytest.mark.parametrize("full", [False, True], ids=["piecewise", "full"])
def test_batch_of_other_requests_than_the_tokens_is_refused(
    full: bool, device: torch.device, no_grad: None
) -> None:
    """A row that no request owns would get no attention; a request without a row would cache padding."""
    pg.register_attention("piecewise-torch", "torch")
    model = models.build("llama", device=device)
    model.set_attn_implementation("piecewise-torch")
    compiled = pg.compile(model, compiler="eager", capture_sizes=[4])
    generator = Generator(compiled, model.config, device=device, dtype=torch.float32, full=full, buckets=(4,))
    generator.run([[1, 2, 3]] * 3, [4] * 3)
    slots = [generator.table.open() for _ in range(3)]
    generator.table.reserve(dict.fromkeys(slots, 1))
    if full:
        buffers = generator.static[4]
        buffers.fill(slots, [1] * 3, [1] * 3)
        context = {"attention": buffers.batch, "full_graph": True, "graph_key": "decode"}
    else:
        context = {"attention": make_batch(generator.cache, generator.table, slots, [1] * 3, [1] * 3)[0]}
    for count in (1, 2, 4) if not full else (1, 2):
        ids = models.random_ids(count, device=device)
        with pytest.raises(AttentionError, match=f"describes 3 tokens.*called with {count}"):
            generator.call(ids, torch.zeros(count, dtype=torch.int32, device=device), context)
