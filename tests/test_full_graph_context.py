"""FULL mode: a graph serves the context of its capture, and another context is refused by name."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from full_graph_cases import Setup
from torch import Tensor
from toys import rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, ContextError

pytestmark = pytest.mark.usefixtures("no_grad")


def test_another_object_in_the_context_is_refused_by_name(device: torch.device) -> None:
    """The graph reads the old tensor and would answer for another batch."""
    setup = Setup(device)
    setup.call(3)
    setup.call(3)
    setup.live = setup.live.clone()
    with pytest.raises(ContextError, match=r"(?s)4 tokens.*another 'live'.*in place"):
        setup.call(3)
    setup.call(3, key="another")  # a key of its own is captured anew


def test_view_of_the_same_memory_is_the_same_tensor(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3)
    setup.live = setup.live[:]
    with pg.counters.expect(full_replays=1):
        setup.call(3)


def test_numbers_in_the_context_are_compared_by_value(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3, factor=2.0)
    setup.call(2, factor=float("2.0"))
    with pytest.raises(ContextError, match="'factor'"):
        setup.call(3, factor=3.0)


@pytest.mark.parametrize(
    ("captured", "given"), [(2, 2.0), (1, True), ((1, 2), (1, 2.0)), (((0,), 1), ((False,), 1)), (0.0, -0.0)]
)
def test_equal_numbers_of_another_kind_are_another_context(
    captured: Any, given: Any, device: torch.device
) -> None:
    """An op may divide integers, or write the sign of a zero."""
    setup = Setup(device)
    setup.call(3, kind=captured)
    with pytest.raises(ContextError, match="'kind'"):
        setup.call(3, kind=given)
    setup.call(3, kind=captured)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    "change", [Tensor.t, lambda x: x[:1], lambda x: x.view(torch.int32)], ids=["strides", "shape", "dtype"]
)
def test_another_view_of_the_same_memory_is_another_tensor(
    change: Any, inside: bool, device: torch.device
) -> None:
    setup, table = Setup(device), torch.zeros(2, 2, device=device)
    setup.call(3, table=(table, 1) if inside else table)
    setup.call(3, table=(table[:], 1) if inside else table[:])
    with pytest.raises(ContextError, match="'table'"):
        setup.call(3, table=(change(table), 1) if inside else change(table))


@pytest.mark.parametrize("late", [True, False])
def test_fields_that_come_or_go_are_refused(late: bool, device: torch.device) -> None:
    setup = Setup(device)
    fields = {"factor": 2.0}
    setup.call(3, **({} if late else fields))
    with pytest.raises(ContextError, match="'factor'"):
        setup.call(3, **(fields if late else {}))


def test_piecewise_replays_take_any_context(device: torch.device) -> None:
    setup = Setup(device)
    for factor in (1.0, 2.0, 3.0):
        setup.live = setup.live.clone()
        setup.call(3, full=False, factor=factor)


def test_moved_weight_is_refused(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3)
    setup.model.linears[0].weight.data = setup.model.linears[0].weight.data.clone()
    with pytest.raises(AddressMovedError, match="weight"):
        setup.call(3)


def move_data(live: Tensor) -> None:
    live.data = live.data.clone()


def grow(live: Tensor) -> None:
    live.resize_(2)


@pytest.mark.parametrize("change", [move_data, grow])
@pytest.mark.parametrize("inside", [False, True])
def test_tensor_that_was_moved_is_refused(change: Any, inside: bool, device: torch.device) -> None:
    """The object is the same, and its memory is another."""
    setup = Setup(device, check="always")
    fields = {"batch": types.SimpleNamespace(nested=(setup.live,))} if inside else {}
    setup.call(3, **fields)
    setup.call(2, **fields)
    change(setup.live)
    context = pg.forward_context(live=setup.live, full_graph=True, **fields)
    with pytest.raises(ContextError, match=r"tensor of .*(live|batch).* moved"), context:
        setup.fast(rows(3, device))


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {1}])
def test_mutable_field_is_refused_by_name(value: Any, device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3, lengths=value)
    assert "'lengths' is a" in pg.explain(setup.fast).traces[0].failed[4]


def test_tuples_of_constants_are_compared_by_value(device: torch.device) -> None:
    setup = Setup(device)
    for _ in range(3):
        setup.call(3, lengths=(1, *[2]))
    with pytest.raises(ContextError, match="'lengths'"):
        setup.call(3, lengths=(1, 3))


@pytest.mark.parametrize("key", [[1], ([1],), float("nan"), torch.zeros(1)])
def test_key_that_cannot_tell_graphs_apart_is_refused(key: Any) -> None:
    with pytest.raises(ContextError, match="cannot tell graphs apart"), pg.forward_context(graph_key=key):
        pass


@pytest.mark.parametrize("name", ["get", "fields"])
def test_reserved_field_is_refused(name: str) -> None:
    with pytest.raises(ContextError, match=f"cannot be called '{name}'"), pg.forward_context(**{name: 1}):
        pass
