"""Two runs of one computation agree within rounding, and in what is not finite exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from piecewise_graph.compiler.agreement import TOLERANCE, agree

DTYPES = sorted(TOLERANCE, key=str)
LARGE = 2**20 + 3  # more elements than are compared at once


def values(dtype: torch.dtype, size: int = 40) -> Tensor:
    return torch.randn(size, 3, dtype=dtype)


def changed(tensor: Tensor, value: float, place: tuple[int, int] = (7, 1)) -> Tensor:
    copy = tensor.clone()
    copy[place] = value
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_is_allowed_and_more_is_not(dtype: torch.dtype) -> None:
    x = values(dtype)
    largest, tolerance = x.abs().max().item(), TOLERANCE[dtype]
    assert agree(x, x + largest * tolerance / 4)
    assert not agree(x, changed(x, x[7, 1].item() + 3 * largest * tolerance))
    assert not agree(x, x[:-1]) and agree(x[:0], x[:0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_so_in_both(dtype: torch.dtype, special: float) -> None:
    x = values(dtype)
    odd = changed(x, special)
    assert agree(odd, odd.clone())
    assert not agree(odd, x) and not agree(x, odd)
    assert not agree(odd, changed(x, special, (8, 1)))
    assert not agree(odd, changed(odd, x.abs().max().item() * 2, (0, 0)))  # the finite rest still counts


def test_a_difference_that_has_no_number_of_its_own_is_one() -> None:
    x = torch.full((4, 3), 60000.0, dtype=torch.float16)
    assert not agree(x, -x)


@given(st.integers(0, LARGE - 1))
def test_every_part_of_a_large_tensor_counts(place: int) -> None:
    want = torch.ones(LARGE)
    got = want.clone()
    got[place] = 1.1
    assert not agree(want, got) and agree(want, want.clone())


def test_integers_and_truth_values_are_equal_or_not() -> None:
    for x in (torch.arange(6), torch.tensor([True, False])):
        assert agree(x, x.clone()) and not agree(x, x.flip(0))
