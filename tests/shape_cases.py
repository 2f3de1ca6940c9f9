"""A model around one splitting op, both ways to compile it, and random inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import piecewise_graph as pg

MAX_TOKENS = 16
BUCKETS = (1, 2, 4, 8, 16)  # the default capture sizes up to MAX_TOKENS
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "compiler": "eager"}
COUNTS = (13, 7, 1, 20, 2, 16, 17, 5, 1, 13)


class Attend(nn.Module):
    """Linear, attention, `after`: two segments around one splitting op, over rows `[T, 8]`."""

    def __init__(self, after: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[None, None]
        return self.after(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0])


def by_pg_compile(model: Any, **options: Any) -> Any:
    return pg.compile(model, **OPTIONS | options)


def by_torch_compile(model: Any, token_dim: Any = None, **options: Any) -> Any:
    """torch.compile with the backend's name, as a stack without our API writes it."""
    return torch.compile(model, backend="piecewise", options=OPTIONS | options)


both_ways = pytest.mark.parametrize("compile", [by_pg_compile, by_torch_compile])


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def features(tokens: int, device: torch.device, width: int = 8) -> Tensor:
    return torch.randn(tokens, width).to(device)


def moved(name: str) -> int:
    return pg.counters.snapshot().get(name, 0)


class SumOfTwo(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y
