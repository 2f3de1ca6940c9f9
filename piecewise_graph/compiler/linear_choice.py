"""Which kernel computes a linear layer of a few rows: measured once per shape, kept in cache_dir.

Note [Neighbours]
A linear costs more or less among its neighbours than alone. Inductor fuses what stands before and after it
into the kernel that it generates. That saves a kernel, but every program of the kernel repeats the fused
work: on an H200 the norm before a Llama's gate and up projection became free, while the gated activation
before the down projection turned 28 us into 32. Our kernels start while their neighbours end, those of cuBLAS
do not. So there are two sets of handicaps. Where they choose differently, both are compiled and the whole
segments are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.disk_cache import Folder, read_measured, write_measured
from piecewise_graph.compiler.graph_timing import graph_microseconds
from piecewise_graph.compiler.segment_key import surroundings
from piecewise_graph.kernels.linear import tuning
from piecewise_graph.kernels.linear.kernel_configs import is_config

LIBRARY, GENERATED = "library", "generated"
_FORMAT, _SUFFIX = 4, ".linear"
_measured: dict[str, Times] = {}

Times = Mapping[str, float]


# Handicaps (Note [Neighbours]): for our kernels, for what the compiler generates.
PREFERENCES: tuple[Times, ...] = ({LIBRARY: 1.05, GENERATED: 1.1}, {LIBRARY: 0.97, GENERATED: 0.95})


def preferred(times: Times, handicaps: Times) -> str:
    """The way to take: the fastest after each time is multiplied by its handicap."""
    return min(times, key=lambda way: times[way] * handicaps.get(way, 1.0))


def config_of(way: str) -> list[int] | None:
    """What the op `piecewise::linear_few` takes; None where the linear is left to the compiler."""
    return None if way == GENERATED else [] if way == LIBRARY else list(map(int, way.split()))


def choose(tokens: int, weight: Tensor, bias: Tensor | None, cache_dir: Folder | None) -> Times | None:
    """Microseconds of each way to compute `linear(x, weight, bias)` for `tokens` rows; None on a CPU.

    Args:
        weight: `[rows, columns]`, contiguous; bias: `[rows]` or None. Nothing is being captured.
        cache_dir: where earlier processes left what they measured, and this one will.

    Returns:
        way -> microseconds: "library" (cuBLAS), "generated" (by Inductor), or numbers that name one of our
        kernels.
    """
    if not weight.is_cuda:
        return None  # there is nothing to choose from
    x = torch.randn(tokens, weight.shape[1], device=weight.device).to(weight.dtype)
    key = _key(x, weight, bias)
    times = _measured.get(key) or (_stored(cache_dir, key) if cache_dir else None)
    if times is None:
        # Inductor has a kernel of its own for one row only.
        generated = (lambda: _generated(x, weight, bias)) if tokens == 1 else None
        times = tuning.fastest(x, weight, bias, generated, graph_microseconds)
        if cache_dir is not None:
            write_measured(cache_dir, key, _SUFFIX, times=times)
    _measured[key] = times
    return times


def _key(x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """Everything that the measured times depend on."""
    shape = f"{x.shape[0]}x{weight.shape[1]} -> {weight.shape[0]} {x.dtype} bias {bias is not None}"
    return "\n".join([f"linear {_FORMAT}", *surroundings([x.device]), shape])


def _stored(cache_dir: Folder, key: str) -> Times | None:
    """The times that another process left in a file; a bad file costs a measurement, no more."""
    found = read_measured(cache_dir, key, _SUFFIX)
    try:
        times = {str(way): float(time) for way, time in found["times"].items()}
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    known = all(way in (LIBRARY, GENERATED) or is_config(way) for way in times)
    return times if LIBRARY in times and known else None


def _generated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Callable[..., Tensor]:
    """The linear as Inductor compiles it for exactly these sizes."""
    graph, inputs = Graph(), [x, weight, *([] if bias is None else [bias])]
    nodes = [graph.placeholder(f"a{index}") for index in range(len(inputs))]
    graph.output((graph.call_function(torch.nn.functional.linear, tuple(nodes)),))
    run = _torch.compile_exact(GraphModule({}, graph), inputs)

    def linear(*operands: Any) -> Tensor:
        return run(*[operand for operand in operands if operand is not None])[0]

    return linear
