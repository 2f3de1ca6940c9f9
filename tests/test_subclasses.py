"""Weights and inputs of other classes than torch's own: whatever has plain storage is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from toys import assert_same, compiled, rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError

pytestmark = pytest.mark.usefixtures("no_grad")


class Loaded(nn.Parameter):
    """As serving stacks have them: torch's storage, and attributes for loading."""

    def __new__(cls, data: Tensor, **_: Any) -> Loaded:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: Tensor, *, output_dim: int = 0) -> None:
        self._output_dim = output_dim

    def load(self, loaded: Tensor) -> None:
        self.data.copy_(loaded)


class Silent(Loaded):
    """The same, its operations not looked at."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Doubling(Loaded):
    """A function of its own: a product with it is doubled."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result * 2 if func is F.linear else result


KINDS = [Loaded, Silent, Doubling]
CALLS = (5, 7, 5, 3, 7, 5, 1)


class Model(nn.Module):
    def __init__(self, kind: type[Loaded], width: int = 8) -> None:
        super().__init__()
        self.first, self.second = (kind(torch.randn(width, width)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.first, self.bias)[None, None]
        return F.linear(F.scaled_dot_product_attention(h, h, h, is_causal=True)[0, 0], self.second)


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    made = Model(request.param)
    for name in ("first", "second"):
        setattr(made, name, request.param(getattr(made, name).data.to(device)))
    made.bias.data = made.bias.data.to(device)
    return made


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_weights_of_plain_storage_are_captured(compiler: str, model: Model, device: torch.device) -> None:
    fast = compiled(model, compiler=compiler)
    with pg.counters.expect(traces=1, replays=len(CALLS) - 2, fallbacks=0):
        for n in CALLS:
            x = rows(n, device)
            assert_same(fast(x), model(x))


def test_plan_capture_and_frozen_calls_take_them(model: Model, device: torch.device) -> None:
    fast = compiled(model)
    fast(rows(8, device))
    pg.plan(fast)
    pg.capture(fast, lambda n: rows(n, device), progress=False)
    frozen = pg.freeze(fast, rows(5, device))
    for _ in range(2):
        x = rows(5, device)
        assert_same(frozen(x), model(x))


def test_loading_reaches_the_graphs_and_moving_is_refused(model: Model, device: torch.device) -> None:
    fast, x = compiled(model), rows(5, device)
    fast(x)
    model.first.load(torch.randn(8, 8, device=device))
    assert_same(fast(x), model(x))
    model.first.data = model.first.data.clone()
    with pytest.raises(AddressMovedError, match="first"):
        fast(x)


def test_a_replaced_weight_is_captured_anew(model: Model, device: torch.device) -> None:
    fast, x = compiled(model), rows(5, device)
    fast(x), fast(x)
    model.first = type(model.first)(torch.randn(8, 8, device=device))
    for _ in range(2):
        assert_same(fast(x), model(x))


class Marked(Tensor):
    """An input that carries a name through torch's functions."""


def test_inputs_of_plain_storage_are_copied_in(device: torch.device) -> None:
    plain = Model(Silent).to(device)
    fast = compiled(plain)
    with pg.counters.expect(fallbacks=0):
        for n in CALLS:
            x = rows(n, device)
            found = fast(x.as_subclass(Marked))
            assert_same(found.as_subclass(Tensor), plain(x))
