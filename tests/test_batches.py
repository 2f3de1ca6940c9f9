"""Calls of [batch, tokens] where both vary: buckets of both, and no padding of a batch that changes a row."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from batch_cases import MODELS, WITH_IDS
from cost_internals import batches_cost
from hypothesis import given, settings, strategies as st
from internals import traces
from test_exact_sizes import Encoder, batch
from torch import Tensor, nn
from toys import WIDTH, assert_same

import piecewise_graph as pg
from piecewise_graph.buckets import bucket_for
from piecewise_graph.errors import ConfigError, TokenDimError

pytestmark = pytest.mark.usefixtures("no_grad")
BATCHES, COUNTS = (2, 4), (4, 8)
OPTIONS = {"compiler": "eager", "capture_sizes": COUNTS, "max_tokens": 8, "batch_sizes": BATCHES}
PAIRS = ((2, 3), (3, 5), (2, 4), (4, 7), (3, 2), (3, 3), (2, 8), (4, 5), (2, 6), (3, 8))


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Padding is taken to pay, however busy a GPU is."""
    with batches_cost(monkeypatch, None):
        yield


def by_torch(model: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()  # else Dynamo knows which sizes of this code's argument vary
    return torch.compile(model, backend="piecewise", dynamic=True, options={**OPTIONS, **options})


def by_pg(model: Callable[..., Any], **options: Any) -> Any:
    torch._dynamo.reset()
    return pg.compile(model, token_dim={"x": 1}, batch_dim={"x": 0}, **{**OPTIONS, **options})


both_ways = pytest.mark.parametrize("compile", [by_torch, by_pg])


def buckets(pairs: Any) -> set[tuple[int | None, int | None]]:
    return {(bucket_for(rows, BATCHES), bucket_for(count, COUNTS)) for rows, count in pairs}


@both_ways
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_calls_replay_a_bucket_of_both(compile: Any, compiler: str, device: torch.device) -> None:
    model = Encoder().to(device)
    fast = compile(model, compiler=compiler)
    met = len(buckets(PAIRS))
    padded = sum(rows not in BATCHES for rows, _ in PAIRS)
    for tapes in (met, 0):
        replays = len(PAIRS) - tapes
        with pg.counters.expect(
            tapes=tapes, captures=2 * tapes, replays=replays, padded_batches=padded, fallbacks=0
        ):
            for pair in PAIRS:
                x = batch(pair, device)
                assert_same(fast(x), model(x))
    requests = 2 * sum(rows for rows, _ in PAIRS)
    ran = 2 * sum(bucket_for(rows, BATCHES) or 0 for rows, _ in PAIRS)
    made = len(BATCHES) + 1  # sizes; one proof holds for all of them, and all lengths
    told = str(pg.explain(fast))
    assert f"{requests} requests in batches of {ran} rows; {made} batch sizes and proofs took " in told
    assert [report.sizes.partition(",")[0][-4:] for report in pg.explain(fast).traces[1:]] == [" = 2", " = 4"]


@both_ways
def test_batch_sizes_share_the_code_of_all_sizes(compile: Any, device: torch.device) -> None:
    model = Encoder().to(device)
    fast = compile(model)
    for pair in ((3, 3), (4, 3)):  # the second call compiles for every batch size
        fast(batch(pair, device))
    with pg.counters.expect(traces=0, compiles=0, fallbacks=0):
        for pair in ((2, 3), (2, 7), (4, 8)):
            x = batch(pair, device)
            assert_same(fast(x), model(x))


class Dropping(Encoder):
    """Dropout in eval mode is a copy, to Dynamo; in inference mode it is an op that draws numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5, training=False))


@both_ways
def test_calls_in_inference_mode_have_the_same_buckets(compile: Any, device: torch.device) -> None:
    model = Dropping().to(device)
    fast = compile(model)
    with torch.inference_mode():
        for pair in PAIRS:
            fast(batch(pair, device))
        with pg.counters.expect(replays=len(PAIRS), fallbacks=0):
            for pair in PAIRS:
                x = batch(pair, device)
                assert_same(fast(x), model(x))


@both_ways
def test_one_request_and_one_token_have_traces_of_their_own(compile: Any, device: torch.device) -> None:
    model = Encoder().to(device)
    fast = compile(model)
    pairs = ((3, 5), (1, 5), (1, 1), (3, 1), (2, 1), (1, 7), (1, 3), (4, 1), (4, 5))
    for _ in range(2):
        for pair in pairs:
            x = batch(pair, device)
            assert_same(fast(x), model(x))
    with pg.counters.expect(replays=len(pairs), fallbacks=0):
        for pair in pairs:
            fast(batch(pair, device))


def test_batches_between_sizes_above_them_and_long_requests(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_torch(model)
    for _ in range(2):
        for pair in ((5, 3), (4, 9), (3, 9), (5, 9)):
            x = batch(pair, device)
            assert_same(fast(x), model(x))


class Masked(nn.Module):
    """The batch of the mask has a symbol of its own, because the mask is broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        bias = torch.zeros(mask.shape, device=x.device).masked_fill(~mask, -1e9)[:, None, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=bias)[:, 0]


def test_a_mask_per_request(device: torch.device) -> None:
    model = Masked().to(device)
    fast = by_torch(model)
    pairs = ((3, 5), (2, 3), (3, 7), (4, 6), (2, 4))
    for _ in range(2):
        for pair in pairs:
            mask = torch.ones(pair, dtype=torch.bool, device=device)
            mask[0, pair[1] // 2 :] = False
            x = batch(pair, device)
            assert_same(fast(x, mask), model(x, mask))
    with pg.counters.expect(replays=2, padded_batches=1, fallbacks=0):
        for pair in ((3, 6), (2, 2)):
            mask = torch.ones(pair, dtype=torch.bool, device=device)
            fast(batch(pair, device), mask)


@pytest.mark.parametrize("name", MODELS)
@both_ways
def test_padding_of_a_batch_changes_nothing(compile: Any, name: str, device: torch.device) -> None:
    def model(x: Tensor) -> Any:
        return MODELS[name](x)

    fast = compile(model)
    kept: list[tuple[Any, Any]] = []
    for pair in (*PAIRS, *PAIRS):
        x = batch(pair, device)
        kept.append((fast(x), model(x)))
        assert_same(*kept[-1])
    for found, wanted in kept:  # later calls have not written them
        assert_same(found, wanted)


@pytest.mark.parametrize("name", WITH_IDS)
def test_rows_of_padding_hold_no_ids(name: str, device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH, bias=False).to(device)

    def model(x: Tensor, ids: Tensor) -> Tensor:
        return WITH_IDS[name](linear(x), ids)

    fast = by_torch(model, batch_sizes=(2, 4, 8))
    for rows, count in ((3, 5), (5, 4), (5, 8), (6, 4), (3, 7), (7, 8), (5, 5)):
        x, ids = batch((rows, count), device) * 3, torch.randint(1, 5, (rows, count), device=device)
        assert_same(fast(x, ids), model(x, ids))


def test_orders_of_two_sorts_in_equal_segments_are_told_apart(device: torch.device) -> None:
    linear, expert = nn.Linear(WIDTH, WIDTH, bias=False).to(device), nn.Linear(WIDTH, 5).to(device)

    def attended(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    def in_order(x: Tensor) -> tuple[Tensor, Tensor]:
        order = expert(x[:, 0]).argmax(-1).sort(stable=True).indices
        return order, x[:, 0][order]

    def model(x: Tensor) -> Tensor:
        one = attended(linear(x))
        first, rows = in_order(one)
        two = attended(one.sin())
        second, others = in_order(two)
        three = attended(two.sin())
        mixed = rows + 3 * others + (second[:, None] * 0).float()
        back = torch.empty_like(first)
        back[first] = torch.arange(first.shape[0], device=x.device)
        return mixed[back][:, None] + three

    fast = by_torch(model, batch_sizes=(2, 4, 8))
    for pair in ((3, 5), (5, 4), (5, 8), (6, 4), (5, 7), (6, 6), (5, 5), (7, 8)):
        x = batch(pair, device) * 3
        assert_same(fast(x), model(x))


@both_ways
def test_a_batch_is_padded_at_a_bucket_where_its_tokens_cannot_be(compile: Any, device: torch.device) -> None:
    """The mean over tokens runs on live rows."""
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        return linear(x) - (x + 1).mean(1, keepdim=True)

    fast = compile(model)
    for rows, count, padded in ((3, 4, 1), (3, 5, 0), (3, 8, 1), (3, 4, 1), (3, 7, 0)):
        x = batch((rows, count), device)
        with pg.counters.expect(padded_batches=padded):
            assert_same(fast(x), model(x))


@settings(max_examples=5, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=3, max_size=12))
def test_any_batch_and_length_in_any_order(pairs: list[tuple[int, int]]) -> None:
    model = Encoder()
    with torch.no_grad():
        fast = by_torch(model)
        for pair in (*pairs, *reversed(pairs)):
            x = batch(pair, torch.device("cpu"))
            assert_same(fast(x), model(x))


def test_default_batch_sizes_begin_at_their_second_call(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_torch(model, batch_sizes=None)
    expected = ({"fallbacks:second_dynamic_dimension": 1, "tapes": 0}, {"fallbacks": 0, "tapes": 1})
    for moved in expected:
        with pg.counters.expect(**moved):
            x = batch((3, 5), device)
            assert_same(fast(x), model(x))


def test_a_batch_that_a_trace_cannot_take_at_one_length_it_takes_at_another(device: torch.device) -> None:
    linear = nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        return linear(x) * (2 if x.shape[0] * x.shape[1] > 20 else 1)

    fast = by_torch(model, batch_sizes=(4,))
    for pair in ((3, 6), (3, 6), (3, 3)):  # four rows of six tokens would be too many for the trace
        x = batch(pair, device)
        assert_same(fast(x), model(x))
    with pg.counters.expect(replays=1, padded_batches=1, fallbacks=0):
        x = batch((3, 3), device)
        assert_same(fast(x), model(x))


def test_a_replaced_weight_and_a_reset_are_noticed(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_torch(model)
    x = batch((3, 5), device)
    fast(x)
    model.before.bias = nn.Parameter(torch.randn(WIDTH, device=device))
    for _ in range(3):
        assert_same(fast(x), model(x))
    pg.reset()
    with pg.counters.expect(tapes=1, replays=1):
        for _ in range(2):
            assert_same(fast(x), model(x))


def test_batch_sizes_are_captured_before_serving(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_pg(model)
    for rows in BATCHES:
        pg.capture(fast, lambda count, rows=rows: batch((rows, count), device), progress=False)
    with pg.counters.expect(tapes=0, fallbacks=0, replays=len(PAIRS)):
        for pair in PAIRS:
            x = batch(pair, device)
            assert_same(fast(x), model(x))


def test_a_frozen_call_answers_every_batch(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_pg(model)
    frozen = pg.freeze(fast, batch((2, 5), device))
    for pair in (*PAIRS, *PAIRS):
        x = batch(pair, device)
        assert_same(frozen(x), model(x))


def test_graphs_go_with_the_model(device: torch.device) -> None:
    model = Encoder().to(device)
    fast = by_pg(model)
    for pair in PAIRS:
        fast(batch(pair, device))
    runtimes = [weakref.ref(runtime) for runtime in traces(fast)]
    assert len(runtimes) > len(BATCHES)
    gc.collect()
    gc.disable()
    try:
        del model, fast
        torch._dynamo.reset()
        assert not any(runtime() for runtime in runtimes)
    finally:
        gc.enable()


def test_what_cannot_be_a_batch_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="batch_sizes"):
        by_pg(Encoder(), batch_sizes=[0])
    with pytest.raises(ConfigError, match="batch_dim"):
        pg.compile(Encoder(), batch_dim={})
    for batch_dim, text in (
        ({"y": 0}, "batch_dim names 'y'"),
        ({"x": 3}, "dimension 3"),
        ({"x": 1}, "transpose"),
    ):
        fast = pg.compile(Encoder().to(device), token_dim={"x": 1}, batch_dim=batch_dim, **OPTIONS)
        with pytest.raises(TokenDimError, match=text):
            fast(batch((2, 3), device))
