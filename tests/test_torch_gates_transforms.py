"""The functions of `_torch` that tell whether a linear may be replaced say so on the installed torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from piecewise_graph import _torch


@pytest.mark.parametrize("transforms", [1, 2])
def test_function_transforms_begin_and_end_in_graphs(transforms: int) -> None:
    depths: list[int] = []

    def note(gm: GraphModule, _: Any) -> Any:
        depths.extend(_torch.transform_depth(node.target) for node in gm.graph.nodes)
        return gm.forward

    run = torch.vmap(torch.sin) if transforms == 1 else torch.vmap(torch.vmap(torch.cos))
    torch.compile(lambda x: run(x) + 1, backend=note)(torch.ones(3, 4, 2))
    assert depths.count(1) == depths.count(-1) == transforms


def test_whether_inductor_tunes_products() -> None:
    assert not _torch.inductor_tunes_products()
    for option in ("max_autotune", "max_autotune_gemm"):
        with _torch.inductor_settings({option: True}):
            assert _torch.inductor_tunes_products()
