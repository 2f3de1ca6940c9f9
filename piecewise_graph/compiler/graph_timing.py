"""How long a call takes on the device when it is replayed in a captured graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 5


def graph_microseconds(call: Callable[[], Any], turns: int = 4) -> float:
    """Median device time of `call`, replayed in a graph that makes it `turns` times. Needs a GPU."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = [call() for _ in range(turns)]
        times = [_replayed(graph) for _ in range(_ROUNDS)]
    del kept
    return statistics.median(times) / turns


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
