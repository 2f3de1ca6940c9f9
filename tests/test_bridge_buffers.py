"""Bridge buffers of functional ops, ops that take padding, and one run of each op per forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from internals import replays
from torch import Tensor, nn
from torch.nn import functional as F
from toys import COUNTS, WIDTH, assert_same, check, compiled, ops, rows, watching

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


# --- once per forward, at the live count --------------------------------------------------------------


def test_cache_is_written_once_per_forward_with_live_rows_only(device: torch.device) -> None:
    """Rehearsal, proof and capture count too: a second write to a KV cache would go unnoticed."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            ops.append(y, self.cache)
            return y + 1

    model = Caching().to(device)
    cache = model.cache
    fast = compiled(model)
    wanted = torch.zeros(WIDTH, device=device)
    for count in COUNTS:
        x = rows(count, device)
        with watching() as seen:
            fast(x)
        assert [call.tokens for call in seen] == [count]
        wanted += (x * 2).sum(0)
        torch.testing.assert_close(cache, wanted)


def test_first_call_with_one_token_runs_each_op_once(device: torch.device) -> None:
    """pg.compile traces such a call with more tokens, and the tracing call executes nothing."""
    fast = compiled(lambda x: ops.mix(x * 2) + 1)
    with watching() as seen:
        fast(rows(1, device))
    assert [call.tokens for call in seen] == [1]


def test_pg_capture_runs_each_op_for_its_tracing_and_its_capturing_call(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix(x * 2) + 1)
    with watching() as seen:
        pg.capture(fast, lambda n: rows(n, device), progress=False)
    # two calls to learn that sizes vary, one per bucket
    assert sorted(call.tokens for call in seen) == [4, 4, 8, 8]


# --- functional ops of other people -------------------------------------------------------------------

LARGEST_FIRST = (8, 8, 5, 3, 3, 1, 4)  # buffers made for the largest bucket serve the others
REPLAYED = len(LARGEST_FIRST) - 2
BUFFER = 8 * WIDTH * 4  # bytes of 8 tokens


@pytest.mark.parametrize("op", ["mix", "mix_strided"])
def test_functional_op_goes_through_a_bridge_buffer(op: str, device: torch.device) -> None:
    """mix_strided returns other strides than its fake, and the next segment relies on the fake."""
    function = getattr(ops, op)

    def model(x: Tensor) -> Tensor:
        return function(x * 2).view(-1, 2, WIDTH // 2).flatten(1) + 1

    fast = check(model, device, counts=LARGEST_FIRST, expect={"replays": REPLAYED})
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER  # the input and the bridge


def test_tuple_of_results_has_a_buffer_each(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        a, b = ops.mix_pair(x * 2)
        return a * 3 + b

    fast = check(model, device, counts=LARGEST_FIRST, expect={"replays": REPLAYED})
    assert pg.explain(fast).buffer_bytes == (1 + 2) * BUFFER


def test_unused_result_has_no_buffer(device: torch.device) -> None:
    fast = check(lambda x: ops.mix_pair(x * 2)[1] + 1, device, counts=LARGEST_FIRST)
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER


def test_bridge_buffers_are_shared_by_layers(device: torch.device) -> None:
    """Five layers with one live result at a time need one bridge buffer."""

    def model(x: Tensor) -> Tensor:
        for _ in range(5):
            x = ops.mix(x * 2) + 1
        return x

    fast = check(model, device, counts=LARGEST_FIRST, expect={"segments": 6})
    assert pg.explain(fast).buffer_bytes == (1 + 1) * BUFFER


def test_sdpa_is_cut_in_all_its_spellings(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        q = (x * 2).view(1, 1, -1, WIDTH)
        a = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        b = torch.ops.aten.scaled_dot_product_attention(q + 1, q, q)
        return (a + b).view(-1, WIDTH)

    fast = check(model, device)
    found = pg.explain(fast).traces[0].splitting_ops
    assert found == {"aten::scaled_dot_product_attention": 2}


# --- ops that take padding ----------------------------------------------------------------------------


def test_padded_op_sees_the_bucket_and_zeros_in_the_tail(device: torch.device) -> None:
    fast = compiled(lambda x: ops.mix_padded(x) + 1)
    fast(rows(8, device)), fast(rows(8, device))  # leave something in the buffer of the larger bucket
    fast(rows(3, device))
    for count, bucket in ((3, 4), (2, 4), (4, 4), (5, 8), (6, 8)):
        x = rows(count, device)
        with watching() as seen:
            assert_same(fast(x), x * 2 + 1)
        if replays(fast, count):
            assert [call.tokens for call in seen] == [bucket]
            assert torch.equal(seen[0].value[:count], x)
            assert not seen[0].value[count:].any()


@pytest.mark.parametrize("write", [lambda h: h.add_(h[-1:].clone()), lambda h: h[-1:].mul_(3.0)])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_write_in_place_that_mixes_tokens_is_seen(write: Any, compiler: str, device: torch.device) -> None:
    """The written tensor is an input of the segment, not an output."""

    def model(x: Tensor) -> Tensor:
        h = x * 2
        o = ops.mix(h)
        write(h)
        return h + ops.mix(o)

    check(model, device, compiler=compiler)


# --- results that are what they were computed from ------------------------------------------------------


class Residual(nn.Module):
    """Torch traces `dropout` in eval mode as a copy, and runs it as its argument, which outlives its slot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = ops.mix(self.layers[0](x))
        kept, h = self.dropout(h), self.layers[1](h)
        later, h = self.dropout(h), self.layers[2](ops.mix(h))
        return self.layers[3](ops.mix(h)) + kept + later


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_memory_is_kept_for_results_that_lie_in_it_unannounced(compiler: str, device: torch.device) -> None:
    model = Residual().to(device).eval()
    fast = compiled(model, compiler=compiler, pool=pg.GraphPool(poison=True))
    with pg.counters.expect(tapes=2, fallbacks=0):
        for count in (4, 8, 3, 8, 5, 4):
            x = rows(count, device)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)


class Counted(nn.Module):
    """Writes what dropout in eval mode returned, which is its argument: a buffer, and the caller's tensor."""

    def __init__(self, dropout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), dropout
        self.register_buffer("calls", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.dropout(self.calls).add_(1)
        self.dropout(x)[:, 0].mul_(2)
        return self.linear(x) + self.calls


DROPOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a module": nn.Dropout(0.1),
    "torch.dropout": lambda x: torch.dropout(x, 0.1, False),
    "an op": lambda x: torch.ops.aten.dropout(x, 0.1, False),
    "alpha": lambda x: F.alpha_dropout(x, 0.1, training=False),
    "of features": lambda x: torch.feature_dropout(x, 0.1, False),
    "lift": torch.ops.aten.lift,
}


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("dropout", DROPOUTS.values(), ids=DROPOUTS)
def test_what_dropout_returns_may_be_written(
    dropout: Callable[[Tensor], Tensor], compiler: str, device: torch.device
) -> None:
    model = Counted(dropout).to(device).eval()
    fast, expected = compiled(model, compiler=compiler), copy.deepcopy(model)
    for count in (4, 4, 3, 8, 4):
        x = rows(count, device)
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(fast(mine), expected(theirs), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close((mine, model.calls), (theirs, expected.calls))
