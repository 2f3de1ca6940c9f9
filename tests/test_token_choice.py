"""The argmax of a row of logits; the numbers' own tests are in test_eagle_sampling.py."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from interpreter import INTERPRETED, assert_passes_interpreted, needs_kernels, starts_the_interpreter
from torch import Tensor

from piecewise_graph.custom_ops import token_choice
from piecewise_graph.custom_ops.token_choice import argmax, uniforms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = 25 if INTERPRETED else 100


@starts_the_interpreter
def test_kernels_in_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


@settings(max_examples=EXAMPLES)
@given(
    st.integers(0, 5),
    st.integers(1, 5000),
    st.sampled_from([*FLOATS, torch.float64]),
    st.integers(1, 60),
    st.integers(0, 2**30),
)
def test_the_first_of_the_largest(
    rows: int, columns: int, dtype: torch.dtype, values: int, seed: int
) -> None:
    """Few different values, so that many are equal; in the middle of a wider tensor."""
    torch.manual_seed(seed)
    wide = torch.randint(-values, values, (rows, columns + 3), device=DEVICE).to(dtype)
    logits = wide[:, 1 : columns + 1]
    best = logits.max(-1, keepdim=True).values if rows else logits
    column = torch.arange(columns, device=DEVICE).expand_as(logits)
    wanted = column.masked_fill(logits != best, columns).amin(-1)
    found = argmax(logits)
    assert found.dtype == torch.int32 and found.shape == (rows,)
    assert torch.equal(found.long(), wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 2048, 2049, 6000])
def test_nothing_to_choose_from_is_still_a_token(dtype: torch.dtype, columns: int) -> None:
    """Infinities and NaN, wherever they are: always an index of the row."""
    nothing = torch.full((1, columns), -torch.inf)
    nan = torch.full((1, columns), torch.nan)
    one_nan = torch.zeros(1, columns)
    one_nan[0, columns // 2] = torch.nan
    one_infinite = torch.zeros(1, columns)
    one_infinite[0, -1] = torch.inf
    rows = torch.cat([nothing, nan, one_nan, one_infinite]).to(DEVICE, dtype)
    assert argmax(rows).tolist() == [0, 0, columns // 2, columns - 1]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [3, 2049])
def test_rows_of_nan_and_infinity_have_one_token_however_they_come(dtype: torch.dtype, columns: int) -> None:
    """NaN counts as infinity, the first of equals wins: alone, in any place of a batch, with any strides."""
    torch.manual_seed(0)
    specials = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 0.0])
    weights = torch.tensor([1.0, 1.0, 4.0, 40.0, 40.0])
    rows = specials[weights.expand(24, -1).multinomial(columns, replacement=True)]
    rows[:3, :3] = torch.tensor([[0.0, torch.inf, torch.nan], [0.0, torch.nan, torch.inf], [-torch.inf] * 3])
    rows = rows.to(DEVICE, dtype)
    wanted = rows.masked_fill(rows.isnan(), torch.inf).argmax(-1).tolist()
    assert wanted[0] == wanted[1] == 1
    assert argmax(rows).tolist() == wanted
    assert argmax(rows.flip(0)).tolist() == wanted[::-1]
    assert argmax(rows.t().contiguous().t()).tolist() == wanted
    assert [argmax(row[None]).item() for row in rows] == wanted
    assert token_choice.first_largest(rows).tolist() == wanted


def test_other_strides() -> None:
    logits = torch.randn(40, 9, device=DEVICE).t()
    assert torch.equal(argmax(logits).long(), logits.argmax(-1))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from piecewise_graph.custom_ops.token_choice import argmax, uniforms
numbers = torch.arange(3)
assert argmax(torch.eye(3)).equal(numbers.int()) and uniforms(numbers, numbers, numbers).shape == (3,)
"""


@starts_the_interpreter
def test_a_cpu_needs_no_triton() -> None:
    """It comes with CUDA builds of torch, not with those for CPUs."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=environment, check=True)


class TestNumbers:
    pytestmark = needs_kernels

    @settings(max_examples=EXAMPLES)
    @given(
        st.integers(1, 40),
        st.integers(1, 9),
        st.sampled_from([torch.int32, torch.int64]),
        st.integers(-(2**63), 2**63 - 1),
    )
    def test_kernel_and_tensor_operations_give_the_same(
        self, rows: int, columns: int, dtype: torch.dtype, seed: int
    ) -> None:
        def compare(*numbers: Tensor) -> None:
            wanted = token_choice._uniforms(*torch.broadcast_tensors(*numbers))
            assert torch.equal(uniforms(*numbers), wanted)

        seeds = torch.full((rows,), seed, device=DEVICE) ^ torch.arange(rows, device=DEVICE)
        lengths = torch.arange(7, 7 + 2 * rows, 2, dtype=dtype, device=DEVICE)
        uses = torch.arange(1 << 20, (1 << 20) + columns, dtype=dtype, device=DEVICE)
        compare(seeds[:, None], lengths[:, None], uses.expand(rows, -1))
        compare(seeds, lengths, torch.full_like(lengths, 3))
        compare(seeds, lengths[0], uses[:1])
