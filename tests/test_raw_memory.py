"""Ops that read storage beyond the tensor that they are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toys import assert_same, compiled, fallbacks, ops, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")


def of_a_view(x: torch.Tensor) -> torch.Tensor:
    return x + (x * 1)[..., 1:].as_strided((x.shape[0], 7), (8, 1), 1)[..., :1]


def of_a_view_behind_an_op(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2)[..., 1:]
    return ops.mix(x) + torch.as_strided(y, (x.shape[0], 7), (8, 1), 0)[..., :1]


def of_a_view_by_name(x: torch.Tensor) -> torch.Tensor:
    y = torch.as_strided(size=(x.shape[0], 7), stride=(8, 1), storage_offset=0, input=(x * 2)[..., 1:])
    return ops.mix(x) + y[..., :1]


def of_an_argument(x: torch.Tensor) -> torch.Tensor:
    return ops.mix(x) + x.as_strided((x.shape[0], 7), (8, 1), 0)[..., :1]


def of_all_that_was_made(x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).contiguous()
    return ops.mix(x) + y.as_strided((x.shape[0], 4), (8, 2), 1)[..., :1]


@pytest.mark.parametrize(
    "model",
    [of_a_view, of_a_view_behind_an_op, of_a_view_by_name, of_an_argument, of_all_that_was_made],
)
def test_as_strided(model: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    fast = compiled(model)
    layouts: tuple[Callable[[int], torch.Tensor], ...] = (
        lambda tokens: rows(tokens, device),
        lambda tokens: rows(tokens + 2, device)[2:],
        lambda tokens: rows(tokens, device).T.contiguous().T,
    )
    for layout in layouts:
        for tokens in (5, 5, 7, 3, 5):
            assert_same(fast(x := layout(tokens)), model(x))
    with pg.counters.expect(failed_captures=0):
        fast(rows(5, device))
    assert ("reads_beyond_a_view" in fallbacks(fast)) is (model is not of_all_that_was_made)
