"""Attributes of what pg.compile returns: read, set and deleted, they are the model's."""

from __future__ import annotations

import pytest
import torch
from test_replaced_tensors import Model
from torch import Tensor, nn
from toys import WIDTH, assert_same, compiled, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def on(device: torch.device) -> Model:
    model = Model().to(device)
    model.plain = model.plain.to(device)  # no buffer
    return model


def test_what_is_set_on_the_compiled_model_is_the_models(device: torch.device) -> None:
    """As with torch.compile: the forward reads it, in calls that had graphs before too."""
    model = on(device)
    fast = compiled(model)
    for tokens in (5, 3):
        fast(rows(tokens, device))
    fast.plain = torch.randn(WIDTH, device=device)
    fast.head = nn.Linear(WIDTH, WIDTH, device=device)
    assert fast.head is model.head
    for tokens in (5, 3, 5):
        x = rows(tokens, device)
        assert_same(fast(x), model(x))
    del fast.plain
    assert not hasattr(model, "plain")


def test_what_is_set_on_a_compiled_function_stays_there() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    fast = compiled(double)
    fast.note = "kept"
    assert fast.note == "kept"
    assert not hasattr(double, "note")
    del fast.note
    assert not hasattr(fast, "note")


def test_methods_that_return_the_model_return_the_compiled_one(device: torch.device) -> None:
    """`pg.compile(model).eval()` is no model without graphs."""
    model = on(device)
    fast = compiled(model)
    for same in (fast.eval(), fast.to(device), fast.float(), fast.requires_grad_(False)):
        assert same is fast
    assert not model.training
    for tokens in (5, 3, 5):
        x = rows(tokens, device)
        assert_same(fast(x), model(x))
    assert fast.train() is fast and model.training
    assert fast.state_dict().keys() == model.state_dict().keys()


class Settings(dict[str, int]):
    """A common kind of configuration: what it is asked for is looked up."""

    def __getattr__(self, name: str) -> int:
        return self[name]


def test_methods_and_objects_of_the_model_go_out_as_they_are() -> None:
    model = Model()
    model.settings = Settings(width=WIDTH)
    fast = compiled(model)
    assert fast.settings is model.settings
    assert fast.forward == model.forward and fast.state_dict == model.state_dict
    assert fast.get_submodule("head") is model.head


class Callable:
    """No module, and nothing can be set on it."""

    __slots__ = ()

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def test_what_is_set_on_a_compiled_object_stays_there() -> None:
    fast = compiled(Callable())
    fast.note = "kept"
    assert fast.note == "kept"
