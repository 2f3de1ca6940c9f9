"""The repository's trained pair: a byte-level model and its heads, with acceptance as it is found."""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.train_model import BYTE_OFFSET, read_corpus, split_corpus
from piecewise_graph.eagle import DraftShape, Engine, Request, Speculator, Statistics, load_draft

MODELS = Path(__file__).parent / "models"
HEADS = {"eagle1": "byte-llama-eagle1", "eagle3": "byte-llama-eagle3"}
SHAPES = [DraftShape(0), DraftShape(3), DraftShape(5), DraftShape(5, 4, 16)]
PROMPT, NEW = 256, 128
Row = dict[str, Any]


def heldout_prompts(count: int) -> list[list[int]]:
    """Beginnings of source files that neither model has seen."""
    _, heldout = split_corpus(read_corpus(Path(sysconfig.get_paths()["stdlib"])))
    long = [data for _, data in heldout if len(data) > PROMPT + NEW]
    return [[byte + BYTE_OFFSET for byte in data[:PROMPT]] for data in (long * count)[:count]]


def prompts_of_all_lengths(count: int) -> list[list[int]]:
    """Beginnings of 1, 5, 9, ... tokens of held-out prompts; those behind the 64th are whole ones."""
    return [prompt[: 1 + 4 * index] for index, prompt in enumerate(heldout_prompts(count))]


def load_target(attention: str = "piecewise") -> Any:
    """The byte-level model; in bf16 on a GPU, in float32 on a CPU."""
    from transformers import AutoModelForCausalLM

    pg.register_attention()
    on_gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(
        MODELS / "byte-llama",
        attn_implementation=attention,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
    )
    return model.to("cuda" if on_gpu else "cpu").eval()


def load_pair(kind: str) -> tuple[Any, Any]:
    """(target, head), the head of a kind in `HEADS`."""
    target = load_target()
    return target, load_draft(MODELS / HEADS[kind], target)


@torch.no_grad()
def bench_pair(options: argparse.Namespace) -> list[Row]:
    """ms per token and acceptance of every shape, head and batch size; greedy, the sides taking turns."""
    rows = []
    for kind in HEADS:
        target, draft = load_pair(kind)
        compiled = {"compiler": options.compiler}
        speculator = Speculator(
            target, draft, shapes=SHAPES, max_requests=max(options.batches), max_seq_len=PROMPT + NEW,
            batch_sizes=options.batches, options=compiled, draft_options=compiled,
        )  # fmt: skip
        for batch in options.batches:
            rows += _rows(speculator, kind, heldout_prompts(batch), options.turns)
    return rows


def _rows(speculator: Speculator, kind: str, prompts: Sequence[list[int]], turns: int) -> list[Row]:
    asked: list[Any] = [*SHAPES, "auto"]
    seconds: dict[str, list[float]] = {str(shape): [] for shape in asked}
    found: dict[str, Any] = {}
    for turn in range(turns + 1):  # the first one captures
        for shape in asked:
            engine, requests = speculator.session(prompts, max_new_tokens=NEW, shape=shape, overlap=None)
            with closing(engine):
                taken = decode_seconds(engine, requests)
            found[str(shape)] = Statistics(tuple(request.counts for request in requests))
            if turn:
                seconds[str(shape)].append(taken)
    plain = sorted(seconds[str(SHAPES[0])])[turns // 2]
    return [
        {
            "pair": kind, "requests": len(prompts), "shape": str(shape),
            "token_ms": (median := sorted(seconds[str(shape)])[turns // 2]) * 1e3,
            "speed_up": plain / median,
            **found[str(shape)].to_dict(),
        }
        for shape in asked
    ]  # fmt: skip


def decode_seconds(engine: Engine, requests: Sequence[Request]) -> float:
    """Seconds per token of a request until all are finished; prefill is left out."""
    while not all(request.tokens for request in requests):
        engine.step()
    before = sum(len(request.tokens) for request in requests)
    began = time.perf_counter()
    while engine.unfinished:
        engine.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = time.perf_counter() - began
    made = sum(len(request.tokens) for request in requests) - before
    return taken * len(requests) / made
