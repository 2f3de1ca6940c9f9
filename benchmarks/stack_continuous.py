"""The continuous part of bench_stacks: transformers' continuous batching, on its graphs and on ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.llama import SHAPES, random_model
from benchmarks.stack_setting import Measure, Row, Setting, in_turns, rows_of

PROMPT, BLOCK = 32, 16  # tokens: of a prompt, of a page
MAX_BATCH_TOKENS = 512


def prepared(setting: Setting, shape: str, requests: int, new_tokens: int) -> Measure:
    """Both sides with a manager that stays, so that each has captured what it replays."""
    sides = {
        "transformers": partial(_generated, _model(shape, setting, "sdpa"), theirs=True),
        "piecewise": partial(_generated, _served(shape, setting), theirs=False),
    }
    prompts = torch.randint(1, 300, (requests, PROMPT)).tolist()
    calls = {side: partial(run, prompts, new_tokens) for side, run in sides.items()}
    for run in calls.values():
        run(), run()  # the second one meets batches that the first one had not
    common = {"part": "continuous", "shape": shape, "requests": requests, "new_tokens": new_tokens}
    return partial(_measured, setting, common, calls)


def _model(shape: str, setting: Setting, attention: str) -> Any:
    torch.manual_seed(0)
    model = random_model(SHAPES[shape], setting.device, attention)
    model._supports_flash_attn = False  # transformers would download one
    return model


def _served(shape: str, setting: Setting) -> Any:
    pg.register_attention("piecewise", "triton" if setting.device.type == "cuda" else "torch")
    model = _model(shape, setting, "piecewise")
    return pg.continuous_batching(model, max_tokens=MAX_BATCH_TOKENS, compiler=setting.compiler)


def _generated(model: Any, prompts: list[list[int]], new_tokens: int, *, theirs: bool) -> list[list[int]]:
    """The tokens of one `generate_batch` of all prompts."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    pages = -(-(PROMPT + new_tokens) // BLOCK) * len(prompts)
    sizes = {"num_blocks": pages + len(prompts), "max_batch_tokens": MAX_BATCH_TOKENS}
    fields = ContinuousBatchingConfig.__dataclass_fields__
    sizes["page_size" if "page_size" in fields else "block_size"] = BLOCK
    if theirs and model.device.type == "cuda":
        sizes["use_cuda_graph"] = True
    results = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**sizes),
        persistent_manager=True,
    )
    problems = [result.error for result in results.values() if result.error]
    if problems:
        raise RuntimeError(problems[0])
    return [result.generated_tokens for result in results.values()]


def _measured(setting: Setting, common: Row, calls: dict[str, Any]) -> list[Row]:
    turns = in_turns(calls, rounds=setting.rounds, warmups=0)
    ours, theirs = turns["piecewise"], turns["transformers"]
    steps = ours.served["replays"] + ours.served["tapes"] + ours.served["fallbacks"]
    pairs = list(zip(ours.result, theirs.result, strict=True))
    same = sum(own == other for own, other in pairs) / len(pairs)
    return [
        row
        | {"tokens_per_s": common["requests"] / row["ms"] * 1e3}
        | ({"same_answers": same} if row["side"] == "piecewise" else {})
        for row in rows_of(common, turns, common["new_tokens"], steps / ours.calls)
    ]
