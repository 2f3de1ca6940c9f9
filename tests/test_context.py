"""pg.forward_context: one context per batch, and nothing of it remains afterwards."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import assert_same, compiled, define, rows

import piecewise_graph as pg
from piecewise_graph.errors import ContextError

pytestmark = pytest.mark.usefixtures("no_grad")

define(
    "scale_by_context(Tensor x) -> Tensor",
    lambda x: x * pg.get_forward_context().factor,
    torch.empty_like,
)
pg.register_splitting_op("toy::scale_by_context")


def test_fields_are_attributes_inside_the_block_only() -> None:
    with pg.forward_context(lengths=[1, 2], page=16) as context:
        assert pg.get_forward_context() is context
        assert (context.lengths, context.page) == ([1, 2], 16)
        assert context.get("page") == 16
        assert context.get("missing", 7) == 7
    assert pg.get_forward_context().get("page") is None


def test_missing_field_names_itself_and_those_that_exist() -> None:
    with pg.forward_context(page=16), pytest.raises(ContextError, match=r"(?s)'lengths'.*page"):
        pg.get_forward_context().lengths  # noqa: B018
    with pytest.raises(ContextError, match=r"(?s)'lengths'.*none"):
        pg.get_forward_context().lengths  # noqa: B018


def test_nesting_is_refused_and_leaves_the_outer_context() -> None:
    with pg.forward_context(page=16):
        with pytest.raises(ContextError, match="inside another"), pg.forward_context(page=32):
            pass
        assert pg.get_forward_context().page == 16


def test_context_without_fields_is_a_context_too() -> None:
    with pg.forward_context(), pytest.raises(ContextError), pg.forward_context():
        pass


def test_exception_leaves_no_context_behind() -> None:
    with pytest.raises(ZeroDivisionError), pg.forward_context(page=16):
        raise ZeroDivisionError
    with pg.forward_context(page=32) as context:
        assert context.page == 32


def test_context_is_frozen() -> None:
    fields: dict[str, Any] = {"page": 16}
    with pg.forward_context(**fields) as context:
        with pytest.raises(AttributeError, match="frozen"):
            context.page = 32
        with pytest.raises(AttributeError):
            context.other = 1


def test_one_object_serves_every_step_of_a_loop() -> None:
    step = pg.forward_context(page=16)
    for _ in range(2):
        with step as context, pytest.raises(ContextError, match="inside another"), step:
            pass
        assert context.page == 16
        assert pg.get_forward_context().get("page") is None


def test_threads_may_share_one_object() -> None:
    step, seen = pg.forward_context(page=16), []
    barrier = threading.Barrier(2, timeout=10)

    def enter() -> None:
        with step as context:
            barrier.wait()
            seen.append(context.page)
            barrier.wait()

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [16, 16]


@pytest.mark.parametrize("traced", ["not traced", "itself", "its caller"])
def test_it_decorates_a_function_that_torch_may_compile(traced: str) -> None:
    @pg.forward_context(factor=4.0)
    def scaled(x: Tensor) -> Tensor:
        return torch.ops.toy.scale_by_context(x + 1) * 3

    called = scaled if traced != "its caller" else lambda x: scaled(x) * 1
    fast = called if traced == "not traced" else torch.compile(called, backend="eager")
    for count in (2, 3):
        assert torch.equal(fast(torch.ones(count)), torch.full((count,), 24.0))


def test_a_function_that_torch_compiles_may_enter_one() -> None:
    def scaled(x: Tensor, factor: float) -> Tensor:
        with pg.forward_context(factor=factor):
            return torch.ops.toy.scale_by_context(x + 1) * 3

    fast = torch.compile(scaled, backend="eager")
    for factor in (2.0, 5.0):
        assert torch.equal(fast(torch.ones(2), factor), torch.full((2,), 6.0 * factor))


def test_other_threads_do_not_see_it() -> None:
    seen: list[object] = []
    with pg.forward_context(page=16):
        thread = threading.Thread(target=lambda: seen.append(pg.get_forward_context().get("page")))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_function_that_torch_compiles_may_read_one() -> None:
    """Dynamo asks the context for attributes that any object has."""

    def scaled(x: Tensor) -> Tensor:
        return x * pg.get_forward_context().factor

    compiled = torch.compile(scaled, backend="eager")
    for factor in (2.0, 3.0):
        with pg.forward_context(factor=factor):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), factor))


def test_what_any_object_may_be_asked_for_is_no_field() -> None:
    with pg.forward_context(page=16) as context:
        assert not hasattr(context, "__dict__")
        with pytest.raises(AttributeError, match="frozen"):
            copy.copy(context)  # it had no end


@pytest.mark.parametrize("count", [3, 4, 9])
def test_op_reads_the_context_of_its_own_call(count: int, device: torch.device) -> None:
    """In replays and fallbacks alike: the value at capture must not stay."""

    def model(x: Tensor) -> Tensor:
        return torch.ops.toy.scale_by_context(x + 1) * 2

    fast = compiled(model)
    x = rows(count, device)
    for factor in (1.0, 2.0, -3.0):
        with pg.forward_context(factor=factor):
            assert_same(fast(x), (x + 1) * factor * 2)


def test_error_of_an_op_inside_a_replay_leaves_the_model_usable(device: torch.device) -> None:
    fast = compiled(lambda x: torch.ops.toy.scale_by_context(x + 1) * 2)
    x = rows(3, device)
    with pg.forward_context(factor=2.0):
        wanted = fast(x)
    with pytest.raises(ContextError, match="factor"):
        fast(x)
    with pg.forward_context(factor=2.0):
        assert_same(fast(x), wanted)
