"""Models with parallel linears, and helpers that merge them and compare with eager."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import COUNTS, assert_same, compiled, ops, rows

import piecewise_graph as pg

WIDTH = 8


class Layer(nn.Module):
    """Outline of grouped-query attention and a gated feed-forward: groups of 3 and 2 linears."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 16, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, 8, bias=bias) for _ in range(2))
        self.o = nn.Linear(16, WIDTH, bias=bias)
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=bias) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + self.o(ops.mix(q * torch.cat([k, v], -1)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, layers: int = 2, *, bias: bool = False, shared: bool = False) -> None:
        super().__init__()
        made = [Layer(bias=bias) for _ in range(1 if shared else layers)]
        self.layers = nn.ModuleList(made * layers if shared else made)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Parallel(nn.Module):
    """The concatenated results of `linears` of one input."""

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        return ops.mix(torch.cat([linear(x) for linear in self.linears], -1))


def linear(out_features: int = 8, *, bias: bool = False, width: int = WIDTH) -> nn.Linear:
    return nn.Linear(width, out_features, bias=bias)


def merged(model: Any, **options: Any) -> Any:
    return compiled(model, merge_linears=True, **options)


def apart(fast: Any) -> dict[str, int]:
    return pg.explain(fast).traces[0].apart


def groups(fast: Any) -> dict[str, int]:
    return pg.explain(fast).traces[0].merged


def storages(model: nn.Module) -> dict[int, int]:
    """Storage id -> bytes, for all parameters."""
    return {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}


def renew(model: nn.Module) -> None:
    """Write new weights in place."""
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.3)


def agree(fast: Any, model: Any, device: torch.device, counts: Any = COUNTS) -> None:
    for count in counts:
        x = rows(count, device, WIDTH)
        assert_same(fast(x.clone()), model(x.clone()))


def replace_data(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn_like(linear.weight)


def replace_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(torch.randn_like(linear.weight))
