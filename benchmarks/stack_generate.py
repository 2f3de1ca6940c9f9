"""The generate part of bench_stacks: greedy tokens on a static cache."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch

from benchmarks.llama import SHAPES, random_model
from benchmarks.stack_setting import Measure, Row, Setting, first_difference, in_turns, rows_of

PROMPT = 32  # tokens
CALLS = 3  # per round: host time, a third of a step, varies from call to call


def prepared(setting: Setting, shape: str, requests: int, new_tokens: int) -> Measure:
    """All sides compiled, each on a model object of its own around the same weights."""
    model = random_model(SHAPES[shape], setting.device, "sdpa")
    ids = torch.randint(1, model.config.vocab_size, (requests, PROMPT), device=setting.device)
    asked = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    asked |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "cache_implementation": "static"}
    sides = {
        side: partial(copy.copy(model).generate, ids, **asked, **way) for side, way in _ways(setting).items()
    }
    for run in sides.values():
        run()
    common = {"part": "generate", "shape": shape, "requests": requests, "new_tokens": new_tokens}
    return partial(_measured, setting, common, sides)


def _ways(setting: Setting) -> dict[str, dict[str, Any]]:
    from transformers import CompileConfig

    ours = CompileConfig(backend="piecewise", mode=None, options={"compiler": setting.compiler})
    theirs = CompileConfig()
    ours._compile_all_devices = theirs._compile_all_devices = True  # type: ignore[assignment]
    ways = {"eager": {"disable_compile": True}, "piecewise": {"compile_config": ours}}
    if setting.device.type == "cuda":  # it is about CUDA graphs
        ways["reduce-overhead"] = {"compile_config": theirs}
    return ways


def _measured(setting: Setting, common: Row, sides: dict[str, Any]) -> list[Row]:
    turns = in_turns(sides, rounds=CALLS * setting.rounds, warmups=0)
    new = {side: taken.result[:, PROMPT:] for side, taken in turns.items()}
    steps = common["new_tokens"] - 1  # those behind the prompt's
    return [
        row | {"first_other_token": first_difference(new[row["side"]], new["eager"])}
        for row in rows_of(common, turns, common["new_tokens"], steps)
    ]
