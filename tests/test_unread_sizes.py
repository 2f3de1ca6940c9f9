"""Sizes and numbers that steer a forward without reaching its graph are checked at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from toys import assert_same, compiled, fallbacks, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def scaled(by: Callable[..., Any]) -> Callable[..., Any]:
    """A model that multiplies by what `by` says of its arguments."""
    return lambda x, other: ops.mix(x) + x * by(x, other)


NUMBERS = {
    "larger": scaled(lambda x, k: 100 if k > 3 else 1),
    "equal": scaled(lambda x, k: 100 if k == 4 else 1),
    "odd": scaled(lambda x, k: 1 + k % 2),
    "range": scaled(lambda x, k: sum(range(int(k)))),
    "larger than the count": scaled(lambda x, k: 100 if x.shape[0] > k else 1),
    "times the count": scaled(lambda x, k: 100 if x.shape[0] * k > 20 else 1),
    "in the graph as well": scaled(lambda x, k: (100 if k == 4 else 1) + x * k),
    "as many as tokens, and in the graph": scaled(lambda x, k: x.new_ones(int(k)).sum() * (x.shape[0] == k)),
}
SHAPES = {
    "larger": scaled(lambda x, y: 100 if y.shape[0] > 3 else 1),
    "as many as tokens": scaled(lambda x, y: 100 if y.shape[0] != x.shape[0] else 1),
    "one": scaled(lambda x, y: 100 if y.shape[0] == 1 else 1),
    "in a dictionary": scaled(lambda x, y: 100 if {"y": y}["y"].shape[0] % 2 else 1),
}
OPTIONS: list[dict[str, Any]] = [{}, {"cuda_graphs": "off"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("model", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("kind", [int, float])
def test_a_number(
    kind: Callable[[int], Any], model: Callable[..., Any], options: dict[str, Any], device: torch.device
) -> None:
    fast = compiled(model, **options)
    for tokens in (5, 7, 3):
        x = rows(tokens, device)
        for number in (2, 3, 4, 5, 2, 4, 6):
            assert_same(fast(x, kind(number)), model(x, kind(number)))


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_the_shape_of_a_tensor(model: Callable[..., Any], device: torch.device) -> None:
    fast = compiled(model)
    for tokens, other in ((5, 5), (7, 7), (5, 6), (5, 2), (5, 3), (4, 4), (4, 1), (1, 5), (1, 1), (5, 5)):
        x, y = rows(tokens, device), rows(other, device)
        assert_same(fast(x, y), model(x, y))


GROUPED: dict[str, Callable[..., Any]] = {
    "groups": lambda x, groups: x.view(groups, x.shape[0] // groups, 8).cumsum(1).view(-1, 8),
    "rows": lambda x, rows: x[:1].expand(rows, 8) + x[-rows:],
    "rows of another": lambda x, rows: x * 2 + x.new_ones(rows).sum() if x.shape[0] == rows else x * 3,
}


@pytest.mark.parametrize("model", GROUPED.values(), ids=GROUPED)
def test_a_number_that_was_the_token_count(model: Callable[..., Any], device: torch.device) -> None:
    """Dynamo has one symbol for both then."""
    fast = compiled(model, token_dim={"x": 0})
    for tokens, number in ((8, 8), (6, 6), (6, 2), (8, 4), (4, 4), (8, 8)):
        x = rows(tokens, device)
        assert_same(fast(x, number), model(x, number))


def test_two_numbers_that_were_equal(device: torch.device) -> None:
    def model(x: torch.Tensor, k: int, m: int) -> torch.Tensor:
        return x * 2 + x.new_ones(k, m).sum() if k == m else x * 3

    fast = compiled(model, token_dim={"x": 0})
    for tokens, k, m in ((8, 7, 7), (6, 5, 5), (6, 5, 4), (6, 4, 4)):
        assert_same(fast(x := rows(tokens, device), k, m), model(x, k, m))


BATCHED: dict[str, Callable[..., Any]] = {
    "branch": lambda x: x * 2 if x.shape[0] == 1 else x * 3,
    "spread": lambda x: x + (x.std(0) if x.shape[0] > 1 else 0),
    "product": lambda x: torch.bmm(x, x.transpose(1, 2)) if x.shape[0] > 1 else x,
}


@pytest.mark.parametrize("model", BATCHED.values(), ids=BATCHED)
def test_another_size_that_becomes_one(model: Callable[..., Any], device: torch.device) -> None:
    fast = compiled(model, token_dim={"x": 1})
    for batch, tokens in ((2, 8), (3, 8), (1, 8), (3, 5), (1, 5), (2, 1), (1, 1), (3, 1)):
        x = torch.randn(batch, tokens, 8, device=device)
        assert_same(fast(x), model(x))


def test_numbers_of_the_closure(device: torch.device) -> None:
    number = 2

    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.mix(x) + x * (100 if number > 3 else 1)

    fast = compiled(model)
    for given in (2, 3, 4, 5, 2, 7):
        number = given
        assert_same(fast(x := rows(5, device)), model(x))


def test_a_branch_of_a_trace_that_stays_whole(device: torch.device) -> None:
    """Gradients keep the trace whole; nothing but Dynamo's guards looks at its sizes."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.mix(x) * 0 + x * (100 if x.shape[0] > 6 else 1)

    fast = compiled(model)
    with torch.enable_grad():
        for tokens in (5, 4, 8, 7, 3, 1, 9):
            x = rows(tokens, device).requires_grad_()
            assert_same(fast(x), model(x))


def test_what_the_graph_takes_needs_no_guards_of_dynamo(device: torch.device) -> None:
    fast = compiled(lambda x, y: ops.mix(x * 2) + y)
    with pg.counters.expect(traces=1):
        for tokens in (5, 7, 3, 9, 4):
            fast(rows(tokens, device), rows(tokens, device))


def test_a_width_that_was_found_to_be_one_number(device: torch.device) -> None:
    """Dynamo makes a symbol of a width that differs between two models of one code, then finds its value."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return ops.mix(x) + x * (100 if x.shape[1] == 12 else 1)

    for first, second in ((8, 12), (12, 9), (9, 12)):
        fast = compiled(model, token_dim={"x": 0})
        for tokens, width in ((5, first), (4, first), (5, second), (1, first), (1, second), (3, first)):
            x = torch.randn(tokens, width, device=device)
            assert_same(fast(x), model(x))


def test_models_of_several_widths_can_be_frozen(device: torch.device) -> None:
    def of_width(width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = torch.nn.Linear(width, width, device=device)
        return lambda x: ops.mix(layer(x)) + x

    for width in (8, 12, 6):
        model = of_width(width)
        fast = compiled(model, token_dim={"x": 0})
        frozen = pg.freeze(fast, torch.randn(4, width, device=device))
        for tokens in (4, 1, 6):
            assert_same(frozen(x := torch.randn(tokens, width, device=device)), model(x))
            with pg.counters.expect(traces=0):
                assert_same(fast(x), model(x))
        with pytest.raises(pg.errors.FreezeError, match=f"size {width} in dimension 1"):
            frozen(torch.randn(4, width + 1, device=device))


def unchanged(x: torch.Tensor) -> Any:
    return (x.flip(-1), 1) if x.shape[0] % 2 == 0 else (x, 2)


def test_a_branch_that_leaves_no_graph(device: torch.device) -> None:
    fast = compiled(unchanged, token_dim={"x": 0})
    for tokens in (5, 8, 3, 1, 4, 2):
        x = rows(tokens, device)
        (found, which), (wanted, expected) = fast(x), unchanged(x)
        assert_same(found, wanted)
        assert which == expected


def test_one_token_after_a_parameter_was_replaced(device: torch.device) -> None:
    layer = torch.nn.Linear(8, 8, device=device)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        return y * 3 if x.shape[0] == 1 else y

    fast = compiled(model, token_dim={"x": 0})
    for _ in range(3):
        for tokens in (6, 1, 1, 4):
            assert_same(fast(x := rows(tokens, device)), model(x))
        layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))
        for tokens in (1, 1, 5, 1):
            assert_same(fast(x := rows(tokens, device)), model(x))


VIEWS: dict[str, Callable[[int, torch.device], torch.Tensor]] = {
    "later rows": lambda count, device: rows(count + 3, device)[3:],
    "rows from anywhere": lambda count, device: rows(2 * count, device)[count % 3 : count % 3 + count],
    "transposed": lambda count, device: rows(count, device).T.contiguous().T,
    "columns": lambda count, device: rows(count, device)[:, :6],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_larger_tensors(name: str, device: torch.device) -> None:
    """Where a view begins is no size of the trace; how far its rows are apart is one."""
    torch._dynamo.reset()  # else Dynamo knows that the layouts of this code's argument vary
    fast = compiled(lambda x: ops.mix(x * 2) + x, token_dim={"x": 0})
    for tokens in (8, 5, 7, 5, 1, 6, 2):
        x = VIEWS[name](tokens, device)
        assert_same(fast(x), ops.mix(x * 2) + x)
    assert set(fallbacks(fast)) == ({"second_dynamic_dimension"} if name == "columns" else set())
