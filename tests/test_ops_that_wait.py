"""Which ops wait for the device: told before anything is captured."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from test_uncapturable_ops import same
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from toys import compiled

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.analysis.facts import waits_for_device

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(
    ("formula", "waits"),
    [
        (lambda x: x.cpu(), "copies between host and device"),
        (lambda x: x * torch.tensor(0.5), None),
        (lambda x: x.clone().to(torch.float64), None),
        (lambda x: grouped(x, torch.float32), "reads where groups end back to the host"),
    ],
    ids=["to the host", "a number", "on the device", "groups"],
)
def test_what_waits_is_told_from_fake_tensors(formula: Callable[[Tensor], Tensor], waits: str | None) -> None:
    """Fake tensors have any device, so this holds without a GPU."""
    found: list[str | None] = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(4, 16, device="cuda")
        with _torch.observe_ops(lambda *call: found.append(waits_for_device(*call))):
            formula(x)
    assert [why for why in found if why is not None] == ([] if waits is None else [waits])


def grouped(x: Tensor, dtype: torch.dtype) -> Tensor:
    importlib.import_module("transformers.integrations.moe")  # it defines the op
    ends = torch.empty(2, device=x.device, dtype=torch.int32)
    found: Tensor = torch.ops.transformers.grouped_mm_fallback(x.to(dtype), x.new_empty(2, 16, 16), ends)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["copy", "groups"])
def test_waits_inside_of_torchs_own_ops_are_known(kind: str, device: torch.device) -> None:
    """A copy to the host, and groups of float32, whose ends transformers reads back."""
    importlib.import_module("transformers.integrations.moe")  # it defines the op
    linear = nn.Linear(16, 16).to(device)
    weight = torch.randn(2, 16, 16, device=device)
    ends = torch.tensor([1, 9], device=device, dtype=torch.int32)

    def model(x: Tensor) -> Tensor:
        h = linear(x)
        if kind == "copy":
            h = h.cpu().mul(2).to(x.device)
        else:
            h = torch.ops.transformers.grouped_mm_fallback(h, weight, ends)
        return linear(h).relu()

    fast = compiled(model, token_dim={"x": 0}, max_tokens=32, capture_sizes=[16, 32])
    with pg.counters.expect(tapes=2, replays=3, failed_captures=0):
        for n in (16, 17, 9, 30, 16):
            x = torch.randn(n, 16, device=device)
            same(fast(x), model(x))
