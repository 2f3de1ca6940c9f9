"""A capturable splitting op that reads the forward context, and a model with that op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from toys import WIDTH, assert_same, compiled, define, note, ops, rows

import piecewise_graph as pg

LAYERS = 2
call_backs: list[Any] = []  # what the op below calls when it runs


@contextmanager
def calling_back(function: Any) -> Iterator[None]:
    call_backs.append(function)
    try:
        yield
    finally:
        call_backs.clear()


def _centre_live(x: Tensor, out: Tensor) -> None:
    """Subtract the mean of the live rows, counted in the context; padded rows become zeros."""
    note("centre_live", x)
    for call_back in call_backs:
        call_back(call_backs)
    context = pg.get_forward_context()
    live = (torch.arange(x.shape[0], device=x.device) < context.live)[:, None]
    known = torch.where(live, x, 0)
    mean = known.sum(0, keepdim=True) / live.sum()
    out.copy_(torch.where(live, known - mean, 0) * context.get("factor", 1.0))


define("centre_live(Tensor x, Tensor(a!) out) -> ()", _centre_live, lambda x, out: None)
pg.register_splitting_op("toy::centre_live", capturable=True)


class Centring(nn.Module):
    """LAYERS capturable ops between LAYERS + 1 segments."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            y = linear(x)
            out = torch.empty_like(y)
            ops.centre_live(y, out)
            x = x + out
        return x * 2


class Setup:
    """A compiled model and the context of its full graphs: the live count, written in place."""

    def __init__(self, device: torch.device, model: nn.Module | None = None, **options: Any) -> None:
        self.device = device
        self.model = (model or Centring()).to(device)
        self.fast = compiled(self.model, **options)
        self.live = torch.zeros(1, dtype=torch.int32, device=device)

    def call(self, count: int, *, full: bool = True, key: object = None, **fields: Any) -> None:
        """One forward of `count` tokens, compared with eager."""
        x = rows(count, self.device)
        self.live.fill_(count)
        with pg.forward_context(live=self.live, **fields):
            wanted = self.model(x)
        with pg.forward_context(live=self.live, full_graph=full, graph_key=key, **fields):
            found = self.fast(x)
        assert_same(found, wanted)


class LastRow(Centring):
    """The last segment reads the last row, which padding would replace."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[-1:] * 3
