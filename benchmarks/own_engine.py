"""This project's engine in a process of its own, as one more side of bench_vllm's load."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.llama import SHAPES, random_model
from piecewise_graph.bench.drive import drive
from piecewise_graph.bench.load import Arrival
from piecewise_graph.bench.metrics import Metrics
from piecewise_graph.bench.setting import Setting
from piecewise_graph.eagle.speculator import Speculator

PAGE = 16
TOKENS_PER_REQUEST = 256  # that there is KV cache for, on average
Row = dict[str, Any]


def plain_speculator(model: Any, requests: int, max_seq_len: int, **options: Any) -> Speculator:
    """Ready for plain decoding of up to so many requests; `options` are of pg.compile."""
    speculator = Speculator(
        model,
        shapes=[0],
        max_requests=requests,
        max_seq_len=max_seq_len,
        page_size=PAGE,
        num_pages=requests * TOKENS_PER_REQUEST // PAGE,
        options=options,
    )
    speculator.prepare()
    return speculator


def served(engine: Any, setting: Setting, requests: Sequence[Arrival], users: int) -> Metrics:
    """What so many users saw of these requests."""
    timeline = drive(engine, requests, users, setting.sampling)
    engine.step()  # a round without requests may still be under way
    return Metrics.of(timeline, users)


class OwnEngine:
    """Plain decoding of a shape with random weights, no option set; asked as `vllm_engine.Served` is.

    Args:
        settings: of `vllm.LLM`; `model` (a folder named after the shape), `max_num_seqs` and
            `max_model_len` are used.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        began = time.monotonic()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pg.register_attention()
        model = random_model(SHAPES[Path(settings["model"]).name], device, "piecewise")
        loaded, requests = time.monotonic(), settings["max_num_seqs"]
        speculator = plain_speculator(model, requests, settings["max_model_len"])
        self._setting = Setting.of(steps=0)
        self._engine = self._setting.engine(speculator)
        self.seconds = time.monotonic() - began
        self.phases = {"load_model": loaded - began}

    def load(self, users: int, requests: Sequence[Arrival]) -> Row:
        """As `vllm_engine.Served.load`."""
        found = served(self._engine, self._setting, requests, users)
        return {
            "tok_s": found.output_throughput,
            "tpot_ms": found.median_tpot_ms,
            "ttft_ms": found.median_ttft_ms,
        }
