"""Device time of a call in a captured graph, as it will run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.graph_pool import GraphPool

_ROUNDS = 5


def graph_microseconds(call: Callable[[], Any], turns: int = 4, weights: Sequence[Tensor] = ()) -> float:
    """Median microseconds of `call` on the current device, in a graph that makes it `turns` times.

    Args:
        weights: what `call` reads, and does not write.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured = GraphPool().capture_call(
            lambda: [call() for _ in range(turns)], device=stream.device, unwritten=weights
        )
        assert captured.replay is not None
        times = [
            _replayed(captured.replay) for _ in range(_ROUNDS)
        ]  # the bare launch: no host time between events
    return statistics.median(times) / turns


def _replayed(replay: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
