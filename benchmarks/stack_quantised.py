"""The quantised part of bench_stacks: decode steps of torchao's weights on a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.common import distance, on_own_stream
from benchmarks.compare_sides import SIDES, Step
from benchmarks.llama import SHAPES
from benchmarks.paged import PagedModel
from benchmarks.stack_setting import Measure, Row, Setting, in_turns, rounds_for, rows_of

TOKENS = (8, 1)  # requests of a decode step, one row each; the larger one is compiled for


def config_of(weights: str) -> Any:
    """torchao's configuration of a kind of weights."""
    from torchao import quantization as ao

    kinds: dict[str, Callable[..., Any]] = {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": partial(ao.Int4WeightOnlyConfig, int4_packing_format="tile_packed_to_4d"),
        "float8": partial(ao.Float8DynamicActivationFloat8WeightConfig, granularity=ao.PerRow()),
    }
    # torchao would switch Inductor's search for tile sizes on, which takes minutes, of all sides alike
    return kinds[weights](set_inductor_config=False)


def prepared(setting: Setting, shape: str, weights: str) -> Measure:
    """All sides ready for each number of requests."""
    from torchao.quantization import quantize_

    torch._dynamo.config.recompile_limit = 64  # the sides share the module's code, and so the count
    paged = PagedModel(SHAPES[shape], TOKENS)
    quantize_(paged.model, config_of(weights))
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()  # where the weights lay before: other cases are on the device
    names = [
        name
        for name in ("eager", "raw", "piecewise", "full")
        if setting.device.type == "cuda" or not SIDES[name].needs_cuda
    ]
    steps: dict[int, dict[str, Step]] = {tokens: {} for tokens in TOKENS}
    with on_own_stream(torch.no_grad):
        paged.touch()
        for name in names:
            side = SIDES[name](paged, None, setting.compiler)
            side.first()
            for tokens in TOKENS:
                steps[tokens][name] = side.ready(tokens)
    common = {"part": "quantised", "shape": shape, "weights": weights}
    return partial(_measured, setting, common, steps)


@on_own_stream(torch.no_grad)
def _measured(setting: Setting, common: Row, steps: dict[int, dict[str, Step]]) -> list[Row]:
    rows = []
    for tokens, sides in steps.items():
        wanted = sides["eager"]().logits.float().clone()
        errors = {side: distance(step().logits.float(), wanted) for side, step in sides.items()}
        rounds = rounds_for(sides["full"], repeat=5, rounds=setting.rounds)
        turns = in_turns(sides, rounds=rounds, repeat=5, warmups=3)
        for row in rows_of(common | {"requests": tokens}, turns):
            side = row["side"]
            between = turns[side].served["unpadded_segments"]
            more = {"between_graphs": between} if side == "piecewise" else {}
            rows.append(row | {"error": errors[side]} | more)
    return rows
