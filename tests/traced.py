"""A backend that keeps the graphs which Dynamo hands it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from piecewise_graph import _torch


class Traced:
    """A backend that keeps its graphs, and of each what `look` reads while the backend is called."""

    def __init__(self, look: Callable[[GraphModule], Any] = lambda gm: None) -> None:
        self.look, self.graphs, self.inputs, self.seen = look, [], [], []

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        self.graphs.append(gm)
        self.inputs.append(list(inputs))
        self.seen.append(self.look(gm))
        return gm.forward

    @property
    def gm(self) -> GraphModule:
        return self.graphs[-1]


def trace(
    model: Any, *args: Any, look: Callable[[GraphModule], Any] = lambda gm: None, **options: Any
) -> Traced:
    """Call `model` under torch.compile with such a backend."""
    traced = Traced(look)
    torch.compile(model, backend=traced, **options)(*args)
    return traced


def dynamic(*shape: int, device: torch.device | None = None) -> Tensor:
    x = torch.randn(*shape, device=device)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def placeholders(gm: GraphModule) -> list[torch.fx.Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table


TABLE = torch.ones(8)  # a global that models read


def first_size(gm: GraphModule) -> Any:
    """The first dimension of the first tensor that the graph takes."""
    tensors = [_torch.example_value(n) for n in placeholders(gm)]
    return next(t for t in tensors if isinstance(t, Tensor)).shape[0]
