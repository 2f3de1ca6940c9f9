"""Whether a model does the same with one token as with several, and the option `one_token`: who says so."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from toys import WIDTH, Blocks, assert_same, compiled, ops, rows
from transformers.modeling_outputs import BaseModelOutput

import piecewise_graph as pg
from piecewise_graph.frontend import one_token

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("option", "looks"), [("traced", 1), ("trusted", 0)])
def test_a_trusted_model_is_not_traced_at_one_token(
    option: str, looks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    look = one_token._Noting.__call__
    monkeypatch.setattr(one_token._Noting, "__call__", lambda *a: found.append(a) or look(*a))
    model = Blocks().to(device)
    fast = compiled(model, one_token=option)
    for count in (3, 1, 2, 1):
        x = rows(count, device)
        assert_same(fast(x), model(x))
    assert len(found) == looks


def swapped(x: Tensor) -> Any:
    a, b = x * 2, x * 3
    return (b, a) if x.shape[0] == 1 else (a, b)


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Any:
        a, b = x * 2, x * 3
        self.last = a if x.shape[0] > 1 else b
        return a + b, self.last


class Result(NamedTuple):
    hidden: Tensor
    kind: str


RESULTS: dict[str, Any] = {
    "in another order": swapped,
    "a word": lambda x: (x * 2, "prefill" if x.shape[0] > 1 else "decode"),
    "a key": lambda x: {"a" if x.shape[0] > 1 else "b": x * 2},
    "a list or a tuple": lambda x: [x * 2, x + 1] if x.shape[0] > 1 else (x * 2, x + 1),
    "one of two twice": lambda x: ((a := x * 2), (b := x + 1), a if x.shape[0] > 1 else b),
    "numbers": lambda x: (x * 2, list(range(min(x.shape[0], 2)))),
    "an argument or nothing": lambda x: (x * 2, x if x.shape[0] == 1 else None),
    "an attribute": Remembers(),
}
ALIKE: dict[str, Any] = {
    "tensors": lambda x: {"h": x * 2, "more": [x + 1, (x, None, "word")]},
    "the count": lambda x: (x * 2, x.shape[0], x.shape[0] + 1, x * 3),
    "an answer": lambda x: (x * 2, x.shape[0] > 1),
    "an object": lambda x: Result(x * 2, "word"),
    "an output": lambda x: BaseModelOutput(last_hidden_state=x * 2),
    "one tensor": lambda x: x * 2,
}


@pytest.mark.parametrize(
    ("model", "traces"),
    [*((model, 2) for model in RESULTS.values()), *((model, 1) for model in ALIKE.values())],
    ids=[*RESULTS, *ALIKE],
)
def test_what_is_returned_at_one_token_may_differ(model: Any, traces: int, device: torch.device) -> None:
    """The calls are the same. What does not differ has no trace for one token."""
    fast = compiled(model, token_dim={"x": 0})
    with pg.counters.expect(traces=traces):
        for count in (8, 5, 1, 1, 3, 1):
            x = rows(count, device)
            assert_alike(fast(x), model(x))


class AsksAtOne(nn.Module):
    """What it asks with one token, its trace of several does not know."""

    flag = False

    def forward(self, x: Tensor, decode: bool = False, bias: Tensor | None = None) -> Tensor:
        if x.shape[0] == 1 and (decode or self.flag or self.training or bias is not None):
            return x * 3
        return x * 2


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an argument": ({"decode": True}, {}),
    "an optional tensor": ({"bias": torch.ones(5)}, {}),
    "an attribute": ({}, {"flag": True}),
    "the mode": ({}, {"training": True}),
}


@pytest.mark.parametrize(("given", "attributes"), CHANGES.values(), ids=CHANGES)
def test_what_only_one_token_asks_for_may_change(
    given: dict[str, Any], attributes: dict[str, Any], device: torch.device
) -> None:
    model = AsksAtOne().eval()
    fast = compiled(model, token_dim={"x": 0})
    for changed in (False, False, True, True, False, True):
        kwargs = {name: _on(device, value) for name, value in given.items()} if changed else {}
        vars(model).update({name: value is changed for name, value in attributes.items()})
        for count in (3, 1, 8, 1):
            x = rows(count, device)
            assert_same(fast(x, **kwargs), model(x, **kwargs))


def test_a_call_of_one_token_without_a_graph_runs_twice_once(device: torch.device) -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 1:
                self.calls += 1
                return x
            return x * 2

    model = Counts()
    fast = compiled(model, token_dim={"x": 0})
    for count in (3, 1, 1, 1, 1):
        fast(rows(count, device))
    assert model.calls == 5  # the first of them is looked at, which has no graph to stop in front of


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def test_a_size_that_only_one_token_asks_for_may_change(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return x * 3 if x.shape[0] == 1 and y.shape[1] > 4 else x * 2 + y.sum()

    fast = compiled(model, token_dim={"x": 0})
    for width in (3, 6, 3, *range(4, 16)):
        for count in (3, 1):
            x, y = rows(count, device), torch.ones(5, width, device=device)
            assert_same(fast(x, y), model(x, y))


def assert_alike(found: Any, expected: Any) -> None:
    """The same structure, with the same tensors and constants."""
    found, structure = tree_flatten(found)
    expected, expected_structure = tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert_same(one, other)
        else:
            assert one == other


def test_a_frozen_call_at_one_token_does_not_return_what_several_do(device: torch.device) -> None:
    frozen = pg.freeze(compiled(swapped, token_dim={"x": 0}), rows(8, device))
    with pytest.raises(pg.errors.FreezeError, match="one token"):
        frozen(rows(1, device))


@pytest.mark.parametrize(("option", "factor"), [("traced", 1), ("trusted", 2)])
def test_what_a_wrong_promise_costs(option: str, factor: int, device: torch.device) -> None:
    fast = compiled(lambda x: x if x.shape[0] == 1 else x * 2, one_token=option)
    fast(rows(3, device))
    x = rows(1, device)
    assert_same(fast(x), x * factor)


WRITTEN: dict[str, Any] = {
    "contiguous": lambda y: y.view(-1, 2, 4).transpose(0, 1).contiguous(),
    "reshape": lambda y: y.view(-1, 2, 4).transpose(0, 1).reshape(-1),
    "flatten": lambda y: y.view(-1, 2, 4).transpose(0, 1).flatten(),
    "expanded": lambda y: y[:1].expand(y.shape[0], -1).contiguous(),
    "memory format": lambda y: y.view(1, -1, 2, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize(
    ("option", "compiler", "by"), [("traced", "eager", "torch"), ("trusted", "aot_eager", "an op")]
)
@pytest.mark.parametrize("copied", WRITTEN.values(), ids=WRITTEN)
def test_what_is_copied_of_several_rows_is_no_copy_of_one(
    copied: Any, by: str, compiler: str, option: str, device: torch.device
) -> None:
    """It is written then, and read by its first name."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        made = copied(y)
        made.mul_(0.5) if by == "torch" else ops.halve(made)
        return ops.mix(y) + y

    fast = compiled(model, compiler=compiler, one_token=option)
    with pg.counters.expect(traces=2):
        for count in (5, 1, 1, 3, 1):
            x = rows(count, device)
            assert_same(fast(x), model(x))


def test_a_copy_that_is_written_and_read_by_one_name_is_served_by_one_trace(device: torch.device) -> None:
    """The columns of queries are read once more, those of values are others."""

    def model(x: Tensor) -> Tensor:
        q, k, v = torch.cat([x * 2, x * 3, x * 4], -1).split(WIDTH, -1)
        q, k = q.contiguous(), k.contiguous()
        q.mul_(0.5)
        ops.halve(k)
        return ops.mix(q) + k + v

    fast = compiled(model)
    with pg.counters.expect(traces=1, fallbacks=0):
        for count in (5, 1, 1, 3, 1):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    frozen = pg.freeze(fast, rows(5, device))
    x = rows(1, device)
    assert_same(frozen(x), model(x))


def test_a_copy_of_a_copy_is_the_first_tensor_of_one_row(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = (x * 2).view(-1, 2, 4)
        one = y.transpose(0, 1).contiguous()
        other = one.transpose(0, 1).contiguous()
        other.mul_(0.5)
        return ops.mix(y.flatten(1)) + one.sum()

    fast = compiled(model)
    for count in (5, 1, 1, 3, 1):
        x = rows(count, device)
        assert_same(fast(x), model(x))
