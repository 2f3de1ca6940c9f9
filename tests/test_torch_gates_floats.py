"""The functions of `_torch` that speak of open floats do what they say on the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch


def test_open_floats_are_found_and_become_constants() -> None:
    traced: list[list[_torch.OpenFloat]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        traced.append(_torch.open_floats(gm))
        if traced[-1]:
            _torch.trace_with_constants(traced[-1])
        _torch.end_constants()
        return gm.forward

    def scaled(x: Tensor, factor: float, shift: float) -> Tensor:
        return x * factor + shift

    fast = torch.compile(scaled, backend=backend, dynamic=True)
    for factor in (2.0, 3.0, 2.0):
        assert fast(torch.ones(2, 3), factor, 0.5).tolist() == [[factor + 0.5] * 3] * 2
    open_at_first = [[(each.source, each.value) for each in floats] for floats in traced]
    assert open_at_first[0] == [("L['factor']", 2.0), ("L['shift']", 0.5)]
    assert [len(floats) for floats in traced] == [2, 0, 2, 0]  # the second factor is guarded: another trace
