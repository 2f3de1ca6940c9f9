"""Which way of computing a linear layer of a few rows is the fastest on this device: measured.

Note [Cold weights]
In a model every layer reads its own weight, and the L2 cache no longer holds it when the layer runs again. So
a candidate is timed on several copies of the weight in turn. Together they are larger than the cache. They
run in one captured graph, as in a model; a chain of equal kernels also shows what a dependent launch is
worth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piecewise_graph.kernels.linear.kernel_configs import candidates
from piecewise_graph.kernels.linear.linear_launch import compile_ahead, has_rings
from piecewise_graph.kernels.linear.linear_op import DTYPES, linear_few

_CALLS = 12

Linear = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
# (call, turns, weights) -> microseconds of one call on the device, in a graph that makes it `turns` times.
TimeCall = Callable[[Callable[[], Any], int, Sequence[Tensor]], float]


def fastest(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    generated: Callable[[], Linear] | None,
    time_call: TimeCall,
) -> dict[str, float]:
    """Microseconds of each way to compute `functional.linear(x, weight, bias)`.

    Kernels are compiled side by side and timed one at a time.

    Args:
        x: `[tokens, columns]` on a GPU; weight: `[rows, columns]`, contiguous; bias: `[rows]` or None.
        generated: makes the linear that the compiler generates; None where it generates none.

    Returns:
        way -> microseconds, infinite for a kernel that does not fit the device. A way is "library",
        "generated", or the name of a `KernelConfig`.
    """
    from triton.runtime.errors import OutOfResources

    def time(linear: Linear) -> float:
        try:
            took = time_call(lambda: [linear(x, copy, bias) for copy in weights], turns, weights)
        except OutOfResources:
            return float("inf")
        return took / len(weights)

    takes = x.dtype in DTYPES and weight.is_contiguous()
    (tokens, columns), rings = x.shape, has_rings(x.device)
    known = candidates(tokens, *weight.shape, rings=rings) if takes else []
    for config in known:
        compile_ahead(config, x, tokens, columns, bias is not None, gated=False)
    weights = _copies(weight)
    turns = max(-(-_CALLS // len(weights)), 1)
    times = {"library": time(functional.linear)}
    if generated is not None:
        times["generated"] = time(generated())
    times |= {config.name: time(partial(linear_few, config=config)) for config in known}
    return times


def _copies(weight: Tensor) -> Sequence[Tensor]:
    """See Note [Cold weights]."""
    cache = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return [weight, *(weight.clone() for _ in range(min(-(-3 * cache // weight.nbytes), 64) - 1))]
