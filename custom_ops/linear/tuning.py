"""Which way of computing a linear layer of a few rows is the fastest on this device: measured.

Note [Cold weights]
In a model every layer reads weights of its own, and by the time a layer comes round again the L2 cache holds
others. So a candidate is timed on several copies of the weight in turn, together larger than the cache, in a
captured graph, as it will run. A chain of equal kernels also shows what a dependent launch is worth.

Note [Neighbours]
Inductor fuses what stands before and after a linear into the kernel that it generates for it, and every
program of that kernel computes it again: a gated activation before the second projection of a Llama made 28
microseconds 32 (H200). Alone it is measured without, so it has to win by more than that. And what is hardly
faster than the library's kernel is noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .ops import linear_few
from .plans import MAX_TOKENS, Plan, candidates

_KERNEL_DTYPES = (torch.bfloat16, torch.float16)
_WEIGHTS = {"library": 0.97, "generated": 1.1}
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
        way -> microseconds, the one to take first. A way is "library", "generated", or the fields of a
        `Plan`, joined by spaces.
    """
    ways: dict[str, Linear] = {"library": functional.linear}
    if generated is not None:
        ways["generated"] = generated()
    if x.dtype in _KERNEL_DTYPES and weight.is_contiguous() and x.shape[0] <= MAX_TOKENS:
        ways |= {_name(plan): _by(plan) for plan in candidates(x.shape[0], *weight.shape)}
    weights = _copies(weight)
    times = {name: _microseconds(way, x, weights, bias) for name, way in ways.items()}
    fastest_kernel = min((name for name in times if name[0].isdigit()), key=times.__getitem__, default=None)
    if fastest_kernel is not None:
        patient = Plan(*map(int, fastest_kernel.split()))._replace(trigger=0)
        times[_name(patient)] = _microseconds(_by(patient), x, weights, bias)
    return rank(times)


def rank(times: Mapping[str, float]) -> dict[str, float]:
    """The same times, the way to take first (Note [Neighbours])."""
    weighted = {name: time * _WEIGHTS.get(name, 1.0) for name, time in times.items()}
    return {name: times[name] for name in sorted(weighted, key=weighted.__getitem__)}


def _name(plan: Plan) -> str:
    return " ".join(map(str, plan))


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
    calls = max(_CALLS, len(weights))
    stream = torch.cuda.Stream(x.device)
    graph = torch.cuda.CUDAGraph()

    def run() -> Any:
        return [way(x, weights[call % len(weights)], bias) for call in range(calls)]

    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        try:
            way(x, weights[0], bias)
        except _does_not_fit():
            return float("inf")
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        return statistics.median(_replayed(graph) for _ in range(_ROUNDS)) / calls


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
