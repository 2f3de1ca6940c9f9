"""Where the token dimension is, how other dimensions may vary, and inputs that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import build, call, random_ids, rows
from shape_cases import (
    COUNTS,
    Attend,
    SumOfTwo,
    assert_same,
    both_ways,
    by_pg_compile,
    by_torch_compile,
    features,
    moved,
)
from torch import Tensor, nn

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


# --- where the token dimension is ---------------------------------------------------------------------


class Named(nn.Module):
    """The token dimension is the last of `hidden` and the first of `scale`."""

    def forward(self, hidden: Tensor, scale: Tensor, *, shift: float = 0.0) -> Tensor:
        return (hidden * scale + shift).relu()


@pytest.mark.parametrize(
    "token_dim", [{"hidden": 1}, {"hidden": -1}, {"scale": 0}, {"hidden": 1, "scale": 0}]
)
def test_token_dim_is_found_in_positional_and_keyword_arguments(token_dim: Any, device: torch.device) -> None:
    model = Named().to(device)
    compiled = by_pg_compile(model, token_dim=token_dim)
    with pg.counters.expect(traces=1, **{"fallbacks:above_max_tokens": 1}):
        for n in (5, 1, 7, 20, 16):
            hidden, scale = torch.randn(3, n).to(device), torch.randn(n).to(device)
            assert_same(compiled(hidden, scale), model(hidden, scale))
    for n in (6, 17):
        hidden, scale = torch.randn(3, n).to(device), torch.randn(n).to(device)
        assert_same(compiled(scale=scale, hidden=hidden, shift=0.5), model(hidden, scale, shift=0.5))


@pytest.mark.parametrize(
    ("token_dim", "message"),
    [
        ({"hiden": 1}, "'hiden'.*hidden, scale"),
        ({"hidden": 2}, "dimension 2 of 'hidden'.*from 0 to 1"),
        ({"hidden": -3}, "dimension -3 of 'hidden'"),
        ({"shift": 0}, "no tensor of that name"),
        (None, "cannot tell.*hidden has shape.*scale has shape"),
    ],
)
def test_a_wrong_or_missing_token_dim_says_what_there_is(
    token_dim: Any, message: str, device: torch.device
) -> None:
    compiled = by_pg_compile(Named().to(device), token_dim=token_dim)
    with pytest.raises(pg.errors.TokenDimError, match=f"(?s){message}"):
        compiled(torch.randn(3, 5).to(device), torch.randn(5).to(device))


def test_a_lone_one_dimensional_tensor_needs_no_token_dim(device: torch.device) -> None:
    compiled = by_pg_compile(lambda ids: ids * 2 + 1)
    with pg.counters.expect(traces=1):
        for n in (4, 1, 9):
            ids = torch.arange(n, device=device)
            assert torch.equal(compiled(ids), ids * 2 + 1)


def test_inputs_embeds_lead_where_there_are_no_ids(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    with pg.counters.expect(traces=1):
        for n in (5, 1, 12, 9):
            inputs = {"inputs_embeds": torch.randn(1, n, 64).to(device), "use_cache": False}
            assert_same(compiled(**inputs).logits, model(**inputs).logits)


# --- other dimensions ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compile"),
    [
        ("llama", by_pg_compile),
        ("mixtral", by_pg_compile),
        ("bert", by_pg_compile),
        pytest.param("llama", by_torch_compile, marks=pytest.mark.slow),
    ],
)
def test_a_batch_size_that_changes_is_right(name: str, compile: Any, device: torch.device) -> None:
    model = build(name, layers=1, device=device)
    compiled = compile(model)
    for batch, n in ((1, 5), (2, 5), (2, 7), (3, 1), (1, 7), (4, 4), (1, 1), (2, 20)):
        inputs = call(name, random_ids(n, batch, device))
        assert_same(rows(compiled(**inputs)), rows(model(**inputs)))


class TwoLengths(nn.Module):
    """Attention of T queries over S keys."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query, key = (x * 2)[None, None], memory[None, None]
        return F.scaled_dot_product_attention(query, key, key)[0, 0] + 1


@both_ways
def test_a_second_dynamic_dimension_is_right_and_counted(compile: Any, device: torch.device) -> None:
    model = TwoLengths().to(device)
    compiled = compile(model, token_dim={"x": 0})
    for tokens, length in ((5, 9), (6, 9), (7, 11), (5, 12), (12, 12), (3, 20), (1, 21)):
        x, memory = features(tokens, device), features(length, device)
        assert_same(compiled(x, memory), model(x, memory))
    assert moved("fallbacks:second_dynamic_dimension") > 0


class Attends(nn.Module):
    """Requests of tokens, each with a place and every request with a weight."""

    def forward(self, ids: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        x = (ids * 0.1 + places).sin()[:, None, :, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0, :, 0] * weights[:, :1]


def test_a_call_may_have_as_many_requests_as_tokens(device: torch.device) -> None:
    """What `batch_dim` names is no dimension of tokens because of its size."""
    torch._dynamo.reset()
    batch_dim = {"ids": 0, "places": 0, "weights": -2}
    compiled = by_pg_compile(Attends(), token_dim={"ids": 1}, batch_dim=batch_dim)
    for requests, n in ((2, 3), (4, 4), (4, 4), (3, 3), (3, 5)):
        ids, places = random_ids(n, requests, device), torch.rand(requests, n).to(device)
        weights = torch.rand(requests, 4).to(device)
        assert_same(compiled(ids, places, weights), Attends()(ids, places, weights))


class TwoSums(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y.cumsum(0) + 1


@pytest.mark.parametrize("sizes", [[(5, 5), (6, 7), (9, 2), (4, 4)], [(6, 7), (5, 5), (7, 1), (1, 1)]])
def test_token_dimensions_that_disagree_are_right(
    sizes: Sequence[tuple[int, int]], device: torch.device
) -> None:
    compiled = by_pg_compile(TwoSums().to(device), token_dim={"x": 0, "y": 0})
    for first, second in sizes:
        x, y = features(first, device), features(second, device)
        for got, want in zip(compiled(x, y), TwoSums()(x, y), strict=True):
            assert_same(got, want)


def test_token_dimensions_that_must_agree_are_refused_by_name(device: torch.device) -> None:
    compiled = by_pg_compile(SumOfTwo().to(device), token_dim={"x": 0, "y": 0})
    x = features(5, device)
    assert_same(compiled(x, x + 1), x * 3 + 1)
    with pytest.raises(pg.errors.PiecewiseError, match="What to do"):
        compiled(features(6, device), features(7, device))
    one = features(1, device)
    assert_same(compiled(x, one), x * 2 + one)  # broadcasting is legal
    assert_same(compiled(x, x), x * 3)


def test_position_ids_of_another_length_are_right_or_refused_by_name(device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = by_pg_compile(model)
    ids = random_ids(6, device=device)
    for length in (6, 7, 5, 6, 12, 1, 6):
        positions = torch.arange(3, 3 + length, device=device)[None]
        inputs = call("llama", ids) | {"position_ids": positions}
        if length == 6:
            assert_same(compiled(**inputs).logits, model(**inputs).logits)
        else:  # a lone position is legal in eager, but transformers cannot be traced with it
            with pytest.raises(pg.errors.PiecewiseError, match="What to do"):
                compiled(**inputs)


@both_ways
def test_positions_are_used_as_given(compile: Any, device: torch.device) -> None:
    model = build("llama", layers=2, device=device)
    compiled = compile(model)
    for n in COUNTS:
        positions = torch.randint(0, 500, (1, n)).to(device)
        inputs = call("llama", random_ids(n, device=device)) | {"position_ids": positions}
        assert_same(compiled(**inputs).logits, model(**inputs).logits)


# --- inputs that cannot work --------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True], ids=["first call", "after others"])
def test_ids_of_a_wrong_dtype_are_refused_by_name(before: bool, device: torch.device) -> None:
    compiled = by_pg_compile(build("llama", layers=2, device=device))
    if before:
        compiled(**call("llama", random_ids(5, device=device)))
    with pytest.raises(pg.errors.TraceError, match=r"(?s)input_ids: float32\[1, 5\].*What to do"):
        compiled(**call("llama", random_ids(5, device=device).float()))
    compiled(**call("llama", random_ids(6, device=device)))  # and the next call works


@pytest.mark.parametrize("before", [False, True], ids=["first call", "after others"])
def test_ids_on_another_device_are_refused_by_name(before: bool, device: torch.device) -> None:
    compiled = by_pg_compile(build("llama", layers=2, device=device))
    if before:
        compiled(**call("llama", random_ids(5, device=device)))
    elsewhere = torch.device("cpu" if device.type == "cuda" else "meta")
    message = f"(?s)'input_ids' is on {elsewhere}.*weights are on {device}.*What to do"
    with pytest.raises(pg.errors.TraceError, match=message), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(**call("llama", random_ids(5, device=elsewhere)))
    compiled(**call("llama", random_ids(6, device=device)))


def test_features_of_a_wrong_width_are_refused_by_name(device: torch.device) -> None:
    compiled = by_pg_compile(Attend().to(device), token_dim={"x": 0})
    compiled(features(5, device))
    with pytest.raises(pg.errors.PiecewiseError, match=r"(?s)x: float32\[5, 9\].*What to do"):
        compiled(features(5, device, width=9))


def test_a_function_without_argument_names_is_refused() -> None:
    with pytest.raises(pg.errors.TokenDimError, match=r"names of the arguments.*\n.*function of Python"):
        pg.compile(torch.nn.functional.linear, token_dim={"input": 0})


def test_tensors_inside_of_arguments_are_not_counted() -> None:
    fast = pg.compile(lambda batch: batch["x"] * 2, compiler="eager")
    with pytest.raises(pg.errors.TokenDimError, match=r"no argument is a tensor\.\n.*torch\.compile\(model"):
        fast({"x": torch.ones(3, 8)})
    fast = torch.compile(lambda batch: batch["x"] * 2, backend="piecewise", options={"compiler": "eager"})
    assert_same(fast({"x": torch.ones(3, 8)}), torch.full((3, 8), 2.0))
