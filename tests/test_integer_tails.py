"""Integers in the rows that pad a run: what may be concluded of them, and what they hold at a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import TorchRuntimeError
from toys import BOTH, SIZES, WIDTH, assert_same, compiled, define, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = {"token_dim": {"ids": 0}}


class Embeds(nn.Module):
    """Something else that depends on ids, beside an embedding that is a graph in any case."""

    def __init__(self, also: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.table, self.also = nn.Embedding(16, WIDTH), also
        self.register_buffer("flags", torch.zeros(16, dtype=torch.long))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), self.also(ids, self)


SLICES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "differences": lambda ids, _: (ids[1:] - ids[:-1]).sum(),
    "all_but_the_last": lambda ids, _: ids[:-1].sum(),
    "all_but_two": lambda ids, _: ids[:-2].count_nonzero(),
    "any": lambda ids, _: (ids[:-1] > 0).any(),
    "twice": lambda ids, _: ids[:-1][:-1].sum(),
    "from_the_second": lambda ids, _: ids[1:].sum(),
}


@pytest.mark.parametrize("name", SLICES)
@BOTH
def test_live_rows_past_the_end_of_a_slice_are_no_zeros(entry: Any, name: str, device: torch.device) -> None:
    """`ids[:-1]` of a padded run has the last live row where a run of its own size has none."""
    model = Embeds(SLICES[name]).to(device)
    fast = entry(model, **IDS) if entry is compiled else entry(model)
    zeros = [torch.zeros(count, dtype=torch.long, device=device) for count in (3, 7, 6, 5)]
    others = [torch.arange(1, count + 1, device=device) for count in (3, 5, 6, 7, 8, 3)]
    for ids in (*zeros, *others):  # nothing differs at the calls that capture
        assert_same(fast(ids), model(ids))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.lists(st.integers(4, SIZES[-1]), min_size=3, max_size=6))
def test_sums_over_any_slice(start: int, less: int, counts: list[int]) -> None:
    end = -less or None
    with torch.no_grad():
        model = Embeds(lambda ids, _: ids[start:end].sum())
        fast = compiled(model, **IDS)
        for count in (*counts, *counts):
            ids = torch.randint(0, 16, (count,)) * (torch.rand(count) > 0.5)
            assert_same(fast(ids), model(ids))


@BOTH
def test_an_index_past_the_end_of_a_slice_is_not_looked_up(entry: Any, device: torch.device) -> None:
    """A sentinel as the last id, which "shift right" leaves out."""
    model = Embeds(lambda ids, me: F.pad(me.table(ids[:-1]), (0, 0, 1, 0))).to(device)
    model.forward = lambda ids: model.also(ids, model)  # type: ignore[method-assign]
    fast = entry(model, **IDS) if entry is compiled else entry(model)
    for last in (1, 999):
        for count in (6, 5, 3, 7, 6):
            ids = torch.ones(count, dtype=torch.long, device=device)
            ids[-1] = last
            assert_same(fast(ids), model(ids))


BUFFERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "sum": lambda ids, me: me.flags[ids].sum(),
    "product": lambda ids, me: (me.flags[ids] * ids).sum(),
    "all_below": lambda ids, me: (me.flags[ids] < 100).all(),
    "any_above": lambda ids, me: (me.flags[ids] > 0).any(),
    "shifted": lambda ids, me: (me.flags[ids] + 1 - 1).sum(),
    "largest": lambda ids, me: torch.maximum(me.flags[ids], me.flags[ids] * 2).sum(),
    "chosen": lambda ids, me: torch.where(ids > 0, me.flags[ids], 0).sum(),
}


@pytest.mark.parametrize("name", BUFFERS)
@BOTH
def test_what_a_buffer_holds_now_decides_nothing(entry: Any, name: str, device: torch.device) -> None:
    """It may hold something else at the next call: `load_state_dict` writes it."""
    model = Embeds(BUFFERS[name]).to(device)
    fast = entry(model, **IDS) if entry is compiled else entry(model)
    for flag in (0, 1, 1000):
        model.flags[0] = flag
        for count in (6, 3, 5, 7, 6):
            ids = torch.randint(1, 16, (count,), device=device)
            assert_same(fast(ids), model(ids))


COPIES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "first_row": lambda ids, _: ids[:1].repeat(3).repeat(ids.shape[0]).sum(),
    "by_a_size": lambda ids, _: ids.repeat(ids.shape[0]).sum(),
    "triangle": lambda ids, _: ids.expand(ids.shape[0], -1).tril().sum(0),
    "upper_triangle": lambda ids, _: ids[:, None].expand(-1, ids.shape[0]).triu(1).sum(1),
    "triangle_of_one": lambda ids, _: ids[0].expand(ids.shape[0], ids.shape[0]).tril().sum(),
    "triangle_of_copies": lambda ids, _: ids.repeat(ids.shape[0], 1).tril(1).sum(0),
}
WRAPPED: dict[str, Callable[[Tensor, Any], Tensor]] = {  # i[0] is zero at the calls that capture
    "bools": lambda i, _: ((((i >= 0) + (i < 64)) < 2) * i[0]).sum(),
    "running": lambda i, _: ((((i >= 0) * 100).cumsum(0, dtype=torch.int8) < 0) * i[0]).sum(),
    "arange": lambda i, _: (
        ((torch.arange(120, i.shape[0] + 120, dtype=torch.int8, device=i.device) < 0) & (i < 64)) * i[0]
    ).sum(),
    "filled": lambda i, _: ((torch.full_like(i, -1, dtype=torch.uint8).long() + 1 + i) * i[0]).sum(),
    "filled_by_a_tensor": lambda i, _: (
        ((torch.zeros_like(i, dtype=torch.uint8).fill_(i.new_full((), -1)).long() > 100) & (i < 64)) * i[0]
    ).sum(),
    "true_by_a_tensor": lambda i, _: (
        ((torch.zeros_like(i, dtype=torch.bool).fill_(i.new_full((), 5)).long() < 3) & (i < 64)) * i[0]
    ).sum(),
    "past_the_largest": lambda i, _: (
        ((torch.arange(i.shape[0], dtype=torch.int32, device=i.device) + (2**31 - 1) < 0) & (i < 64)) * i[0]
    ).sum(),
    "running_long": lambda i, _: (((torch.full_like(i, 2**62).cumsum(0) < 0) & (i < 64)) * i[0]).sum(),
    "written_as_another_type": lambda i, _: (((_halves_of_one(i) > 5) & (i < 64)) * i[0]).sum(),
}


def _halves_of_one(like: Tensor) -> Tensor:
    """2**32 + 1 everywhere."""
    numbers = torch.zeros_like(like)[:, None].clone()
    numbers.view(torch.int32).fill_(1)
    return numbers[:, 0]


OPERANDS: dict[str, Callable[[Tensor, Any], Tensor]] = {  # numbers that the tensor's own type does not hold
    "at_least_200": lambda i, _: ((i.to(torch.int8) >= 200) * i[0]).sum(),
    "at_most_minus_1": lambda i, _: ((i.to(torch.uint8) <= -1) * i[0]).sum(),
    "at_least_3e9": lambda i, _: ((i.int() >= 3_000_000_000) * i[0]).sum(),
    "no_dims": lambda i, _: ((i.to(torch.uint8) <= torch.full((), -1, device=i.device)) * i[0]).sum(),
    "clamp": lambda i, _: (i.to(torch.uint8).clamp(min=-1) * i[0]).sum(),
    "maximum": lambda i, _: (torch.maximum(i.to(torch.uint8), i.new_full((), -1)) * i[0]).sum(),
    "quotient": lambda i, _: ((i.to(torch.int8) * 0 + 100) // 300 * i[0]).sum(),
}
RANGES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "largest": lambda i, _: (((i + 9)[:, None].expand(-1, 3).aminmax(dim=1).max >= 4) * i[0]).sum(),
    "clamp_of_any": lambda i, _: (((i ^ 0).clamp(0, 7) < 5) * i[0]).sum(),
}


@pytest.mark.parametrize("name", [*COPIES, *WRAPPED, *OPERANDS, *RANGES])
@BOTH
def test_copies_and_numbers_that_wrap_are_no_zeros(entry: Any, name: str, device: torch.device) -> None:
    model = Embeds((COPIES | WRAPPED | OPERANDS | RANGES)[name]).to(device)
    fast = entry(model, **IDS) if entry is compiled else entry(model)
    for most in (1, 16):
        for count in (5, 7, 6, 3, 8, 5, 6):
            ids = torch.randint(0, most, (count,), device=device)
            assert_same(fast(ids), model(ids))


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "infinity": lambda x: torch.full((x.shape[0],), float("inf"), dtype=torch.bool, device=x.device),
    "nan": lambda x: torch.zeros_like(x, dtype=torch.bool).fill_(float("nan")),
    "complex": lambda x: torch.zeros_like(x, dtype=torch.bool).fill_(1j),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_masks_are_filled_with_numbers_that_no_integer_equals(name: str, device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.mix(x), NUMBERS[name](x)

    fast = compiled(model)
    for count in (3, 5, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_a_buffer_whose_numbers_torch_does_not_compare(dtype: torch.dtype, device: torch.device) -> None:
    model = Embeds(lambda ids, own: own.flags.float()[:3] + ids[0]).to(device)
    model.flags = torch.arange(16, device=device).to(dtype)
    fast = compiled(model, **IDS)
    for count in (3, 5, 3):
        ids = torch.randint(0, 16, (count,), device=device)
        assert_same(fast(ids), model(ids))


@BOTH
def test_the_first_of_several_columns_repeated_by_the_count(entry: Any, device: torch.device) -> None:
    table = nn.Embedding(16, WIDTH).to(device)

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return table(x), x[0].repeat(x.shape[0]).sum()

    fast = entry(model)
    for most in (1, 16):
        for count in (5, 7, 6, 3, 8, 5):
            x = torch.randint(0, most, (count, 3), device=device)
            assert_same(fast(x), model(x))


def _note_largest(x: Tensor, out: Tensor) -> None:
    out.copy_(x.argmax(-1))


define("note_largest(Tensor x, Tensor(a!) out) -> ()", _note_largest, lambda x, out: None)
pg.register_splitting_op("toy::note_largest")


@BOTH
def test_integers_that_an_op_writes_are_zero_past_the_live_rows(entry: Any, device: torch.device) -> None:
    """Their allocation is all that its segment does, so it is made once: a longer call left its rows."""

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty(x.shape[0], dtype=torch.long, device=x.device)
        ops.note_largest(x, out)
        return x * 2, out.sum()

    fast = entry(model)
    for count in (8, 6, 3, 7, 2, 8, 3):
        x = rows(count, device)
        assert_same(fast(x), model(x))


WINDOWS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "unfold": lambda ids, _: F.pad(ids, (2, 0)).unfold(0, 3, 1),
    "bools": lambda ids, _: F.pad(ids > 3, (2, 0)).unfold(0, 3, 1),
    "as_strided": lambda ids, _: torch.cat([ids.new_zeros(2), ids]).as_strided((ids.shape[0], 3), (1, 1)),
    "of_a_row": lambda ids, _: F.pad(ids[None], (2, 0)).unfold(1, 3, 1),
}


@pytest.mark.parametrize("name", WINDOWS)
@BOTH
def test_returned_windows_share_no_element_with_their_padding(
    entry: Any, name: str, device: torch.device
) -> None:
    model = Embeds(WINDOWS[name]).to(device)
    fast = entry(model, **IDS) if entry is compiled else entry(model)
    for count in (5, 7, 6, 3, 8, 5):
        ids = torch.randint(1, 16, (count,), device=device)
        assert_same(fast(ids), model(ids))


VMAPPED: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "linear": lambda linear, x: torch.vmap(linear)(x),
    "columns": lambda linear, x: torch.vmap(lambda r: r - r.mean(), in_dims=1, out_dims=1)(linear(x)),
    "attention": lambda linear, x: torch.vmap(lambda r: F.scaled_dot_product_attention(r, r, r))(
        linear(x).view(1, -1, 2, 4).transpose(1, 2)
    ).flatten(),
    "rows": lambda linear, x: torch.vmap(lambda r: r.softmax(-1))(linear(x)),
}


@pytest.mark.parametrize("name", VMAPPED)
@BOTH
def test_a_function_transform_is_not_cut(entry: Any, name: str, device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        return VMAPPED[name](linear, x)

    try:
        torch.compile(model, backend="eager", dynamic=True)(rows(4, device))
    except TorchRuntimeError:
        pytest.skip("torch itself does not trace it (attention, in torch 2.11)")
    fast = entry(model)
    for count in (5, 6, 3, 5):
        x = rows(count, device)
        assert_same(fast(x), model(x))
