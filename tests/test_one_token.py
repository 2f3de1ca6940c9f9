"""The option `one_token`: who says that a model does the same with one token as with several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import Blocks, assert_same, compiled, rows

from piecewise_graph.frontend.compile import CompiledModel

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(("option", "looks"), [("traced", 1), ("trusted", 0)])
def test_a_trusted_model_is_not_traced_at_one_token(
    option: str, looks: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    look = CompiledModel._traced_at_one_token
    monkeypatch.setattr(CompiledModel, "_traced_at_one_token", lambda *a: found.append(a) or look(*a))
    model = Blocks().to(device)
    fast = compiled(model, one_token=option)
    for count in (3, 1, 2, 1):
        x = rows(count, device)
        assert_same(fast(x), model(x))
    assert len(found) == looks


@pytest.mark.parametrize(("option", "factor"), [("traced", 1), ("trusted", 2)])
def test_what_a_wrong_promise_costs(option: str, factor: int, device: torch.device) -> None:
    fast = compiled(lambda x: x if x.shape[0] == 1 else x * 2, one_token=option)
    fast(rows(3, device))
    x = rows(1, device)
    assert_same(fast(x), x * factor)
