"""What pg.compile tells Dynamo of the tensors that cross a graph break.

Dynamo traces what lies behind a break with the tensors that the graph before it returned, and takes their
sizes for constants at first. Added to an argument of the call, they would fix its token count too. So
results are marked like arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch


def marking_onward(gm: GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function that runs `gm`'s trace and marks what it returns.

    Call it before `gm` is taken apart, and what it returns with the trace.
    """
    returned = list(_dynamic_dims(_torch.returned_values(gm)))

    def of(trace: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            outputs = trace(*args)
            for index, dim in returned:
                _torch.maybe_mark_dynamic(outputs[index], dim)
            return outputs

        return forward

    return of


def _dynamic_dims(values: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """(index, dimension) of each symbolic size of a tensor."""
    for index, value in enumerate(values):
        for dim, size in enumerate(value.shape) if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                yield index, dim
