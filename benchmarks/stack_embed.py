"""The embed part of bench_stacks: an encoder that is called with batches of varying size."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.stack_setting import Measure, Row, Setting, in_turns, rows_of

BATCH_SIZES = [1, 2, 4, 8, 16, 32]
ERROR_BATCHES = 8  # of which the error is taken


def encoder_of(shape: str) -> Any:
    """An encoder with random weights."""
    import transformers as tf

    tiny = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {**tiny, "vocab_size": 300, "pad_token_id": 0}
    torch.manual_seed(0)
    made = {
        "bert-tiny": lambda: tf.BertModel(tf.BertConfig(**small)),
        "bert-base": lambda: tf.BertModel(tf.BertConfig()),
        "modernbert-base": lambda: tf.ModernBertModel(tf.ModernBertConfig()),
    }
    return made[shape]().eval()


def batches_of(
    vocab: int, count: int, rows: int, tokens: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """Random batches with masks: the first text of each is as long as the batch."""
    draw, batches = random.Random(0), []
    for _ in range(count):
        size, length = draw.randint(1, rows), draw.randint(2, tokens)
        lengths = torch.tensor([length, *(draw.randint(1, length) for _ in range(size - 1))])
        mask = (torch.arange(length) < lengths[:, None]).long()
        ids = torch.randint(1, vocab, (size, length)) * mask
        batches.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return batches


def prepared(setting: Setting, shape: str, count: int, rows: int, tokens: int) -> Measure:
    """All sides compiled: two passes of each over all batches, of which the second replays."""
    exact = encoder_of(shape).to(setting.device)
    model = copy.deepcopy(exact).to(setting.dtype)
    batches = batches_of(exact.config.vocab_size, count, rows, tokens, setting.device)
    options = {"compiler": setting.compiler, "max_tokens": tokens, "batch_sizes": BATCH_SIZES}
    plain = {"backend": "eager"} if setting.compiler == "eager" else {}
    encoders = {
        "eager": model.forward,
        "dynamic": torch.compile(copy.copy(model).forward, dynamic=True, **plain),
        "piecewise": torch.compile(copy.copy(model).forward, backend="piecewise", options=options),
    }
    for forward in encoders.values():
        _pass(forward, batches), _pass(forward, batches)
    common = {"part": "embed", "shape": shape, "batches": count}
    return partial(_measured, setting, common, encoders, batches, exact)


def _pass(forward: Any, batches: Sequence[Mapping[str, Tensor]]) -> None:
    with torch.inference_mode():
        for batch in batches:
            forward(**batch)


def _measured(
    setting: Setting,
    common: Row,
    encoders: Mapping[str, Any],
    batches: Sequence[Mapping[str, Tensor]],
    exact: Any,
) -> list[Row]:
    sides = {side: partial(_pass, forward, batches) for side, forward in encoders.items()}
    turns = in_turns(sides, rounds=setting.rounds, warmups=0)
    some = batches[:: max(len(batches) // ERROR_BATCHES, 1)]
    return [
        row | {"error": _error(encoders[row["side"]], exact, some)}
        for row in rows_of(common, turns, len(batches), len(batches))
    ]


def _error(forward: Any, exact: Any, batches: Sequence[Mapping[str, Tensor]]) -> float:
    found = []
    with torch.inference_mode():
        for batch in batches:
            wanted = _pooled(exact(**batch), batch)
            found.append((_pooled(forward(**batch), batch) - wanted).abs().max() / wanted.abs().max())
    return float(max(found))


def _pooled(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean of each text's rows."""
    mask = batch["attention_mask"].cpu()[..., None]
    return (output.last_hidden_state.cpu().float() * mask).sum(1) / mask.sum(1)
