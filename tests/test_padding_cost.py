"""A batch is padded where that is not slower than the call at its own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cost_internals import batches_cost
from test_batches import both_ways
from test_exact_sizes import Encoder, batch
from torch import Tensor, nn
from toys import assert_same

import piecewise_graph as pg
from piecewise_graph.runtime.padding_cost import measured

pytestmark = pytest.mark.usefixtures("no_grad")


@both_ways
def test_a_batch_is_not_padded_where_that_is_slower(
    compile: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call without graphs takes a second per row here, and a replay 12: below 11 rows padding is slower."""
    model = Encoder().to(device)
    fast = compile(model)
    with batches_cost(monkeypatch, replay=12.0, launch=2.0, row=1.0) as timed:
        fast(batch((3, 4), device))  # captures
        for pair, slower in (((3, 2), 1), ((3, 4), 0), ((3, 3), 1), ((3, 4), 0), ((3, 3), 1)):
            with pg.counters.expect(slower_batches=slower, padded_batches=1 - slower):
                x = batch(pair, device)
                assert_same(fast(x), model(x))
    assert timed == [6]  # once per batch size and bucket
    shown = [bucket.replays for trace in pg.explain(fast).traces for bucket in trace.buckets]
    assert sum(shown) == pg.counters.snapshot()["replays"]  # what was timed is not among them
    with pg.counters.expect(replays=1, slower_batches=1, padded_batches=0, fallbacks=0):
        fast(batch((3, 3), device))  # the third call: its sizes have graphs of their own


def test_measuring_that_fails_leaves_padding_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def fails() -> None:
        raise torch.OutOfMemoryError("no room beside the pool")

    assert measured(torch.device("cuda"), lambda: None, fails, rows=3) is None
    found = measured(torch.device("cuda"), lambda: None, lambda: None, rows=3)
    assert found is not None and found.replay > 0 and found.row > 0


@pytest.mark.gpu
def test_padding_is_measured_on_a_gpu(device: torch.device) -> None:
    """Wide rows of 5 requests, padded to 8: the device takes 1.6 times as long, the host next to nothing."""
    width, counts, sizes = 4096, (512,), (8,)
    linears = nn.Sequential(*(nn.Linear(width, width, device=device) for _ in range(4)))

    def model(x: Tensor) -> Tensor:
        q = linears(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]

    options = {"compiler": "eager", "capture_sizes": counts, "max_tokens": 512, "batch_sizes": sizes}
    fast = pg.compile(model, token_dim={"x": 1}, batch_dim={"x": 0}, **options)
    wide = [torch.randn(5, count, width, device=device) for count in (512, 500)]
    with pg.counters.expect(slower_batches=2, padded_batches=1):
        for x in (wide[0], *wide):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
