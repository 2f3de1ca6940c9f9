"""A tensor that takes the place of another one: the answer is eager's, and the old graphs are gone.

A replaced parameter, buffer or attribute is another tensor in the same place. New storage of the same tensor
(`.data = ...`) is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from toys import BOTH, WIDTH, assert_same, compiled, ops, rows, through_torch

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError

pytestmark = pytest.mark.usefixtures("no_grad")


class Half(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5


class Model(nn.Module):
    """Linears in a container, a tied weight, a buffer and a plain attribute; 2 segments around one op."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[1].weight
        self.register_buffer("shift", torch.randn(WIDTH))
        self.plain = torch.randn(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(ops.mix(self.layers(x)) + self.shift) * self.plain


def new(*shape: int, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, device=device))


def by_attribute(model: Model, device: torch.device) -> None:
    model.layers[1].bias = new(WIDTH, device=device)


def first_weight(model: Model, device: torch.device) -> None:
    model.layers[0].weight = new(WIDTH, WIDTH, device=device)


def in_dictionary(model: Model, device: torch.device) -> None:
    model.layers[2]._parameters["weight"] = new(WIDTH, WIDTH, device=device)


def whole_layer(model: Model, device: torch.device) -> None:
    model.layers[1].load_state_dict(
        {"weight": new(WIDTH, WIDTH, device=device), "bias": new(WIDTH, device=device)}, assign=True
    )


def all_of_it(model: Model, device: torch.device) -> None:
    model.load_state_dict(Model().to(device).state_dict(), assign=True)


def tied(model: Model, device: torch.device) -> None:
    model.head.weight = model.layers[1].weight = new(WIDTH, WIDTH, device=device)


def untied(model: Model, device: torch.device) -> None:
    model.head.weight = new(WIDTH, WIDTH, device=device)


def the_buffer(model: Model, device: torch.device) -> None:
    model.shift = torch.randn(WIDTH, device=device)


def the_attribute(model: Model, device: torch.device) -> None:
    model.plain = torch.randn(WIDTH, device=device)


def parametrized(model: Model, device: torch.device) -> None:
    model.layers[1].parametrizations.weight.original = new(WIDTH, WIDTH, device=device)


REPLACEMENTS = (
    *(by_attribute, first_weight, in_dictionary, whole_layer, all_of_it, tied, untied, the_buffer),
    *(the_attribute, parametrized),
)


def made(device: torch.device, replace: Callable[..., None]) -> Model:
    model = Model().to(device)
    model.plain = model.plain.to(device)
    if replace is parametrized:
        model.head.weight = new(WIDTH, WIDTH, device=device)
        parametrize.register_parametrization(model.layers[1], "weight", Half())
    return model


@BOTH
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=lambda replace: replace.__name__)
def test_a_replaced_tensor_is_captured_anew(entry: Callable, replace: Callable, device: torch.device) -> None:
    model = made(device, replace)
    fast = entry(model)
    for _ in range(3):
        fast(rows(3, device))
    replace(model, device)
    with pg.counters.expect(tapes=1, replays=2, fallbacks=0):
        for _ in range(3):
            x = rows(3, device)
            assert_same(fast(x), model(x))


@BOTH
def test_a_tensor_that_is_put_back_finds_its_graphs(entry: Callable, device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = entry(model), rows(3, device)
    kept, other = model.layers[1].bias, new(WIDTH, device=device)
    for _ in range(3):
        fast(x)
    for bias in (other, kept):
        model.layers[1].bias = bias
        assert_same(fast(x), model(x))
    with pg.counters.expect(tapes=0, replays=4):
        for bias in (other, kept, other, kept):
            model.layers[1].bias = bias
            assert_same(fast(x), model(x))


def test_graphs_go_with_the_parameter_that_they_read(device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = compiled(model), rows(3, device)
    for _ in range(5):
        fast(x)
        model.layers[1].bias = new(WIDTH, device=device)
    fast(x)
    (trace,) = pg.explain(fast).traces
    assert len(trace.buckets) == 1
    assert pg.plan(fast).buckets


def test_after_pg_capture_a_replaced_parameter_is_not_captured_lazily(device: torch.device) -> None:
    model = made(device, by_attribute)
    fast = compiled(model)
    pg.capture(fast, lambda tokens: rows(tokens, device), progress=False)
    by_attribute(model, device)
    with pg.counters.expect(**{"replays": 0, "fallbacks:not_captured": 1, "tapes": 0}):
        assert_same(fast(x := rows(3, device)), model(x))
    pg.capture(fast, lambda tokens: rows(tokens, device), progress=False)
    with pg.counters.expect(replays=1, fallbacks=0):
        assert_same(fast(x), model(x))


@BOTH
def test_new_storage_of_the_same_parameter_is_an_error(entry: Callable, device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = entry(model), rows(3, device)
    for _ in range(3):
        fast(x)
    model.layers[1].bias.data = torch.randn(WIDTH, device=device)
    for _ in range(2):
        with pytest.raises(AddressMovedError, match=r"layers.*1.*bias"):
            fast(x)
    pg.reset()
    assert_same(fast(x), model(x))


def test_new_storage_is_named_where_another_parameter_was_replaced_too(device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = compiled(model), rows(3, device)
    fast(x)
    kept = model.layers[0].bias  # with it its graphs stay
    model.layers[0].bias = new(WIDTH, device=device)
    assert kept is not model.layers[0].bias
    model.layers[1].bias.data = torch.randn(WIDTH, device=device)
    with pytest.raises(AddressMovedError, match=r"layers.*1.*bias"):
        fast(x)


def test_torch_refuses_to_swap_a_parameter_that_graphs_read(device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = compiled(model), rows(3, device)
    before = fast(x)
    with pytest.raises(RuntimeError, match="weakref"):
        torch.utils.swap_tensors(model.layers[1].bias, new(WIDTH, device=device))
    assert_same(fast(x), before)


def test_a_frozen_call_sees_a_replaced_parameter_after_rebind(device: torch.device) -> None:
    model = made(device, by_attribute)
    fast, x = compiled(model), rows(3, device)
    step = pg.freeze(fast, x)
    before = step(x)
    for replace in (by_attribute, the_buffer, all_of_it):
        replace(model, device)
        assert_same(step(x), before)
        step.rebind()
        assert_same(step(x), model(x))
        before = step(x)


# --- tensors that the model replaces itself --------------------------------------------------------------


class Assigns(nn.Module):
    """Assigns an attribute, and moves another one to where it is, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = torch.randn(16, WIDTH)
        self.state = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(x.device)
        y = ops.mix(self.linear(x)) + self.table[: x.shape[0]]
        self.state = self.state * 0.5 + self.linear.bias
        return y + self.state


class AssignsBuffer(Assigns):
    def __init__(self) -> None:
        super().__init__()
        del self.state
        self.register_buffer("state", torch.zeros(WIDTH))


class AssignsLater(Assigns):
    """The assignment lies in another graph than the use."""

    def forward(self, x: Tensor) -> Tensor:
        y = ops.mix(self.linear(x)) + self.state
        torch._dynamo.graph_break()
        self.state = self.state * 0.5 + self.linear.bias
        return y


@pytest.mark.parametrize("entry", [compiled, through_torch], ids=["pg.compile", "torch.compile"])
@pytest.mark.parametrize("kind", [Assigns, AssignsBuffer, AssignsLater])
def test_an_attribute_that_the_model_assigns_is_copied(
    entry: Callable, kind: type[nn.Module], device: torch.device
) -> None:
    torch.manual_seed(0)
    model = kind().to(device)
    torch.manual_seed(0)
    plain = kind().to(device)
    for one in (model, plain):
        for name, value in list(vars(one).items()):
            if isinstance(value, Tensor):
                setattr(one, name, value.to(device))
    fast = entry(model)
    for count in (3, 4, 3, 8, 3, 6):
        x = rows(count, device)
        assert_same(fast(x), plain(x))
    with pg.counters.expect(tapes=0, traces=0):
        for count in (3, 8, 3, 4, 6):
            x = rows(count, device)
            assert_same(fast(x), plain(x))


class Box:
    """An object that the model makes, fills and returns."""

    value: Tensor


class Boxes(Assigns):
    """Also assigns to objects that no caller can name."""

    def forward(self, x: Tensor) -> Tensor:
        box = Box()
        box.value = super().forward(x)
        torch._dynamo.graph_break()
        other = Box()
        other.value = ops.mix(box.value)
        box.value = box.value + other.value
        torch._dynamo.graph_break()
        return box.value


def test_an_object_that_the_model_makes_itself_may_be_assigned_to(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Boxes().to(device)
    torch.manual_seed(0)
    plain = Boxes().to(device)
    for one in (model, plain):
        one.table, one.state = one.table.to(device), one.state.to(device)
    fast = compiled(model)
    for count in (3, 4, 3, 8, 3, 6):
        assert_same(fast(x := rows(count, device)), plain(x))
