"""Copies of what pg.compile returns: copy, deepcopy, pickle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from toys import WIDTH, assert_same, rows

import piecewise_graph as pg

pytestmark = pytest.mark.usefixtures("no_grad")
SIZES = {"compiler": "eager", "capture_sizes": [4, 8], "max_tokens": 8, "token_dim": {"input": 0}}


def pickled(compiled: Any) -> Any:
    return pickle.loads(pickle.dumps(compiled))


def saved(compiled: Any) -> Any:
    file = io.BytesIO()
    torch.save(compiled, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.deepcopy, pickled, saved])
@pytest.mark.parametrize("called", [False, True])
def test_a_copy_has_weights_and_graphs_of_its_own(
    again: Callable[[Any], Any], called: bool, device: torch.device
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device)
    fast = pg.compile(model, **{**SIZES, "max_tokens": 16})
    x = rows(3, device)
    before = model(x)
    if called:
        fast(x)
    twin = again(fast)
    model[0].weight.zero_()
    with pg.counters.expect(traces=1, replays=1, fallbacks=0):
        for _ in range(2):
            assert_same(twin(x), before)
    assert_same(fast(x), model(x))
    assert (
        twin.model_state.config == fast.model_state.config
        and twin.get_parameter("0.weight") is not model[0].weight
    )


def test_a_shallow_copy_serves_the_same_model(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device)
    fast = pg.compile(model, **SIZES)
    fast(rows(3, device))
    twin = copy.copy(fast)
    model[0].weight.mul_(2)
    x = rows(5, device)
    assert_same(twin(x), model(x))
    assert twin.get_parameter("0.weight") is model[0].weight


def test_a_model_that_says_how_it_is_copied(device: torch.device) -> None:
    """`__getattr__` finds the model's own method, which would return it uncompiled."""
    model = symbolic_trace(nn.Sequential(nn.Linear(WIDTH, WIDTH))).to(device)
    twin = copy.deepcopy(pg.compile(model, **SIZES))
    x: Tensor = rows(3, device)
    with pg.counters.expect(traces=1, replays=1, fallbacks=0):
        for _ in range(2):
            assert_same(twin(x), model(x))


def test_a_copy_stays_in_the_pool_that_was_given(device: torch.device) -> None:
    pool = pg.GraphPool()
    fast = pg.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(device), pool=pool, **SIZES)
    assert copy.deepcopy(fast).model_state.config.pool is pool
