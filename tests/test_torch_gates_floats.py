"""The functions of `_torch` that speak of open floats do what they say on the torch that is installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch


def test_open_floats_are_found_and_become_constants() -> None:
    traced: list[list[_torch.OpenFloat]] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with _torch.constants_of_one_trace():
            traced.append(_torch.open_floats(gm))
            if traced[-1]:
                _torch.trace_with_constants(traced[-1])
        return gm.forward

    def scaled(x: Tensor, factor: float, shift: float) -> Tensor:
        return x * factor + shift

    fast = torch.compile(scaled, backend=backend, dynamic=True)
    for factor in (2.0, 3.0, 2.0):
        assert fast(torch.ones(2, 3), factor, 0.5).tolist() == [[factor + 0.5] * 3] * 2
    open_at_first = [[(each.source, each.value) for each in floats] for floats in traced]
    assert open_at_first[0] == [("L['factor']", 2.0), ("L['shift']", 0.5)]
    assert [len(floats) for floats in traced] == [2, 0, 2, 0]  # the second factor is guarded: another trace


def test_sizes_that_are_computed_by_floats_are_told_from_others() -> None:
    found: list[bool] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        sizes = (_torch.example_value(node) for node in gm.graph.nodes)
        found.append(any(isinstance(s, torch.SymInt) and _torch.has_float_steps(s) for s in sizes))
        return gm.forward

    forms: list[Callable[[int], int]] = [
        lambda n: n // 2 + max(n, 7) % 5,
        lambda n: int(n * 0.5),
        lambda n: math.ceil(n / 2),
        lambda n: round(math.sqrt(n)),
    ]
    for form in forms:
        torch._dynamo.reset()
        x = torch.ones(6, 2)
        take = torch.compile(lambda x, form=form: x[: form(x.shape[0])] * 2, backend=backend, dynamic=True)
        assert take(x).shape[0] == form(6)
    assert found == [False, True, True, True]
