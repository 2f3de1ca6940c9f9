"""Which way of computing a linear layer of a few rows is the fastest on this device: measured.

Note [Cold weights]
In a model every layer reads weights of its own, and by the time a layer comes round again the L2 cache holds
others. So a candidate is timed on several copies of the weight in turn, together larger than the cache, in a
captured graph, as it will run. A chain of equal kernels also shows what a dependent launch is worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.linear.linear_op import linear_few
from piecewise_graph.kernels.linear.plans import Plan, candidates

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_CALLS, _ROUNDS = 12, 5

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def fastest(
    x: Tensor, weight: Tensor, bias: Tensor | None, generated: Callable[[], Linear] | None
) -> dict[str, float]:
    """Microseconds of each way to compute `functional.linear(x, weight, bias)`.

    Args:
        x: `[tokens, columns]` on a GPU; weight: `[rows, columns]`, contiguous; bias: `[rows]` or None.
        generated: makes the linear that the compiler generates; None where it generates none.

    Returns:
        way -> microseconds. A way is "library", "generated", or the name of a `Plan`.
    """
    ways: dict[str, Linear] = {"library": functional.linear}
    if generated is not None:
        ways["generated"] = generated()
    takes = x.dtype in _KERNEL_DTYPES and weight.is_contiguous()
    plans = {plan.name: plan for plan in candidates(x.shape[0], *weight.shape)} if takes else {}
    ways |= {name: _by(plan) for name, plan in plans.items()}
    weights = _copies(weight)
    times = {name: _microseconds(way, x, weights, bias) for name, way in ways.items()}
    if plans:
        patient = plans[min(plans, key=times.__getitem__)]._replace(trigger=0)
        times[patient.name] = _microseconds(_by(patient), x, weights, bias)
    return times


def _by(plan: Plan) -> Linear:
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_few(x, weight, bias, plan)

    return linear


def _copies(weight: Tensor) -> list[Tensor]:
    """See Note [Cold weights]."""
    cache = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return [weight, *(weight.clone() for _ in range(min(-(-3 * cache // weight.nbytes), 64) - 1))]


def _microseconds(way: Linear, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> float:
    """Median time of one call, replayed in a graph of many; infinite for a kernel that does not fit."""
    turns = max(-(-_CALLS // len(weights)), 1)
    try:
        took = graph_microseconds(lambda: [way(x, weight, bias) for weight in weights], turns)
    except _does_not_fit():
        return float("inf")
    return took / len(weights)


def graph_microseconds(call: Callable[[], Any], turns: int = 4) -> float:
    """Median time of `call` on the device, replayed in a graph that makes it `turns` times."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept = [call() for _ in range(turns)]
        times = [_replayed(graph) for _ in range(_ROUNDS)]
    del kept
    return statistics.median(times) / turns


def _does_not_fit() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def _replayed(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
