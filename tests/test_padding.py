"""Padding cannot change live rows: rows past the live tokens never reach an answer.

A segment that would mix them in runs at the exact size instead, and that is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from internals import static_tails
from models import NAMES, build, call, random_ids, rows
from torch import Tensor, nn

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")

MAX_TOKENS = 16
BUCKETS = (1, 2, 4, 8, 16)  # the default capture sizes up to MAX_TOKENS
SHUFFLED = (11, 3, 16, 5, 1, 8, 2, 13, 7, 4, 15, 9, 6, 12, 10, 14)  # every count in range
assert sorted(SHUFFLED) == list(range(1, MAX_TOKENS + 1))


# --- models of transformers ---


@pytest.mark.parametrize("name", NAMES)
def test_a_stale_or_poisoned_tail_changes_no_live_row(name: str, device: torch.device) -> None:
    model = build(name, layers=2, device=device)
    pool = pg.GraphPool(poison=True)
    compiled = pg.compile(model, max_tokens=MAX_TOKENS, compiler="eager", pool=pool)
    compiled(**call(name, random_ids(MAX_TOKENS, device=device)))  # captures the bucket
    compiled(**call(name, random_ids(MAX_TOKENS, device=device)))  # and fills every row of it
    for n in (11, 9, 15, 10):
        inputs = call(name, random_ids(n, device=device))
        want = rows(model(**inputs))
        with pg.counters.expect(replays=2, tapes=0, fallbacks=0, unpadded_segments=0):
            assert_same(rows(compiled(**inputs)), want)  # after a longer batch: its rows are in the tail
            assert poison_tails(compiled, bucket=MAX_TOKENS, live=n) > 0
            assert_same(rows(compiled(**inputs)), want)


@pytest.mark.parametrize("name", NAMES)
def test_every_count_in_range_replays_a_padded_bucket(name: str, device: torch.device) -> None:
    model = build(name, layers=2, device=device)
    compiled = pg.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    for bucket in BUCKETS:
        compiled(**call(name, random_ids(bucket, device=device)))
    with pg.counters.expect(replays=len(SHUFFLED), tapes=0, fallbacks=0, unpadded_segments=0):
        for n in SHUFFLED:
            inputs = call(name, random_ids(n, device=device))
            assert_same(rows(compiled(**inputs)), rows(model(**inputs)))
    assert [bucket.tokens for bucket in pg.explain(compiled).traces[0].buckets] == list(BUCKETS)


def test_last_row_is_right_and_its_segment_runs_unpadded(device: torch.device) -> None:
    """`logits_to_keep=1` slices `[:, -1:]`, which is a padded row in a padded bucket."""
    model = build("llama", layers=2, device=device)
    compiled = pg.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    tapes = len(BUCKETS)
    expected = {
        "traces": 1,
        "tapes": tapes,
        "replays": len(SHUFFLED) - tapes,
        "fallbacks": 0,
        "captures": 4 * tapes,  # layers + 1 = 3 segments, the last of which is cut at the slice
        "unpadded_segments": len(SHUFFLED) - tapes,  # the slice, at every replay
        "unpadded_segments:no_padding_proof": len(SHUFFLED) - tapes,
    }
    with pg.counters.expect(**expected):
        for n in SHUFFLED:
            inputs = call("llama", random_ids(n, device=device)) | {"logits_to_keep": 1}
            want = model(**inputs).logits
            assert want.shape[1] == 1
            assert_same(compiled(**inputs).logits, want)
    (trace,) = pg.explain(compiled).traces
    assert list(trace.padding.values()) == ["not proved: aten::slice (slice from the end)"]


# --- small modules that depend on other tokens, or on how many there are ---


class Tokens(nn.Module):
    """`formula` over rows after a linear layer and an attention."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x)[None, None]
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)[0, 0]
        return self.formula(attended)


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], device=x.device)


HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(0),
    "per_row_softmax": lambda x: x.softmax(1),
    "arange": lambda x: x + positions(x)[:, None],
    "first_row": lambda x: x - x[:1],
    "last_feature": lambda x: x[:, -1:],
}
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "divide_by_count": lambda x: x / x.shape[0],
    "mean": lambda x: x.mean(0),
    "row_minus_mean": lambda x: x - x.mean(0),
    "softmax_over_tokens": lambda x: x.softmax(0),
    "maximum": lambda x: x.amax(0),
    "flipped_arange": lambda x: x + positions(x).flip(0)[:, None],
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "sort": lambda x: x.sort(0).values,
    "last_row": lambda x: x[-1:] * 2,
    "backward_cumsum": lambda x: x.flip(0).cumsum(0).flip(0),
}


@pytest.mark.parametrize("formula", HARMLESS.values(), ids=HARMLESS)
def test_harmless_dependence_on_other_tokens_stays_padded(formula: Any, device: torch.device) -> None:
    with pg.counters.expect(
        tapes=len(BUCKETS), replays=len(SHUFFLED) - len(BUCKETS), fallbacks=0, unpadded_segments=0
    ):
        assert_right(Tokens(formula).to(device), SHUFFLED)


@pytest.mark.parametrize("formula", MIXING.values(), ids=MIXING)
def test_mixing_segments_are_right_and_counted(formula: Any, device: torch.device) -> None:
    replays = len(SHUFFLED) - len(BUCKETS)
    with pg.counters.expect(
        tapes=len(BUCKETS),
        replays=replays,
        fallbacks=0,
        unpadded_segments=replays,  # one of the two segments, at every replay
        **{"unpadded_segments:no_padding_proof": replays},
    ):
        assert_right(Tokens(formula).to(device), SHUFFLED)


@pytest.mark.parametrize("formula", MIXING.values(), ids=MIXING)
def test_mixing_segments_are_right_when_small_batches_come_first(formula: Any, device: torch.device) -> None:
    """A bucket of one token has no padded rows, so its capture proves nothing about larger buckets."""
    assert_right(Tokens(formula).to(device), (1, 2, *SHUFFLED, 1))


def test_a_view_of_the_last_row_is_cut_out(device: torch.device) -> None:
    """`x[-1:]` shares its storage with its base. Nothing writes either, so a copy does as well."""
    padded = len(set(SHUFFLED) - set(BUCKETS))
    with pg.counters.expect(tapes=len(BUCKETS), replays=padded, unpadded_segments=padded, fallbacks=0):
        assert_right(Tokens(lambda x: x[-1:]).to(device), SHUFFLED)


def test_size_dependence_that_begins_at_some_count_is_seen(device: torch.device) -> None:
    """At few tokens the quotient is 0, padded or not. A proof made there must not count for more tokens."""
    assert_right(Tokens(lambda x: x * (1 + x.shape[0] // 12)).to(device), (3, 2, 5, 9, *SHUFFLED, 10))


def test_reduction_over_the_first_rows_is_seen(device: torch.device) -> None:
    """Padding mixes in only where fewer than four rows are live."""
    assert_right(Tokens(lambda x: x[:4].sum(0)).to(device), (16, 8, 13, 9, *SHUFFLED, 3, 2, 3))


class OfIds(nn.Module):
    """`formula` over integer ids, which are padded with zeros."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 8)
        self.formula = formula

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * self.formula(ids).float().reshape(-1, 1)


INTEGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda ids: ids.min(),
    "max": lambda ids: ids.max(),
    "all": lambda ids: (ids > 0).all(),
    "any_zero": lambda ids: (ids == 0).any(),
    "count": lambda ids: (ids > 0).sum(),
    "last": lambda ids: ids[-1],
    "argmin": lambda ids: ids.argmin(),
}


@pytest.mark.parametrize("formula", INTEGERS.values(), ids=INTEGERS)
def test_reductions_over_ids_are_right(formula: Any, device: torch.device) -> None:
    model = OfIds(formula).to(device)
    compiled = pg.compile(model, max_tokens=MAX_TOKENS, compiler="eager")
    for n in (*SHUFFLED, *SHUFFLED):
        ids = torch.randint(1, 128, (n,)).to(device)
        assert_same(compiled(ids), model(ids))


def test_later_trace_is_proven_by_itself(device: torch.device) -> None:
    """The model branches on the count: one structure in two traces, and only one of them mixes tokens."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 8:
                return x[:8].sum(0)
            return x[:8].sum(0)

    assert_right(Branching().to(device), (16, 12, 9, 7, 3, 7, 3, 5, 13, 5))


def test_a_live_nan_is_no_leak(device: torch.device) -> None:
    """A live NaN is an answer: the proof must neither take it for a padded value nor spread it."""
    model = Tokens(lambda x: x.relu()).to(device)
    compiled = pg.compile(model, token_dim={"x": 0}, max_tokens=MAX_TOKENS, compiler="eager")
    with pg.counters.expect(unpadded_segments=0, fallbacks=0):
        for n in (16, 11, 9, 11):
            x = torch.randn(n, 8).to(device)
            x[n - 1, 0] = float("nan")
            torch.testing.assert_close(compiled(x), model(x), equal_nan=True)


# --- helpers ---


def assert_same(got: Tensor, want: Tensor) -> None:
    """Assert equality up to the rounding of another tile shape or expert order."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def assert_right(model: nn.Module, counts: Sequence[int]) -> None:
    compiled = pg.compile(model, token_dim={"x": 0}, max_tokens=MAX_TOKENS, compiler="eager")
    for n in counts:
        x = torch.randn(n, 8).to(next((p.device for p in model.parameters()), "cpu"))
        assert_same(compiled(x), model(x))


def poison_tails(compiled: Any, bucket: int, live: int) -> int:
    """Fill the rows past `live` in the static tensors of `bucket`; returns how many were filled."""
    filled = 0
    for tail in static_tails(compiled, bucket, live):
        if tail.is_floating_point():
            tail.fill_(float("nan"))
        else:
            tail.fill_(1 if tail.dtype == torch.bool else 127)
        filled += 1
    return filled


def test_ids_that_are_all_zero_prove_nothing(device: torch.device) -> None:
    """Trials need ids that differ between rows; until they come, nothing is padded, and that is counted."""
    model = OfIds(lambda ids: ids.flip(0).cumsum(0) * 0 + ids).to(device)
    compiled = pg.compile(model, max_tokens=MAX_TOKENS, capture_sizes=[16], compiler="eager", padding="tried")
    zeros = torch.zeros(11, dtype=torch.long, device=device)
    with pg.counters.expect(tapes=0, replays=0, **{"fallbacks:padding_unproven": 1}):
        assert_same(compiled(zeros), model(zeros))
    told_apart = random_ids(12, device=device)[0]
    with pg.counters.expect(tapes=1, replays=2, fallbacks=0):
        for ids in (told_apart, told_apart, told_apart[:9]):
            assert_same(compiled(ids), model(ids))


@pytest.mark.parametrize("inline", [False, True], ids=["allocated by a graph", "allocated once"])
def test_padded_rows_of_indices_that_an_op_fills_are_legal(inline: bool, device: torch.device) -> None:
    """The op fills live rows only. On a GPU an illegal index in a padded row would kill the context."""
    model = toys.Chooses(inline).to(device)
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty is filled with the largest integer
    try:
        compiled = toys.compiled(model, capture_sizes=[8])
        with pg.counters.expect(tapes=1, replays=3, fallbacks=0, unpadded_segments=0):
            for n in (8, 3, 5, 8):
                x = toys.rows(n, device)
                assert_same(compiled(x), model(x))
    finally:
        torch.use_deterministic_algorithms(False)
