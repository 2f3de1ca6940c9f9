"""Operands of linears, for the tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from interpreter import INTERPRETED
from torch import Tensor

from piecewise_graph.kernels.linear import linear_op
from piecewise_graph.kernels.linear.kernel_configs import larger_sizes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EXAMPLES = settings(max_examples=15 if INTERPRETED else 60)
EPSILON = 1e-5  # of norms
DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


def operands(tokens: int, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator).to(DEVICE, dtype)
    weight = (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(DEVICE, dtype)
    return x, weight, torch.randn(rows, generator=generator).to(DEVICE, dtype)


def norm(hidden: Tensor, gain: Tensor) -> Tensor:
    """An RMS norm as transformers write it."""
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return gain * wide.to(hidden.dtype)


def note_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sizes above those of graphs that kernels are compiled ahead for from now on, on 24 multiprocessors."""
    found = set[int]()

    def noted(rows: Sequence[int], **given: Any) -> list[int]:
        sizes = larger_sizes(rows, **given)
        found.update(sizes)
        return sizes

    monkeypatch.setattr(linear_op, "larger_sizes", noted)
    monkeypatch.setattr(linear_op, "multiprocessors", lambda device: 24)
    return found
