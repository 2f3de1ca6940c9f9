"""Forwards that depend on how their arguments are laid out: by what they ask, write, or are frozen with."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from toys import assert_same, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

LAYOUTS: dict[str, Callable[..., Any]] = {
    "a stride": lambda x: x * 2 + x.stride(0),
    "strides": lambda x: x * sum(x.stride()),
    "returned": lambda x: (x * 2, x.stride(0)),
    "a branch": lambda x: x * 2 if x.is_contiguous() else x * 3,
    "of a view": lambda x: x * 2 if x.t().is_contiguous() else x * 3,
    "an offset": lambda x: x * 2 + x.storage_offset(),
    "whether there is an offset": lambda x: x * 2 if x.storage_offset() == 0 else x * 3,
    "of a result": lambda x: x * 2 if (x * 2).is_contiguous() else x * 3,
    "of a copy": lambda x: x * 2 + x.clone().stride(0),
    "order of dimensions": lambda x: x * 2 if x.dim_order() == (0, 1) else x * 3,
    "a view or a copy": lambda x: (x.reshape(-1).mul_(2), x)[1] * 1,
    "contiguous or a copy": lambda x: (x.contiguous().mul_(2), x)[1] * 1,
}
ORDERS = [order for order in itertools.permutations(range(5), 3) if order[2] in (0, 3)]


@pytest.mark.parametrize("model", LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_that_the_forward_asked_for(model: Callable[..., Any], device: torch.device) -> None:
    layouts = [
        lambda n: rows(n, device),
        lambda n: torch.randn(n, 24, device=device)[:, :8],
        lambda n: torch.randn(n + 2, 16, device=device)[2:, ::2],
        lambda n: torch.randn(8, n, device=device).t(),
        lambda n: torch.randn(n + n % 5, 8, device=device)[n % 5 :],
    ]
    for order in ORDERS:
        torch._dynamo.reset()
        fast = compiled(model, token_dim={"x": 0}, compiler="eager")
        for count, which in zip((5, 7, 4, 6), (*order, order[0]), strict=True):
            assert_same_for(fast, model, layouts[which](count))


BATCH_LAYOUTS: list[Callable[[int, torch.device], torch.Tensor]] = [
    lambda n, device: torch.randn(2, n, 8, device=device),
    lambda n, device: torch.randn(2, n + 5, 8, device=device)[:, :n],
    lambda n, device: torch.randn(n, 2, 8, device=device).transpose(0, 1),
    lambda n, device: torch.randn(8, 2, n, device=device).permute(1, 2, 0),
    lambda n, device: torch.randn(2, 8, n, device=device).permute(0, 2, 1),
]
BATCH_MODELS: dict[str, Callable[..., Any]] = {
    "stride of a copy": lambda x: x * x.clone().stride(0),
    "reshape": lambda x: (x.reshape(-1).mul_(2), x)[1] * 1,
    "flatten": lambda x: (x.flatten(0, 1).mul_(2), x)[1] * 1,
    "torch.reshape": lambda x: (torch.reshape(x, (-1,)).mul_(2), x)[1] * 1,
    "contiguous": lambda x: (x.contiguous().mul_(2), x)[1] * 1,
    "inplace, by name": lambda x: (F.silu(input=x.reshape(-1), inplace=True), x)[1] * 1,
    "in place, by name": lambda x: (torch.relu_(input=x.reshape(-1)), x)[1] * 1,
    "reshape, by name": lambda x: (torch.reshape(shape=(x.numel(),), input=x).mul_(2), x)[1] * 1,
    "a table": lambda x: (F.embedding(torch.arange(2), x.reshape(-1, 8), max_norm=0.1), x)[1] * 1,
    "written before it is read": lambda x: (x.reshape(-1), x.add_(1))[0] * 2,
}


@pytest.mark.parametrize("model", BATCH_MODELS.values(), ids=BATCH_MODELS)
def test_strides_that_follow_from_sizes(model: Callable[..., Any], device: torch.device) -> None:
    """Dynamo's guards on them are guards on sizes: `[B, T, H]` and a slice of a longer one."""
    for order in [(0, 1, 2), (1, 0, 1), (3, 4, 3), (0, 3, 4), (1, 4, 3), (2, 0, 1), (0, 2, 1), (4, 0, 3)]:
        torch._dynamo.reset()
        fast = compiled(model, token_dim={"x": 1}, compiler="eager")
        for count, which in zip((5, 7, 6), order, strict=True):
            assert_same_for(fast, model, BATCH_LAYOUTS[which](count, device))


WRITING: dict[str, Callable[..., Any]] = {
    "in place": lambda x: (x.add_(1), x * 2),
    "twice": lambda x: x.add_(1).mul_(2),
    "an element": lambda x: (x.__setitem__((slice(None), 0), 0.0), x, x * 2)[1:],
    "a view": lambda x: (x[:, 1:].mul_(2), x * 1),
}


@pytest.mark.parametrize("model", WRITING.values(), ids=WRITING)
def test_what_is_written_is_the_argument_itself(model: Callable[..., Any], device: torch.device) -> None:
    """The segments' strides are the trace's. An argument of others would be a copy, written and returned."""
    for order in ORDERS:
        torch._dynamo.reset()
        fast = compiled(model, token_dim={"x": 1}, compiler="eager")
        for count, which in zip((5, 7, 4, 6), (*order, order[0]), strict=True):
            x = BATCH_LAYOUTS[which](count, device)
            y = torch.empty_strided(x.shape, x.stride(), device=device).copy_(x)
            found, want = (run(z) for run, z in ((fast, x), (model, y)))
            assert_same((x, found), (y, want))
            of_found, of_want = ([_is_of(r, z) for r in _each(run)] for run, z in ((found, x), (want, y)))
            assert of_found == of_want


def _each(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _is_of(result: torch.Tensor, argument: torch.Tensor) -> tuple[bool, bool]:
    shares = result.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr()
    return result is argument, shares


FROZEN: dict[str, tuple[Callable[..., Any], Callable[[int], torch.Tensor], Callable[[int], torch.Tensor]]] = {
    "a view or a copy of rows": (
        lambda x: (x.reshape(-1).mul_(2), x)[1] * 1,
        lambda n: torch.randn(n, 8),
        lambda n: torch.randn(n, 24)[:, :8],
    ),
    "contiguity": (
        lambda x: x * 2 if x.is_contiguous() else x * 3,
        lambda n: torch.randn(n, 8),
        lambda n: torch.randn(8, n).t(),
    ),
    "a stride": (
        lambda x: x * x.stride(0),
        lambda n: torch.randn(n, 8),
        lambda n: torch.randn(n, 24)[:, :8],
    ),
    "expanded": (
        lambda x: x * 2,
        lambda n: torch.randn(1, 8).expand(n, 8),
        lambda n: torch.randn(n, 8),
    ),
}


@pytest.mark.parametrize(("model", "example", "other"), FROZEN.values(), ids=FROZEN)
def test_frozen_calls_refuse_strides_that_the_trace_was_not_made_for(
    model: Callable[..., Any], example: Callable[..., Any], other: Callable[..., Any], device: torch.device
) -> None:
    torch._dynamo.reset()
    with torch.no_grad():
        frozen = pg.freeze(compiled(model, token_dim={"x": 0}, compiler="eager"), example(5).to(device))
        for count in (5, 7, 5):
            assert_same_for(frozen, model, example(count).to(device))
            with pytest.raises(pg.errors.InputError, match="has strides"):
                frozen(other(count).to(device))


@torch.compiler.disable
def largest(x: torch.Tensor) -> int:
    return int(x.abs().max() * 10)


@pytest.mark.parametrize(
    "model", [lambda x: x + x.storage_offset(), lambda x: x * largest(x)], ids=["an offset", "a number"]
)
def test_a_forward_that_python_steers_is_not_frozen(model: Callable[..., Any], device: torch.device) -> None:
    fast = compiled(model, token_dim={"x": 0})
    with torch.no_grad():
        assert_same(fast(x := rows(5, device)), model(x))
        with pytest.raises(pg.errors.FreezeError):
            pg.freeze(fast, x)


def assert_same_for(fast: Any, model: Any, x: torch.Tensor) -> None:
    """The same results and writes to `x`, in the layout that it has."""
    memory = x.untyped_storage().clone()
    plain = torch.empty(0, device=x.device).set_(memory, x.storage_offset(), x.shape, x.stride())
    assert_same(fast(x), model(plain))
    assert_same(x, plain)


def test_a_branch_on_contiguity_needs_one_trace(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * 2) if x.is_contiguous() else x, token_dim={"x": 0})
    with pg.counters.expect(traces=1):
        for tokens in (5, 7, 3, 1):
            fast(rows(tokens, device))


def test_a_layout_of_what_the_forward_made_needs_no_guards_of_dynamo(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * 2) if (x * 2).is_contiguous() else x, token_dim={"x": 0})
    with pg.counters.expect(traces=1):
        for tokens in (5, 7, 3):
            fast(rows(tokens, device))
