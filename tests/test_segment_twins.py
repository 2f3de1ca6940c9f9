"""Segments that look alike and compute something else have code of their own."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from torch.nn.functional import max_pool1d
from toys import BOTH, ops, rows

from piecewise_graph.compiler.segment_key import Key, portable_key, structure_key

pytestmark = pytest.mark.usefixtures("no_grad")


def scaling(by: float) -> Callable[[Tensor], Tensor]:
    def scale(x: Tensor) -> Tensor:
        return x * by

    return torch._dynamo.allow_in_graph(scale)  # type: ignore[no-any-return, no-untyped-call]


@BOTH
def test_closures_of_one_name_stay_apart(entry: Callable[..., Callable[[Tensor], Tensor]]) -> None:
    twice, thrice = scaling(2.0), scaling(3.0)
    fast = entry(lambda x: thrice(ops.mix(twice(x))))
    for count in (3, 5, 3):
        x = rows(count, torch.device("cpu"))
        torch.testing.assert_close(fast(x), ops.mix(x * 2) * 3)


class Settings:
    """An object that an op may take, of which the text says nothing."""

    def __repr__(self) -> str:
        return "Settings()"


def calling(function: Callable[..., Any], *more: Any) -> GraphModule:
    graph = Graph()
    graph.output((graph.call_function(function, (graph.placeholder("x"), *more)),))
    return GraphModule({}, graph)


def test_objects_are_told_apart_by_what_they_are() -> None:
    one, other = Settings(), Settings()
    keys = [structure_key(calling(torch.mul, x), "eager", torch.device("cpu")) for x in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]
    assert portable_key(calling(torch.mul, one)) == "unnamed_object"


@pytest.mark.parametrize("function", [max_pool1d, torch.sym_sqrt, torch.Tensor.sin, torch.add, getitem])
def test_functions_of_torch_and_python_have_a_name_in_every_process(function: Callable[..., Any]) -> None:
    one, other = (calling(function, range(3)) for _ in range(2))
    cpu = torch.device("cpu")
    assert structure_key(one, "eager", cpu) == structure_key(other, "eager", cpu)
    assert isinstance(portable_key(one), Key)
    assert portable_key(calling(scaling(2.0))) == "python_function"
