"""Other people's loops: transformers' generate, and an encoder that is called with batches of varying size.

    python -m benchmarks.bench_stacks                        # both parts, all shapes
    python -m benchmarks.bench_stacks --parts generate --shapes 1b
    python -m benchmarks.bench_stacks --parts embed --batches 500

generate: greedy tokens on a static cache, for 1 and 8 requests. Sides: eager, transformers' own default
(`mode="reduce-overhead"`), and this backend. Each side has a model object of its own around the same weights.

embed: random batches of at most 32 texts of at most 256 tokens, with masks, through the encoders of BERT-base
and ModernBERT-base. Sides: eager, `torch.compile(dynamic=True)`, and this backend. Two passes over all
batches warm up; those after them are timed. The error is that of mean-pooled rows beside the eager model in
float32 on a CPU, by the largest element.

Sides take turns. `replayed` is the share of forwards that graphs served while this backend was timed: of the
steps of generate those behind the prompt's.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, Timing, alternate, table, without_out, write
from benchmarks.llama import SHAPES, random_model

PARTS = ("generate", "embed")
REQUESTS = (1, 8)
BATCH_SIZES = [1, 2, 4, 8, 16, 32]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What the options say, for one device."""

    device: torch.device
    compiler: str
    rounds: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


@contextmanager
def counted(found: dict[str, int]) -> Iterator[None]:
    """Replays and fallbacks of the block are added to `found`."""
    before = pg.counters.snapshot()
    yield
    after = pg.counters.snapshot()
    for name in ("replays", "fallbacks"):
        found[name] = found.get(name, 0) + after[name] - before.get(name, 0)


def generate_rows(setting: Setting, shape: str, requests: int, new_tokens: int) -> list[Row]:
    from transformers import CompileConfig

    model = random_model(SHAPES[shape], setting.device, "sdpa")
    ours = CompileConfig(backend="piecewise", mode=None, options={"compiler": setting.compiler})
    theirs = CompileConfig()
    ours._compile_all_devices = theirs._compile_all_devices = True  # type: ignore[assignment]
    ways = {
        "eager": {"disable_compile": True},
        "reduce-overhead": {"compile_config": theirs},
        "piecewise": {"compile_config": ours},
    }
    if setting.device.type == "cpu":
        del ways["reduce-overhead"]  # it is about CUDA graphs
    ids = torch.randint(1, model.config.vocab_size, (requests, 32), device=setting.device)
    asked = {"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    asked |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    served: dict[str, int] = {}
    tokens: dict[str, Tensor] = {}

    def call(side: str, of: Any) -> None:
        with counted(served if side == "piecewise" else {}):
            tokens[side] = of.generate(ids, cache_implementation="static", **asked, **ways[side])

    sides = {side: _called(call, side, copy.copy(model)) for side in ways}
    for run in sides.values():
        run()  # compiles
    served.clear()
    timings = alternate(sides, rounds=setting.rounds, repeat=1, warmups=1)
    calls = setting.rounds + 1
    replayed = served["replays"] / (calls * (new_tokens - 1))
    first = {side: _first_difference(found, tokens["eager"], 32) for side, found in tokens.items()}
    common = {"part": "generate", "shape": shape, "requests": requests, "new_tokens": new_tokens}
    return [
        {**common, "side": side, **_milliseconds(timing, new_tokens), "first_other_token": first[side]}
        | ({"replayed": replayed} if side == "piecewise" else {})
        for side, timing in timings.items()
    ]


def _called(call: Callable[[str, Any], None], side: str, of: Any) -> Callable[[], None]:
    return lambda: call(side, of)


def _first_difference(found: Tensor, wanted: Tensor, prompt: int) -> int | None:
    """The first new token that differs from eager's in any row; None where none does."""
    different = (found != wanted).any(0).nonzero()
    return int(different[0]) - prompt if len(different) else None


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


def embed_rows(setting: Setting, shape: str, count: int, rows: int, tokens: int) -> list[Row]:
    exact = encoder_of(shape)
    model = copy.deepcopy(exact).to(setting.device, setting.dtype)
    batches = batches_of(exact.config.vocab_size, count, rows, tokens, setting.device)
    options = {"compiler": setting.compiler, "max_tokens": tokens, "batch_sizes": BATCH_SIZES}
    encoders = {"eager": model.forward, "dynamic": None, "piecewise": None}
    encoders["piecewise"] = torch.compile(copy.copy(model).forward, backend="piecewise", options=options)
    inductor = {"backend": "eager"} if setting.compiler == "eager" else {}
    encoders["dynamic"] = torch.compile(copy.copy(model).forward, dynamic=True, **inductor)
    served: dict[str, int] = {}

    def passes(side: str, forward: Any) -> None:
        with torch.inference_mode(), counted(served if side == "piecewise" else {}):
            for batch in batches:
                forward(**batch)

    sides = {side: _called(passes, side, forward) for side, forward in encoders.items()}
    for run in sides.values():
        run(), run()  # the second one replays what returned
    served.clear()
    timings = alternate(sides, rounds=setting.rounds, repeat=1, warmups=0)
    errors = {
        side: _error(forward, exact, batches[:: max(count // 8, 1)]) for side, forward in encoders.items()
    }
    replayed = served["replays"] / (setting.rounds * count)
    common = {"part": "embed", "shape": shape, "batches": count}
    return [
        {**common, "side": side, **_milliseconds(timing, count), "error": errors[side]}
        | ({"replayed": replayed} if side == "piecewise" else {})
        for side, timing in timings.items()
    ]


def _error(forward: Any, exact: Any, batches: Sequence[Mapping[str, Tensor]]) -> float:
    found = []
    with torch.inference_mode():
        for batch in batches:
            wanted = _pooled(exact(**{name: value.cpu() for name, value in batch.items()}), batch)
            found.append((_pooled(forward(**batch), batch) - wanted).abs().max() / wanted.abs().max())
    return float(max(found))


def _pooled(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean of each text's rows."""
    mask = batch["attention_mask"].cpu()[..., None]
    return (output.last_hidden_state.cpu().float() * mask).sum(1) / mask.sum(1)


def _milliseconds(timing: Timing, each: int) -> dict[str, float]:
    return {
        "ms": timing.median / each * 1e3,
        "low": timing.low / each * 1e3,
        "high": timing.high / each * 1e3,
    }


def marks_of(rows: Sequence[Row]) -> list[Mark]:
    marks = []
    for row in (row for row in rows if row["side"] == "piecewise"):
        beside = {
            r["side"]: r for r in rows if all(r.get(k) == row.get(k) for k in ("part", "shape", "requests"))
        }
        name = " ".join(str(row[key]) for key in ("part", "shape", "requests") if key in row)
        is_generate = row["part"] == "generate"
        marks.append(Mark(f"{name}: share not replayed", 1 - row["replayed"], 0.02 if is_generate else 0.05))
        other = beside.get("reduce-overhead" if is_generate else "dynamic")
        if other is not None:
            marks.append(Mark(f"{name}: time over {other['side']}'s", row["ms"] / other["ms"], 1.0))
        if not is_generate:
            limit = 2 * beside["eager"]["error"] + 1e-6
            marks.append(Mark(f"{name}: error beside float32", row["error"], limit))
    return marks


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shapes", default="1b,8b" if on_gpu else "tiny", help="of generate")
    parser.add_argument("--encoders", default="bert-base,modernbert-base" if on_gpu else "bert-tiny")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, default=500)
    parser.add_argument("--rows", type=int, default=32, help="of the largest batch")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest text")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_stacks.json")
    options = parser.parse_args(given)
    setting = Setting(torch.device("cuda" if on_gpu else "cpu"), options.compiler, options.rounds)
    command, rows = " ".join(["python -m benchmarks.bench_stacks", *without_out(given)]), list[Row]()
    for part in options.parts.split(","):
        for found in _of_part(part, setting, options):
            rows += found
            write(options.out, command, rows, marks_of(rows), report=False)
    write(options.out, command, rows, marks_of(rows))
    print(table(rows, ("part", "shape", "requests", "side", "ms", "replayed", "error", "first_other_token")))
    return 0


def _of_part(part: str, setting: Setting, options: argparse.Namespace) -> Iterator[list[Row]]:
    if part == "embed":
        for shape in options.encoders.split(","):
            yield embed_rows(setting, shape, options.batches, options.rows, options.tokens)
    else:
        for shape in options.shapes.split(","):
            for requests in REQUESTS:
                yield generate_rows(setting, shape, requests, options.new_tokens)


if __name__ == "__main__":
    raise SystemExit(main())
