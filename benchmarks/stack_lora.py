"""The lora part of bench_stacks: decode steps with two adapters of peft, on a paged KV cache.

A call is a step with each adapter, one after the other. `eager`, `reduce-overhead` and `piecewise` call
`set_adapter` of peft before each step, which is timed. Dynamo's guards then choose what was compiled for it.
`full` holds a frozen call per adapter, whose graph has the adapter in it, and switches nothing. The compiled
side is the mode with CUDA graphs, which a user would choose where launches take the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import distance, on_own_stream
from benchmarks.llama import SHAPES
from benchmarks.paged import PagedModel
from benchmarks.stack_setting import Measure, Row, Setting, in_turns, rows_of

ADAPTERS = ("one", "two")
WARMUPS = 3  # CUDA graphs of torch.compile: the second call records, the third replays

Step = Callable[[], Any]


def prepared(setting: Setting, shape: str, requests: int) -> Measure:
    """All sides compiled and captured, for each adapter."""
    torch._dynamo.config.recompile_limit = 64  # the sides share the module's code, and so the count
    paged = PagedModel(SHAPES[shape], [requests])
    paged.model = adapted(paged.model)
    with on_own_stream(torch.no_grad):
        paged.touch()
        steps = {
            side: [_step(paged, side, call, adapter) for adapter in ADAPTERS]
            for side, call in _ways(setting, paged).items()
        }
        for own in steps.values():
            for _ in range(WARMUPS):
                _both(own)
    return partial(_measured, setting, {"part": "lora", "shape": shape, "requests": requests}, steps)


def adapted(model: Any) -> Any:
    """The model with two adapters that are not merged, of its own dtype, as servers hold them."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    first, second = ADAPTERS
    model = get_peft_model(model, config, adapter_name=first, autocast_adapter_dtype=False)
    model.add_adapter(second, config, autocast_adapter_dtype=False)
    return model.eval()


def _ways(setting: Setting, paged: PagedModel) -> Mapping[str, Callable[..., Any]]:
    """What each side calls."""
    ours = pg.compile(
        paged.model,
        token_dim={"input_ids": 1, "position_ids": 1},
        capture_sizes=paged.counts,
        max_tokens=max(paged.counts),
        outputs="static",
        compiler=setting.compiler,
    )
    ways = {"eager": paged.model, "piecewise": ours, "full": ours}
    if setting.device.type == "cuda":  # it is about CUDA graphs
        ways["reduce-overhead"] = torch.compile(paged.model, mode="reduce-overhead")
    return ways


def _step(paged: PagedModel, side: str, call: Callable[..., Any], adapter: str) -> Step:
    """A decode step with this adapter, one row for each request."""
    (tokens,) = paged.counts
    inputs = paged.inputs(tokens)
    context = partial(paged.context, tokens, side in ("full", "reduce-overhead"))

    def step(call: Callable[..., Any]) -> Any:
        with context():
            return call(**inputs)

    def switched() -> Any:
        paged.model.set_adapter(adapter)
        return step(call)

    if side != "full":
        return switched
    switched()  # what is frozen is what was captured for this adapter
    return partial(step, step(partial(pg.freeze, call)))


def _both(steps: Sequence[Step]) -> None:
    for step in steps:
        step()


@on_own_stream(torch.no_grad)
def _measured(setting: Setting, common: Row, steps: Mapping[str, Sequence[Step]]) -> list[Row]:
    wanted = _logits(steps["eager"])
    errors = {side: max(map(distance, _logits(own), wanted)) for side, own in steps.items()}
    calls = {side: partial(_both, own) for side, own in steps.items()}
    turns = in_turns(calls, rounds=10 * setting.rounds, repeat=2)
    each = len(ADAPTERS)
    return [row | {"error": errors[row["side"]]} for row in rows_of(common, turns, each=each, forwards=each)]


def _logits(steps: Sequence[Step]) -> list[torch.Tensor]:
    """Of each adapter, in memory of their own: the next step of the side overwrites them."""
    return [step().logits.float().clone() for step in steps]
