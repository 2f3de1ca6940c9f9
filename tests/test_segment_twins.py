"""Segments that look alike and compute something else have code of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule
from toys import BOTH, ops, rows

from piecewise_graph.compiler.segment_key import portable_key, structure_key

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


def taking(settings: Settings) -> GraphModule:
    graph = Graph()
    graph.output((graph.call_function(torch.mul, (graph.placeholder("x"), settings)),))  # type: ignore[arg-type]
    return GraphModule({}, graph)


def test_objects_are_told_apart_by_what_they_are() -> None:
    one, other = Settings(), Settings()
    keys = [structure_key(taking(each), "eager", torch.device("cpu")) for each in (one, one, other)]
    assert keys[0] == keys[1] != keys[2]
    assert portable_key(taking(one)) == "unnamed_object"
