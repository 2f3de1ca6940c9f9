"""torch's attention is captured where nothing is padded: such a forward is one graph."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import refuse_one_graph
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from toys import WIDTH, compiled, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
LENGTH = 64
Cache = tuple[Tensor, Tensor, Tensor]


class Decoder(nn.Module):
    """Attention over a static cache, which a call extends by its rows."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        q, k, v = self.before(x).chunk(3, dim=-1)
        places = torch.arange(x.shape[0], device=x.device) + length
        keys.index_copy_(0, places, k)
        values.index_copy_(0, places, v)
        mask = torch.arange(LENGTH, device=x.device) <= places[:, None]
        length.add_(x.shape[0])
        found = scaled_dot_product_attention(q[None], keys[None], values[None], mask, self.dropout)
        return x + self.after(found[0])


class Mixed(Decoder):
    """One more splitting op, which is not torch's."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, length: Tensor) -> Tensor:
        y: Tensor = ops.mix(super().forward(x, keys, values, length))
        return y * 2


class Encoder(nn.Module):
    """Attention among the rows of a call, which may be padded."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.before(x)[None]
        return x + self.after(scaled_dot_product_attention(q, q, q)[0])


def static_cache(device: torch.device) -> Cache:
    keys, values = (torch.zeros(LENGTH, WIDTH, device=device) for _ in range(2))
    made = keys, values, torch.zeros((), dtype=torch.int64, device=device)
    for tensor in made:
        torch._dynamo.mark_static_address(tensor)
    return made


def check(fast: nn.Module, model: nn.Module, tokens: int, mine: Cache, theirs: Cache) -> None:
    """A call with each cache: the same rows, and the same caches after it."""
    x = rows(tokens, mine[0].device)
    torch.testing.assert_close(fast(x, *mine), model(x, *theirs), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_decode_step_with_a_static_cache_is_one_graph(compiler: str, device: torch.device) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0}, compiler=compiler)
    mine, theirs = static_cache(device), static_cache(device)
    with pg.counters.expect(tapes=2, captures=2, replays=4, **{"fallbacks:writes_static_input": 2}):
        for tokens in (5, 1, 5, 1, 1, 1, 5, 1):
            check(fast, model, tokens, mine, theirs)
    assert [bucket.graphs for bucket in pg.explain(fast).traces[0].buckets] == [1, 1]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from([1, 2, 5])), min_size=4, max_size=12))
def test_any_order_of_caches_and_sizes(calls: list[tuple[int, int]]) -> None:
    torch._dynamo.reset()
    model = Decoder()
    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager"})
    caches = [[static_cache(torch.device("cpu")) for _ in range(2)] for _ in range(2)]
    with torch.no_grad():
        for which, tokens in calls:
            check(fast, model, tokens, *caches[which])


def test_a_frozen_decode_step_is_one_graph_too(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine, theirs, x = static_cache(device), static_cache(device), rows(1, device)
    frozen = pg.freeze(fast, x, *mine)
    model(x, *theirs)  # freezing runs its example
    with pg.counters.expect(tapes=1, replays=3, fallbacks=0):
        for _ in range(4):  # one token is no capture size: its graph comes when it returns
            check(frozen, model, 1, mine, theirs)
    assert [bucket.graphs for bucket in pg.explain(fast).traces[0].buckets] == [1]


@pytest.mark.parametrize("kind", ["another op", "dropout"])
def test_ops_that_depend_on_more_than_their_arguments_stay_between_graphs(
    kind: str, device: torch.device
) -> None:
    model = (Mixed() if kind == "another op" else Decoder(dropout=0.5)).to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine = static_cache(device)
    fast(rows(1, device), *mine)
    with pg.counters.expect(tapes=1, captures=3 if kind == "another op" else 2, fallbacks=0):
        fast(rows(1, device), *mine)


def test_what_may_be_padded_keeps_its_attention_between_graphs(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = compiled(model)
    x = rows(8, device)
    with pg.counters.expect(tapes=1, captures=2, fallbacks=0):
        torch.testing.assert_close(fast(x), model(x))
    with pg.counters.expect(replays=1, fallbacks=0):
        torch.testing.assert_close(fast(x[:5]), model(x[:5]))


def test_a_trace_of_one_size_is_one_graph(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = torch.compile(model, backend="piecewise", dynamic=False, options={"compiler": "eager"})
    with pg.counters.expect(tapes=1, captures=1, replays=2, fallbacks=0):
        for _ in range(3):
            x = rows(6, device)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


def test_segments_are_captured_where_one_graph_is_not(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    refuse_one_graph(monkeypatch)
    model = Decoder().to(device)
    fast = compiled(model, token_dim={"x": 0})
    mine, theirs = static_cache(device), static_cache(device)
    with pg.counters.expect(tapes=1, captures=2, replays=2, failed_captures=0):
        for _ in range(4):
            check(fast, model, 1, mine, theirs)
