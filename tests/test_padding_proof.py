"""The proof that padding cannot change live rows: what it must never prove, and what it has to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import padding_functions
import padding_unsafe
import pytest
import torch
from padding_cases import disagreement, is_proved, judge, why
from torch import Tensor

_packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu
Inputs = list[tuple[Tensor, Any]]


def given(names: str) -> Inputs:
    """The tensors that a case's arguments name, with their token dimensions."""
    torch.manual_seed(0)
    tensors: dict[str, tuple[Callable[[], Tensor], Any]] = {
        "x": (lambda: torch.randn(7, 8), 0),
        "y": (lambda: torch.randn(7, 8), 0),
        "h": (lambda: torch.randn(2, 7, 8), 1),  # batch, tokens, hidden
        "q": (lambda: torch.randn(1, 2, 7, 4), 2),  # batch, heads, tokens, head size
        "ids": (lambda: torch.randint(0, 6, (7,)), 0),
        "mask": (lambda: torch.rand(7) > 0.4, 0),
        "square": (lambda: torch.randn(7, 7), (0, 1)),
        "w": (lambda: torch.randn(8, 8), None),
        "v": (lambda: torch.randn(8), None),
        "table": (lambda: torch.randn(64, 8), None),
        "k": (lambda: torch.randn(8, 1, 4), None),  # a depthwise kernel
        "experts": (lambda: torch.randn(4, 8, 8), None),
        "wide": (lambda: torch.randn(7, 64, dtype=torch.bfloat16), 0),
        "packed": (lambda: _packed(torch.randint(16, (32, 64), dtype=torch.int32), 1), None),
        "zeros": (lambda: torch.randn(2, 32, 2, dtype=torch.bfloat16), None),
        "point": (lambda: torch.tensor([3, 1]), None),
        "one": (lambda: torch.tensor(2), None),
    }
    return [(tensors[name][0](), tensors[name][1]) for name in names.split()]


@pytest.mark.parametrize("name", sorted(padding_unsafe.UNSAFE))
def test_what_padding_may_change_is_not_proved(name: str) -> None:
    names, function = padding_unsafe.UNSAFE[name]
    inputs, dims = zip(*given(names), strict=True)
    proof = judge(function, inputs, dims, largest=64)
    assert not is_proved(proof)


@pytest.mark.parametrize("name", sorted(padding_functions.SAFE))
def test_what_padding_cannot_change_is_proved(name: str) -> None:
    names, function = padding_functions.SAFE[name]
    inputs, dims = zip(*given(names), strict=True)
    proof = judge(function, inputs, dims, largest=64)
    assert is_proved(proof), why(proof)
    assert disagreement(function, inputs, dims, proof) is None
