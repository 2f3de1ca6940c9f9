"""NumPy arrays that a model reads: each call reads them anew, whoever holds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import WIDTH, ops

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
OFFSET = np.zeros(WIDTH, dtype=np.float32)


class Weighted(nn.Module):
    """Reads an argument, an attribute and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.held = np.ones(WIDTH, dtype=np.float32)

    def forward(self, x: Tensor, weights: Any) -> Tensor:
        weighted = ops.mix(x * torch.from_numpy(weights))
        return weighted + torch.from_numpy(self.held) + torch.from_numpy(OFFSET)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_every_call_reads_arrays_anew(compiler: str) -> None:
    model, fresh = Weighted(), np.random.default_rng(0)
    compiled = pg.compile(model, token_dim={"x": 0}, compiler=compiler, capture_sizes=[4], max_tokens=4)
    with pg.counters.expect(traces=1, captures=2, replays=5, fallbacks=0):  # before and behind the cut
        for count in (3, 1, 4, 3, 2, 4):
            x, weights = torch.randn(count, WIDTH), fresh.random(WIDTH, dtype=np.float32)
            model.held += 1
            OFFSET[:] = count
            torch.testing.assert_close(compiled(x, weights), model(x, weights))


def test_an_array_of_another_length_is_another_trace() -> None:
    def last(x: Tensor, weights: Any) -> Tensor:
        return x * float(len(weights)) + torch.from_numpy(weights)[-1:].to(x.device)

    compiled = pg.compile(last, token_dim={"x": 0}, compiler="eager")
    for count, length in ((3, 5), (4, 5), (3, 7), (4, 5)):
        x, weights = torch.randn(count, WIDTH), np.arange(length, dtype=np.float32)
        torch.testing.assert_close(compiled(x, weights), last(x, weights))
