"""Results that are views of arguments are views of the caller's tensors, whatever answered the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from toys import COUNTS, REPLAYS, WIDTH, assert_same, compiled, ops, rows, through_torch

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a slice of rows": lambda x: x[1:],
    "columns": lambda x: x[:, 2:5],
    "transposed": lambda x: x.t(),
    "with a dimension more": lambda x: x[None],
    "in heads": lambda x: x.view(-1, 2, WIDTH // 2).transpose(0, 1),
    "flat, by a size": lambda x: x.reshape(x.shape[0] * WIDTH),
    "one of several": lambda x: x.split(3, 1)[1],
    "the last row": lambda x: x[x.shape[0] - 1],
    "expanded": lambda x: x[:, None].expand(-1, 3, -1),
}
ENTRIES = pytest.mark.parametrize("entry", [compiled, through_torch], ids=["pg.compile", "torch.compile"])


def check_views(fast: Callable, eager: Callable, counts: Sequence[int], device: torch.device) -> None:
    """The views of both sides are equal, and what is written to them reaches the argument."""
    for count in counts:
        x = rows(count, device)
        mine, theirs = x.clone(), x.clone()
        (view, result), (wanted_view, wanted) = fast(mine), eager(theirs)
        assert_same(result, wanted)
        assert_same(view, wanted_view)
        assert view.stride() == wanted_view.stride()
        view[..., :1].fill_(7), wanted_view[..., :1].fill_(7)
        assert_same(mine, theirs)


@ENTRIES
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_an_argument(view: Callable, entry: Callable, device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return view(x), ops.mix(x * 2)

    fast = entry(model)
    check_views(fast, model, (3, 5), device)
    with pg.counters.expect(**{"fallbacks:returns_a_view": 0}):
        check_views(fast, model, COUNTS, device)


def test_calls_that_return_views_are_replayed(device: torch.device) -> None:
    fast = compiled(lambda x: (x[1:], ops.mix(x)))
    with pg.counters.expect(replays=REPLAYS, **{"fallbacks:returns_a_view": 0}):
        for count in COUNTS:
            fast(rows(count, device))


def test_views_of_two_arguments_beside_numbers_and_the_arguments_themselves(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> tuple:
        return y.t(), x, x.shape[0], ops.mix(x + y), x[0], y

    fast = compiled(model, token_dim={"x": 0, "y": 0})
    for count in COUNTS:
        x, y = rows(count, device), rows(count, device)
        found, wanted = fast(x, y), model(x, y)
        assert found[1] is x and found[5] is y and found[2] == count
        for place in (0, 3, 4):
            assert_same(found[place], wanted[place])
        assert found[0].data_ptr() == y.data_ptr() and found[4].data_ptr() == x.data_ptr()


def test_a_view_of_a_weight_is_the_weight(device: torch.device) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return ops.mix(self.linear(x)), self.linear.weight.t()

    model = Tied().to(device)
    fast = compiled(model)
    with pg.counters.expect(replays=REPLAYS):
        for count in COUNTS:
            assert fast(rows(count, device))[1].data_ptr() == model.linear.weight.data_ptr()


def test_nothing_but_a_view(device: torch.device) -> None:
    fast = through_torch(lambda x: x[1:].t())
    for count in (3, 5, 4, 1, 9, 4):
        x = rows(count, device)
        assert fast(x).data_ptr() == x[1:].data_ptr() or count == 1
        assert_same(fast(x), x[1:].t())


def test_a_view_of_what_the_forward_writes_is_no_copy(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        return x[1:], ops.mix(x)

    for entry in (compiled, through_torch):
        fast = entry(model)
        check_views(fast, model, (3, 5, 3, 4, 5), device)


def test_a_view_that_the_forward_writes_stays_in_its_trace(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        later = x[:, 1:]
        later.add_(1)
        return later, ops.mix(x)

    check_views(compiled(model), model, (3, 5, 3, 4, 5), device)


def test_a_frozen_call_refuses_views_of_its_arguments(device: torch.device) -> None:
    fast = compiled(lambda x: (x[1:], ops.mix(x)))
    with pytest.raises(pg.errors.FreezeError, match="did not compute"):
        pg.freeze(fast, rows(4, device))


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.transpose(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "flip dims": lambda x: x.permute(*reversed(range(x.ndim))),
    "narrow": lambda x: x.narrow(-1, 0, (x.shape[-1] + 1) // 2),
    "every other": lambda x: x[..., ::2],
    "chunk": lambda x: x.chunk(2, -1)[0],
    "unbind": lambda x: x.unbind(0)[0] if x.ndim > 1 else x,
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
}


@given(names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4))
@settings(max_examples=12)
def test_random_chains_of_views(names: list[str]) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        view = x
        for name in names:
            view = STEPS[name](view)
        return view, ops.mix(x) + 1

    torch._dynamo.reset()
    fast, device = compiled(model), torch.device("cpu")
    for count in (5, 3, 8, 3, 5):
        x = rows(count, device)
        mine, theirs = x.clone(), x.clone()
        (view, result), (wanted_view, wanted) = fast(mine), model(theirs)
        assert_same(result, wanted)
        assert view.shape == wanted_view.shape and torch.equal(view, wanted_view)
        assert view.storage_offset() == wanted_view.storage_offset()
        assert view.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()


class Slots(nn.Module):
    """Which rows it returns says a number that it moves on."""

    def __init__(self, view: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view
        self.register_buffer("rows", torch.arange(16.0).view(16, 1))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        view = self.view(self.rows, self.place)
        self.place.add_(1)
        return ops.mix(x), view


def _first(rows: Tensor, place: Tensor) -> Tensor:
    count = place.item()
    torch._check(count >= 0)
    torch._check(count <= 16)
    return rows[:count]


@ENTRIES
@pytest.mark.parametrize(
    "view", [_first, lambda rows, place: rows.narrow(0, place, 2)], ids=["item", "narrow"]
)
def test_a_view_that_a_number_in_a_tensor_chooses(
    view: Callable, entry: Callable, device: torch.device
) -> None:
    """The number is read where the forward reads it, before it moves on."""
    mine, theirs = Slots(view).to(device), Slots(view).to(device)
    fast = entry(mine)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        try:
            torch.compile(Slots(view).to(device), backend="eager")(rows(3, device))
        except torch._dynamo.exc.InternalTorchDynamoError as error:  # narrow, torch 2.11 with a GPU
            pytest.skip(f"torch cannot trace it: {str(error).splitlines()[0]}")
        for count in (3, 5, 4, 3, 5):
            x = rows(count, device)
            for found, wanted in zip(fast(x), theirs(x), strict=True):
                assert_same(found, wanted)


@ENTRIES
@pytest.mark.parametrize(
    "view",
    [lambda row: row[1:], lambda row: row.view(2, WIDTH // 2), lambda row: row.detach()],
    ids=["slice", "view", "detach"],
)
def test_a_view_made_inside_of_vmap(view: Callable, entry: Callable, device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.vmap(view)(x), ops.mix(x)

    fast = entry(model)
    for count in (3, 5, 4, 3):
        x = rows(count, device)
        for found, wanted in zip(fast(x), model(x), strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("outside", [False, True])
def test_a_view_has_the_history_of_the_grad_mode_that_it_was_made_in(
    outside: bool, device: torch.device
) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.set_grad_enabled(not outside):
            view = x[1:]
        return view, ops.mix(x.detach())

    fast = compiled(model)
    x = rows(3, device).requires_grad_()
    with torch.set_grad_enabled(outside):
        found, wanted = fast(x)[0], model(x)[0]
    assert (found.grad_fn is None) == (wanted.grad_fn is None) == outside


class Cropped(Tensor):
    """Its transposition loses a row, each time that it is asked for one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made[1:] if func is Tensor.t else made


def test_a_view_is_made_by_the_functions_that_were_traced(device: torch.device) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.t(), ops.mix(x * 1)

    fast = compiled(model)
    for count in (3, 5, 3):
        x = rows(count, device).as_subclass(Cropped)
        assert fast(x)[0].shape == model(x)[0].shape
