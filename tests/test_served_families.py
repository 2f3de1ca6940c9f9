"""Every causal LM of transformers on our attention: right beside other requests, or refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny_models import ENCODERS, NAMES, build
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import make_batch
from piecewise_graph.custom_ops.attention.served_models import check_model
from piecewise_graph.custom_ops.errors import AttentionError, CacheError
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")
FAMILIES = [name for name in NAMES if name not in ENCODERS]
# Refused before our attention is asked: by transformers, which looks the name up in a table of the model, and
# by the KV cache.
ELSEWHERE = {
    **dict.fromkeys(("falcon", "git", "gpt_neo", "gptj"), (KeyError, "piecewise")),
    **dict.fromkeys(
        ("dots3_note_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        (CacheError, "per-layer attribute"),
    ),
    **dict.fromkeys(
        ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), (CacheError, "num_attention_heads")
    ),
}
LENGTHS = {"a long one": 21, "a short one": 5}  # the window is 16
DECODED = 2


def scale_up(model: Any) -> None:
    """Weights of which logits depend on every token."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            scale = (4.0 if "q_proj" in name or "k_proj" in name else 1.0) * max(weight.shape[-1], 1) ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)


def served(model: Any, prompts: list[list[int]]) -> list[Tensor]:
    """Logits of each prompt's tokens: all but the last ones in one batch, then one by one."""
    cache = PagedKVCache.for_model(
        model.config, num_pages=64, page_size=4, dtype=torch.float32, device=model.device
    )
    table = RequestTable.for_cache(cache, max_requests=2, max_seq_len=64)
    slots, found = [table.open() for _ in prompts], [[] for _ in prompts]  # type: ignore[var-annotated]
    done = [0] * len(prompts)
    for step in range(DECODED + 1):
        rows = [1 if step else len(prompt) - DECODED for prompt in prompts]
        totals = [old + new for old, new in zip(done, rows, strict=True)]
        table.reserve(dict(zip(slots, totals, strict=True)))
        batch, positions = make_batch(cache, table, slots, rows, totals)
        parts = [prompt[old:new] for prompt, old, new in zip(prompts, done, totals, strict=True)]
        ids = torch.tensor([[token for part in parts for token in part]], device=model.device)
        with pg.forward_context(attention=batch):
            logits = model(input_ids=ids, position_ids=positions[None].long(), use_cache=False).logits[0]
        for each, part in zip(found, logits.split(rows), strict=True):
            each.append(part)
        done = totals
    return [torch.cat(parts) for parts in found]


def error_of(name: str, **overrides: Any) -> float:
    """How far logits are from the model's own without a cache, alone and beside another request."""
    model, plain = build(name, "piecewise", **overrides), build(name, **overrides)
    scale_up(model)
    scale_up(plain)
    chance = random.Random(0)
    prompts = [[chance.randrange(8, 120) for _ in range(count)] for count in LENGTHS.values()]
    found = [*served(model, prompts), *served(model, prompts[1:])]
    wanted = [plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]
    check_model(model)  # and this refuses no model that is right
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, [*wanted, wanted[1]], strict=True))


# Served by every version of transformers that the tests run with; a refusal of one of these is a loss.
SERVED = frozenset(
    {
        "afmoe", "apertus", "arcee", "aria_text", "beam", "bitnet", "cohere", "cohere2", "cohere2_moe",
        "cohere_compass_text", "ctrl", "cwm", "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "exaone4",
        "exaone_moe", "flex_olmo", "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text",
        "glm", "glm4", "glm4_moe", "got_ocr2", "gpt-sw3", "gpt2", "gpt_neox", "granite", "granitemoe",
        "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax",
        "internlm3", "iquestcoder", "jais2", "kolibri1", "laguna", "lfm2", "llama", "mellum",
        "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "mllama",
        "modernbert-decoder", "moss_transcribe_diarize", "nanochat", "nemotron", "olmo", "olmo2",
        "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2",
        "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
        "vaultgemma", "whisper",
    }
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_right_or_refused_by_name(name: str) -> None:
    pg.register_attention()
    refusal, words = ELSEWHERE.get(name, (AttentionError, ""))
    try:
        error = error_of(name)
    except refusal as refused:
        assert words in str(refused) and name not in SERVED
    else:
        assert error < 1e-4


def test_a_window_that_the_mask_alone_has_is_kept() -> None:
    """Phi-MoE's attention is not told its window, which is in the masks of all layers."""
    pg.register_attention()
    window = min(LENGTHS.values()) - 1
    assert error_of("phimoe", sliding_window=window) < 1e-4
