"""What cannot be proved to bear padding is cut out, or served at exact sizes: right, and counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from torch import Tensor, nn
from toys import ops

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = toys.WIDTH
TABLE = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def table_of(x: Tensor) -> Tensor:
    return TABLE.to(x.device)


def causal_attention(x: Tensor) -> Tensor:
    tokens = x.shape[0]
    mask = torch.full((tokens, tokens), float("-inf"), device=x.device).triu(1)
    return (x @ x.T / WIDTH**0.5 + mask).softmax(-1) @ x


def quantised(x: Tensor) -> Tensor:
    levels = (x / x.abs().amax() * 2.5 + 2.5).long().clamp(0, 5)
    return table_of(x)[levels[:, 0]]


# Trials of padding with NaN, scaled and copied tails find nothing in most of these.
ADVERSARIAL: dict[str, Callable[[Tensor], Tensor]] = {
    "counts zero rows": lambda x: x * (1 + (x == 0).all(-1).sum()),
    "all": lambda x: x + x.all(),
    "ifft over tokens": lambda x: torch.fft.ifft(x, dim=0).real,
    "ihfft over tokens": lambda x: torch.fft.ihfft(x, dim=0).real.sum(0),
    "quantised by the maximum": quantised,
    "index by the mean": lambda x: table_of(x)[((x - x.mean(0)) * 2).long().clamp(0, 5)[:, 0]],
    "mode": lambda x: x + x.round().mode(0).values,
    "as_strided of a view": lambda x: x[:, 1:].as_strided((x.shape[0],), (WIDTH,), 2)[:, None] + x,
    "last row": lambda x: x * x[-1:],
    "median": lambda x: x - x.median(0).values,
    "mask": lambda x: x * (x.sum(-1) > x.sum(-1).mean())[:, None],
    "roll": lambda x: x + x.roll(1, 0),
    "number of tokens": lambda x: x / x.shape[0],
    "uncut attention": causal_attention,
    "var": lambda x: x / (x.var(0, unbiased=False) + 1),
    "argmax over tokens": lambda x: x + x[x.argmax(0), 0],
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("around", ["alone", "in a model"])
@pytest.mark.parametrize("formula", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_rows_that_depend_on_others_are_right(
    formula: Callable[[Tensor], Tensor], around: str, device: torch.device
) -> None:
    def model(x: Tensor) -> Tensor:
        if around == "alone":
            return formula(x)
        return ops.mix(formula(ops.mix(x * 2) + 1) * 3) + x

    fast = toys.compiled(model, max_tokens=16, capture_sizes=[1, 2, 4, 8, 16])
    for tokens in (10, 16, 9, 3, 10, 2, 9, 9, 5):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    counts = pg.counters.snapshot()
    served_apart = counts["unpadded_segments"] + counts["fallbacks"]
    assert served_apart > 0, "it was padded"


def test_smallest_unproved_region_is_cut_out(device: torch.device) -> None:
    """Softmax and the product over tokens run on live rows, the linears around them in graphs."""
    before, after = nn.Linear(WIDTH, WIDTH).to(device), nn.Linear(WIDTH, WIDTH).to(device)

    def model(x: Tensor) -> Tensor:
        return after(causal_attention(before(x)))

    fast = toys.compiled(model, capture_sizes=[8])
    counts = (8, 3, 5, 8)
    with pg.counters.expect(captures=2, unpadded_segments=3, replays=3, fallbacks=0):
        for tokens in counts:
            x = toys.rows(tokens, device)
            torch.testing.assert_close(fast(x), model(x))
    [found] = pg.explain(fast).traces[0].padding.values()
    assert found == "not proved: aten::_softmax (over tokens), aten::mm (contracts tokens)"


def test_derived_sizes_get_graphs_of_their_own_when_they_return(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cat([x, x * 2])  # twice as many rows

    fast = toys.compiled(model, max_tokens=16, capture_sizes=[4, 16])
    rounds = 3
    with pg.counters.expect(captures=2, tapes=2, replays=2 * (rounds - 2), **{"fallbacks:derived_size": 2}):
        for _ in range(rounds):
            for tokens in (5, 7):
                x = toys.rows(tokens, device)
                torch.testing.assert_close(fast(x), model(x))
    assert [bucket.tokens for bucket in pg.explain(fast).traces[0].buckets] == [5, 7]


def test_exact_sizes_are_bounded_and_the_least_recently_used_goes(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cat([x, x * 2])

    fast = toys.compiled(model, max_tokens=64, capture_sizes=[64])
    for tokens in (*range(1, 33), *range(1, 33), 1, 33, 33):  # 1 was used since, so 2 goes for 33
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))
    assert [bucket.tokens for bucket in pg.explain(fast).traces[0].buckets] == [1, *range(3, 34)]
    x = toys.rows(2, device)
    with pg.counters.expect(captures=1, fallbacks=0):  # it comes again
        torch.testing.assert_close(fast(x), model(x))


def test_sealed_model_captures_no_exact_size(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cat([x, x * 2])

    fast = toys.compiled(model, capture_sizes=[4, 8])
    fast(toys.rows(3, device))
    pg.capture(fast, lambda tokens: (toys.rows(tokens, device),), progress=False)
    with pg.counters.expect(captures=0, **{"fallbacks:derived_size": 2}):
        for _ in range(2):
            fast(toys.rows(3, device))


def test_frozen_call_follows_an_exact_size(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.cat([x, x * 2])

    fast = toys.compiled(model, capture_sizes=[8])
    frozen = pg.freeze(fast, toys.rows(5, device))
    for tokens in (5, 3, 5, 3, 5, 3):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(frozen(x), model(x))
    with pg.counters.expect(replays=2, fallbacks=0):
        for tokens in (5, 3):
            x = toys.rows(tokens, device)
            torch.testing.assert_close(frozen(x), model(x))


def test_trials_stand_in_for_the_proof_on_request(device: torch.device) -> None:
    """A function that the proof does not know; and one that trials with zeros refute."""

    def harmless(x: Tensor) -> Tensor:
        return ops.mix(x) + x.flip(0).flip(0)

    proved = toys.compiled(harmless, capture_sizes=[8])
    tried = toys.compiled(harmless, capture_sizes=[8], padding="tried")
    zeros = toys.compiled(ADVERSARIAL["counts zero rows"], capture_sizes=[8], padding="tried")
    for fast, model, unpadded in (
        (proved, harmless, 2),
        (tried, harmless, 0),
        (zeros, ADVERSARIAL["counts zero rows"], 2),
    ):
        with pg.counters.expect(replays=2, unpadded_segments=unpadded):
            for tokens in (8, 5, 7):
                x = toys.rows(tokens, device)
                torch.testing.assert_close(fast(x), model(x))


def test_integers_that_an_op_returns_are_zero_past_the_live_rows(device: torch.device) -> None:
    """What an earlier, longer batch left there would be looked up in a smaller table."""
    table = TABLE.to(device)

    def model(x: Tensor) -> Tensor:
        return ops.mix(table[ops.places(x, 5)]) + ops.mix(table[:2][ops.places(x, 1)])

    fast = toys.compiled(model, capture_sizes=[8])
    with pg.counters.expect(replays=2, unpadded_segments=0, fallbacks=0):
        for tokens in (8, 8, 3):
            x = toys.rows(tokens, device)
            torch.testing.assert_close(fast(x), model(x))


def test_region_that_writes_in_place_reaches_later_readers(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = x * 2
        y -= y.mean(0)
        return ops.mix(y) + y

    fast = toys.compiled(model, capture_sizes=[8])
    for tokens in (8, 5, 3, 8):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))
    assert pg.counters.snapshot()["fallbacks"] == 0


@pytest.mark.parametrize("again", [False, True], ids=["once", "again"])
def test_windows_over_tokens_are_read_in_the_region_that_makes_them(
    again: bool, device: torch.device
) -> None:
    """Windows that overlap share memory, so rows of padding would lie in live ones."""

    def model(x: Tensor) -> Tensor:
        windows = F.pad(x.T, (3, 0)).unfold(-1, 4, 1)  # width, tokens, 4
        mixed = ops.mix((windows.flip(-1) * 2).sum(-1).T)
        return mixed * (windows.sum(-1).T / x.shape[0]) if again else mixed

    fast = toys.compiled(model, capture_sizes=[8])
    with pg.counters.expect(replays=3, fallbacks=0, **{"unpadded_segments:mixes_tokens": 0}):
        for tokens in (8, 5, 6, 8):  # windows of 4: another trace serves fewer
            x = toys.rows(tokens, device)
            torch.testing.assert_close(fast(x), model(x))
    assert all(why.startswith("not proved") for why in pg.explain(fast).traces[0].padding.values())


def test_written_view_of_a_region_is_not_torn(device: torch.device) -> None:
    """A region returns a view, which is written later: a copy of it would not change its base."""

    def model(x: Tensor) -> Tensor:
        y = x * 2
        last = y[-1:]
        z = ops.mix(y)
        last += 1
        return y + z

    fast = toys.compiled(model, capture_sizes=[8])
    for tokens in (8, 5, 3, 5, 8):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))


def test_option_is_checked() -> None:
    with pytest.raises(pg.errors.ConfigError, match="padding"):
        pg.compile(nn.Identity(), padding="perhaps")


def test_what_a_padded_op_writes_into_the_tail_is_not_looked_up(device: torch.device) -> None:
    table = TABLE.to(device)

    def model(x: Tensor) -> Tensor:
        rows = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
        ops.count_padded(x, rows)
        return ops.mix(table[rows]) + x

    fast = toys.compiled(model, capture_sizes=[8])
    for tokens in (6, 5, 5, 3):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))


def test_an_op_that_writes_a_view_changes_what_its_base_points_to(device: torch.device) -> None:
    """-1 is another row in a padded batch."""

    def model(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device)
        ops.point_to_last(rows.view(-1))
        return x * 2 + x[rows]

    fast = toys.compiled(model, capture_sizes=[8])
    for tokens in (8, 5, 5, 3):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("entry", ["pg.compile", "torch.compile"])
def test_an_argument_that_overlaps_itself_is_not_padded(
    entry: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Zeros behind its last row would lie in its last but one."""
    options: dict[str, Any] = {"compiler": "eager", "capture_sizes": [4, 8]}

    def model(x: Tensor) -> Tensor:
        return ops.mix(x.float() * 2) + x.sum(-1, keepdim=True)

    compiled = partial(pg.compile, token_dim={"x": 0}, **options)
    by_torch = partial(torch.compile, backend="piecewise", options=options)
    fast = compiled(model) if entry == "pg.compile" else by_torch(model)
    for tokens in (5, 7, 5, 3, 3, 8, 3):
        x = torch.arange(1, 40, device=device).to(dtype).mul(tokens).unfold(0, toys.WIDTH, 1)[:tokens]
        torch.testing.assert_close(fast(x), model(x))
    counts = pg.counters.snapshot()
    assert counts["fallbacks:overlapping_memory"] > 0 and counts["replays"] > 0


def test_a_result_of_an_op_that_overlaps_itself_is_not_padded(device: torch.device) -> None:
    table = torch.arange(20.0, device=device)

    def model(x: Tensor) -> Tensor:
        return x * 2 + table[ops.windows(x)].sum(-1, keepdim=True)

    fast = toys.compiled(model, capture_sizes=[4, 8])
    for tokens in (6, 5, 3, 3, 8, 3):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))
    assert pg.counters.snapshot()["replays"] > 0


def test_a_column_of_what_a_padded_op_returned_dies_alone(device: torch.device) -> None:
    """The pool of these tests writes NaN to what nothing reads any more."""

    def model(x: Tensor) -> Tensor:
        y = ops.mix_padded(x * 0.5)
        wide, column = y.sin(), y[:, 0]
        mask = (column >= column.mean())[:, None]
        return y + F.scaled_dot_product_attention(wide, wide, wide, attn_mask=mask | (wide @ wide.T > -9))

    fast = toys.compiled(model, capture_sizes=[4, 8], pool=toys.new_pool())
    for tokens in (7, 6, 5, 3, 4):
        x = toys.rows(tokens, device)
        torch.testing.assert_close(fast(x), model(x))


def test_what_rows_take_of_memory_that_nothing_wrote_is_cut_out(device: torch.device) -> None:
    """Ops on nothing but such memory are harmless (DTensor learns of shapes so)."""

    def model(x: Tensor) -> Tensor:
        taken = torch.empty_like(x) * x
        return x * torch.where(taken == taken, 2, 2)

    fast = toys.compiled(model, capture_sizes=[8])
    with pg.counters.expect(replays=2, unpadded_segments=2, fallbacks=0):
        for tokens in (8, 3, 5):
            x = toys.rows(tokens, device)
            torch.testing.assert_close(fast(x), model(x))
