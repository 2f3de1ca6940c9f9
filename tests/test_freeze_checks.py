"""What a frozen call checks besides the inputs of its graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import WIDTH, Blocks, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import FreezeError

pytestmark = pytest.mark.usefixtures("no_grad")


def squeezes(x: Tensor) -> Tensor:
    return (ops.mix(x) + x).squeeze(0)


def doubles_one(x: Tensor) -> Tensor:
    return (ops.mix(x) + x) * (2 if x.shape[0] == 1 else 1)


@pytest.mark.parametrize("model", [squeezes, doubles_one])
@pytest.mark.parametrize("entry", ["pg.compile", "torch.compile"])
def test_a_model_that_treats_one_token_specially(
    entry: str, model: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    by_torch = partial(torch.compile, backend="piecewise", dynamic=True, options={"compiler": "eager"})
    fast = compiled(model) if entry == "pg.compile" else by_torch(model)
    fast(rows(5, device))
    frozen = pg.freeze(fast, rows(3, device))
    for _ in range(2):
        assert_same(frozen(x := rows(4, device)), model(x))
        with pytest.raises(FreezeError, match="one token"):
            frozen(rows(1, device))


def test_one_token_is_served_where_it_is_nothing_special(device: torch.device) -> None:
    model = Blocks().to(device)
    frozen = pg.freeze(compiled(model), rows(3, device))
    for tokens in (1, 4, 1, 1):
        assert_same(frozen(x := rows(tokens, device)), model(x))


@pytest.mark.parametrize(
    ("reset", "traces"), [(torch._dynamo.reset, 1), (pg.reset, 0)], ids=["dynamo's", "ours"]
)
def test_one_token_is_served_after_each_reset(
    reset: Callable[[], None], traces: int, device: torch.device
) -> None:
    """At its first reset, Dynamo forgets which backends want to hear of the next."""
    model = Blocks().to(device)
    fast = compiled(model)
    fast(rows(3, device))
    for _ in range(3):
        reset()
        with pg.counters.expect(traces=traces):
            frozen = pg.freeze(fast, rows(3, device))
            for tokens in (4, 1):
                assert_same(frozen(x := rows(tokens, device)), model(x))
                assert_same(fast(x), model(x))


def test_each_reset_of_dynamo_opens_what_was_captured(device: torch.device) -> None:
    model = Blocks().to(device)
    options = {"compiler": "eager", "capture_sizes": [8]}
    fast = torch.compile(model, backend="piecewise", dynamic=True, options=options)
    for _ in range(3):
        assert_same(fast(x := rows(8, device)), model(x))
        assert not pg.explain(fast).sealed
        pg.capture(fast, lambda tokens: {"x": rows(tokens, device)}, sizes=[8], progress=False)
        frozen = pg.freeze(fast, x)  # keeps what the traces share
        assert pg.explain(fast).sealed
        torch._dynamo.reset()
        assert_same(frozen(x), model(x))


def test_views_have_the_sizes_that_the_forward_sees(device: torch.device) -> None:
    """The sizes of what an argument is a view of are no sizes of the graph, and choose nothing."""

    def model(x: Tensor) -> Tensor:
        return ops.mix(x * 2) + x

    for first in (6, 7):  # another size makes Dynamo mark those sizes dynamic in the second trace
        fast = compiled(model, token_dim={"x": 1})
        frozen = pg.freeze(fast, rows(first, device)[None])
        for tokens in (5, 1, 4):
            x = rows(tokens, device)[None]
            assert_same(frozen(x), model(x))
            with pg.counters.expect(traces=0):
                assert_same(fast(x), model(x))


UNREAD: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "its size": lambda x, y: ops.mix(x) + x * y.shape[0],
    "its dtype": lambda x, y: ops.mix(x) + x * (1 if y.dtype == torch.float32 else 2),
    "in a list": lambda x, y: ops.mix(x) + x * [y][0].shape[0],
}


@pytest.mark.parametrize("model", UNREAD.values(), ids=UNREAD)
def test_a_tensor_that_is_no_input_of_the_graph(
    model: Callable[[Tensor, Any], Tensor], device: torch.device
) -> None:
    frozen = pg.freeze(compiled(model), rows(3, device), rows(2, device))
    for tokens in (5, 5, 4):
        x, y = rows(tokens, device), rows(2, device)
        assert_same(frozen(x, y), model(x, y))
        for other in (rows(4, device), y.double()):
            with pytest.raises(FreezeError, match=r"'y' is (.|\n)* where the graph reads it"):
                frozen(x, other)


def test_a_number_that_steers_the_forward(device: torch.device) -> None:
    fast = compiled(lambda x, k: ops.mix(x) + x * (100 if k > 3 else 1))
    for number in (2, 3, 5):
        fast(rows(4, device), number)
    with pytest.raises(FreezeError, match="no input of the model's graph"):
        pg.freeze(fast, rows(4, device), 5)


def test_a_static_input_may_be_given_for_another_argument(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x) * 0 + x * 10 + y

    frozen = pg.freeze(compiled(model), rows(3, device), rows(3, device))
    frozen(rows(3, device), rows(3, device))
    static = frozen.static_inputs(3)
    for pick in (
        lambda x, y: (y, x),
        lambda x, y: (x, y),
        lambda x, y: (x.flip(0), x),
        lambda x, y: (y[:2], x[1:]),
        lambda x, y: (torch.full_like(x, 5.0), x),
    ):
        static["x"].copy_(rows(3, device)), static["y"].copy_(rows(3, device))
        x, y = pick(static["x"], static["y"])
        wanted = model(x.clone(), y.clone())
        assert_same(frozen(x, y), wanted)


def test_autocast_is_refused(device: torch.device) -> None:
    layer = nn.Linear(8, 8).to(device)
    frozen = pg.freeze(compiled(lambda x: ops.mix(layer(x))), rows(3, device))
    frozen(rows(3, device))
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(FreezeError, match="autocast"):
        frozen(rows(3, device))


def test_complex_results_in_a_pool_that_overwrites_them(device: torch.device) -> None:
    fast = compiled(lambda x: (ops.mix(x * 2) + 1) * 2)
    for tokens in (3, 4, 3):
        x = torch.randn(tokens, 8, dtype=torch.complex64, device=device)
        torch.testing.assert_close(fast(x), (ops.mix(x * 2) + 1) * 2)


def test_a_part_of_a_static_input_moves_within_it(device: torch.device) -> None:
    """Sources that overlap their destination, in frozen and in compiled calls."""

    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x) * 0 + x * 10 + y

    fast = compiled(model)
    frozen = pg.freeze(fast, rows(6, device), rows(6, device))
    for tokens in (6, 3):
        frozen(rows(tokens, device), rows(tokens, device))
    static = frozen.static_inputs(6)
    for call in (frozen, frozen, fast):
        for pick in (
            lambda x, y: (x[3:], y[:3]),
            lambda x, y: (y[1:4], x[2:5]),
            lambda x, y: (x[:3].flip(0), x[:3]),
            lambda x, y: (x, y.t().contiguous().t()),
            lambda x, y: (y, x),
        ):
            static["x"].copy_(rows(6, device)), static["y"].copy_(rows(6, device))
            x, y = pick(static["x"], static["y"])
            wanted = model(x.clone(), y.clone())
            assert_same(call(x, y), wanted)


class Counting(nn.Module):
    """Changes objects of the caller in Python; the last result is a tensor among them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.log = how, 0, [0]
        self.last: Tensor | None = None
        self.blocks = Blocks()

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(x)
        made = {"y": y}
        made["z"] = y * 2  # an object of its own
        if self.how == "a number":
            self.calls = self.calls + 1
        elif self.how == "a tensor":
            self.last = made["z"]
        elif self.how == "a list":
            self.log.append(1)
        elif self.how == "for a while":
            self.last = made["z"]
            made["y"] = self.last / 2
            self.last = None
        return made["y"]


@pytest.mark.parametrize("how", ["a number", "a tensor", "a list"])
def test_a_forward_that_changes_objects_is_not_frozen(how: str, device: torch.device) -> None:
    model = Counting(how).to(device)
    fast = compiled(model)
    for _ in range(2):
        assert_same(fast(x := rows(4, device)), model.blocks(x))
    if how == "a tensor":
        assert model.last is not None
        assert_same(model.last, model.blocks(x) * 2)
    with pytest.raises(FreezeError, match=r"changes self\b.* in Python"):
        pg.freeze(fast, rows(4, device))


@pytest.mark.parametrize("how", ["nothing", "for a while"])
def test_a_forward_that_leaves_objects_as_they_were_is_frozen(how: str, device: torch.device) -> None:
    model = Counting(how).to(device)
    frozen = pg.freeze(compiled(model), rows(4, device))
    assert_same(frozen(x := rows(3, device)), model(x))


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("second", [torch.no_grad, torch.inference_mode])
def test_captured_in_one_mode_and_called_in_another(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device
) -> None:
    model = Blocks().to(device)
    with first():
        fast = compiled(model)
        frozen = pg.freeze(fast, rows(4, device))
        frozen(rows(4, device))
    with second():
        for tokens in (4, 4, 3, 1):
            x = rows(tokens, device)
            assert_same(frozen(x), model(x))
            assert_same(fast(x), model(x))


class Swapping(nn.Module):
    """Another weight stands in its parameter's place while a layer runs, as transformers does it."""

    def __init__(self, restores: bool) -> None:
        super().__init__()
        self.layer, self.restores = nn.Linear(WIDTH, WIDTH, bias=False), restores

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.layer._parameters
        kept = parameters["weight"]
        parameters.update({"weight": kept * 2})  # type: ignore[dict-item, operator]
        made = self.layer(x)
        if self.restores:
            parameters["weight"] = kept
        return made.relu()


def test_parameters_that_are_put_back_may_be_swapped(device: torch.device) -> None:
    model, x = Swapping(restores=True).to(device), rows(3, device)
    call = pg.freeze(compiled(model), x)
    assert_same(call(x), model(x))
    with pytest.raises(FreezeError, match=r"changes .*_parameters"):
        pg.freeze(compiled(Swapping(restores=False).to(device)), x)
