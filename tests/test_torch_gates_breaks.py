"""What `_torch` says of graph breaks, on the torch that is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import traced
from torch import Tensor
from traced import Small, trace

from piecewise_graph import _torch

pytestmark = pytest.mark.usefixtures("no_grad")


def breaks(x: Tensor) -> Tensor:
    y = x + 1
    torch._dynamo.graph_break()
    return y * 2


def doubled(x: Tensor) -> Tensor:
    return x * 2


@partial(torch._dynamo.disable, recursive=False)
def skipped(x: Tensor) -> Tensor:
    return doubled(x)


@pytest.mark.parametrize(
    "model, parts",
    [
        (lambda x: x * 2, [False]),
        (Small(), [False]),
        (breaks, [False, True]),
        (lambda x: breaks(x) + 1, [True, True, True]),
        (lambda x: skipped(x) + 1, [True, True]),
    ],
    ids=["function", "module", "broken", "broken inside", "inside of a skipped one"],
)
def test_a_backend_knows_that_it_gets_a_part(model: Callable[..., Any], parts: list[bool]) -> None:
    found: list[bool] = []
    trace(model, torch.ones(3, 8), look=lambda gm: found.append(_torch.traces_a_part(traced.__file__)))
    assert found == parts


def test_what_cannot_be_traced_whole_raises_before_it_runs() -> None:
    ran: list[int] = []

    @torch.compiler.disable
    def note() -> None:
        ran.append(1)

    def model(x: Tensor) -> Tensor:
        note()
        return x + 1

    fast = torch.compile(model, backend="eager")
    with pytest.raises(RuntimeError), _torch.no_graph_breaks():
        fast(torch.ones(3))
    assert not ran
    fast(torch.ones(3))
    assert ran == [1]
