"""A weight that became another kind of tensor reaches another trace.

The inputs look the same, so only guards on the weights can tell. The answer is eager's, or an error names the
weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from toys import WIDTH, assert_same, compiled, ops, through_torch

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, TraceError

pytestmark = pytest.mark.usefixtures("no_grad")

DTYPES = (torch.float64, torch.bfloat16, torch.float16)
REPLAYED: dict[str, Any] = {}
UNCAPTURED: dict[str, Any] = {"cuda_graphs": "off"}
both_ways = pytest.mark.parametrize("options", [REPLAYED, UNCAPTURED], ids=["replayed", "compiled"])


class Decoder(nn.Module):
    """Takes ids, which stay integers for any dtype of the weights. 2 segments around one op."""

    def __init__(self, *, bias: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(x + ops.mix(self.linear(x)))


class Broken(Decoder):
    """Two frames: the graph breaks between the op and the head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + ops.mix(self.linear(x))
        torch._dynamo.graph_break()
        return self.head(ops.mix(x))


class Asks(Decoder):
    """The graph does not take `kind`; the model only looks at its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Parameter(torch.zeros(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = super().forward(ids)
        return x * 3 if self.kind.dtype == torch.float64 else x


class Marked(nn.Parameter):
    """A subclass that behaves like its parent."""


def ids(count: int, device: torch.device) -> Tensor:
    return torch.randint(0, WIDTH, (count,), device=device)


def of(model: nn.Module, **options: Any) -> Any:
    return compiled(model, token_dim={"ids": 0}, **options)


def agree(fast: Any, model: nn.Module, device: torch.device, counts: Any = (3, 3, 4, 7, 9, 3)) -> None:
    for count in counts:
        x = ids(count, device)
        found, wanted = fast(ids=x), model(ids=x)
        assert found.dtype == wanted.dtype
        tolerance = 1e-4 if wanted.dtype in (torch.float32, torch.float64) else 3e-2
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@both_ways
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_model_of_another_dtype_is_traced_anew(dtype: Any, options: Any, device: torch.device) -> None:
    model = Decoder().to(device)
    fast = of(model, **options)
    with pg.counters.expect(traces=1):
        agree(fast, model, device)
    model.to(dtype)
    with pg.counters.expect(traces=1):  # another one, for every count
        agree(fast, model, device)


def test_model_that_is_converted_back_needs_no_third_trace(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = of(model, **UNCAPTURED)
    with pg.counters.expect(traces=2):  # one per dtype
        for convert in (model.float, model.double, model.float, model.double):
            convert()
            agree(fast, model, device)


def test_model_that_is_converted_back_may_lie_elsewhere_than_its_graphs_read(device: torch.device) -> None:
    model = Decoder().to(device)
    fast = of(model)
    agree(fast, model, device)
    kept = [parameter.data for parameter in model.parameters()]
    model.double()
    agree(fast, model, device)
    model.float()
    with pytest.raises(AddressMovedError, match="weight"):
        fast(ids=ids(3, device))
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data
    with pg.counters.expect(traces=0, replays=1):
        agree(fast, model, device, [3])


@both_ways
def test_transposed_weight_at_the_same_address_is_traced_anew(options: Any, device: torch.device) -> None:
    model = Decoder().to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    weight = model.linear.weight
    address = weight.data_ptr()
    with pg.counters.expect(traces=1):
        weight.data = weight.data.t()
        assert weight.data_ptr() == address
        agree(fast, model, device)
    with pg.counters.expect(traces=0):
        weight.data = weight.data.t()
        agree(fast, model, device)


def test_weight_of_the_same_kind_elsewhere_raises_where_graphs_read_it(device: torch.device) -> None:
    model = Decoder().to(device)
    fast, plain = of(model), of(model, **UNCAPTURED)
    agree(fast, model, device)
    agree(plain, model, device)
    model.linear.weight.data = torch.randn(WIDTH, WIDTH, device=device)
    with pytest.raises(AddressMovedError, match=r"linear.*weight"):
        fast(ids=ids(3, device))
    with pg.counters.expect(traces=0):
        agree(plain, model, device)


def another_dtype(old: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(old.detach().double(), requires_grad=False)


def another_width(old: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.randn(2 * WIDTH, WIDTH, device=old.device), requires_grad=False)


def another_class(old: nn.Parameter) -> nn.Parameter:
    return Marked(old.detach().clone(), requires_grad=False)


@both_ways
@pytest.mark.parametrize("new", [another_width, another_class])
def test_replaced_weight_of_another_kind(
    new: Callable[[nn.Parameter], nn.Parameter], options: Any, device: torch.device
) -> None:
    model = Decoder().to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    model.head.weight = new(model.head.weight)
    with pg.counters.expect(traces=1):
        agree(fast, model, device)


@both_ways
def test_replaced_weight_that_the_model_cannot_use_raises_like_eager(
    options: Any, device: torch.device
) -> None:
    model = Decoder().to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    old = model.head.weight
    model.head.weight = another_dtype(old)
    for call in (fast, model):
        with pytest.raises((RuntimeError, TraceError), match="dtype"):
            call(ids=ids(3, device))
    model.head.weight = old
    agree(fast, model, device)


@both_ways
def test_parameter_that_is_only_asked_for_its_dtype(options: Any, device: torch.device) -> None:
    model = Asks().to(device)
    fast = of(model, **options)
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.kind.data = model.kind.data.to(dtype)
        agree(fast, model, device)
    assert pg.counters.snapshot()["traces"] == 2  # one per dtype


@both_ways
def test_second_frame_has_guards_of_its_own(options: Any, device: torch.device) -> None:
    model = Broken().to(device)
    fast = of(model, **options)
    with pg.counters.expect(traces=2):  # one per frame
        agree(fast, model, device)
    with pg.counters.expect(traces=1):  # of the second frame
        model.head.weight.data = model.head.weight.data.t()
        agree(fast, model, device)
    with pg.counters.expect(traces=0):
        model.head.weight.data = model.head.weight.data.t()
        agree(fast, model, device)


@both_ways
def test_tied_weights(options: Any, device: torch.device) -> None:
    model = Decoder(tied=True).to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    model.double()
    assert model.head.weight is model.table.weight
    agree(fast, model, device)
    model.head.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device).double())  # untied
    agree(fast, model, device)


@both_ways
def test_bias_that_appears_is_added(options: Any, device: torch.device) -> None:
    model = Decoder(bias=False).to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    model.linear.bias = nn.Parameter(torch.randn(WIDTH, device=device))
    with pg.counters.expect(traces=1):
        agree(fast, model, device)
    model.linear.bias = None
    with pg.counters.expect(traces=0):
        agree(fast, model, device)


@both_ways
@pytest.mark.parametrize("entry", ["pg.compile", "torch.compile"])
def test_two_models_of_one_class_and_two_dtypes(entry: str, options: Any, device: torch.device) -> None:
    """Dynamo may call one model with the function built for the other."""
    models = [Decoder().to(device), Decoder().to(device).double()]
    fast = [(of if entry == "pg.compile" else through_torch)(model, **options) for model in models]
    for _ in range(2):
        for model, call in zip(models, fast, strict=True):
            agree(call, model, device)


@pytest.mark.parametrize("options", [{"check": "off"}, {"check": "always"}], ids=str)
def test_every_setting_of_check_sees_another_kind(options: Any, device: torch.device) -> None:
    model = Decoder().to(device)
    fast = of(model, **options)
    agree(fast, model, device)
    for _ in range(2):
        model.linear.weight.data = model.linear.weight.data.t()
        agree(fast, model, device)
    model.double()
    agree(fast, model, device)


def test_pruned_weight_which_is_no_parameter_any_more(device: torch.device) -> None:
    """torch.nn.utils.prune replaces the parameter `weight` with a plain tensor."""
    from torch.nn.utils import prune

    model = Decoder().to(device)
    fast = of(model, **UNCAPTURED)
    agree(fast, model, device)
    prune.l1_unstructured(model.linear, "weight", amount=0.5)
    agree(fast, model, device)
    prune.remove(model.linear, "weight")
    agree(fast, model, device)


@both_ways
def test_hook_that_is_removed_runs_no_more(options: Any, device: torch.device) -> None:
    model = Decoder().to(device)
    hook = model.linear.register_forward_hook(lambda module, args, output: output * 3)
    fast = of(model, **options)
    agree(fast, model, device)
    hook.remove()
    with pg.counters.expect(traces=1):
        agree(fast, model, device)


CHANGES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "same": lambda p: p.data,
    "transposed": lambda p: p.data.t(),
    "negated": lambda p: p.data.neg(),
    "expanded": lambda p: p.data[:1].expand(WIDTH, WIDTH),
    "strided": lambda p: torch.stack([p.data, p.data], -1)[..., 1],
}


@settings(max_examples=15)
@given(changes=st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(1, 10)), max_size=6))
def test_any_sequence_of_changes(changes: list[tuple[str, int]]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.reset()
    model = Decoder().to(device)
    with torch.no_grad():
        fast = of(model)
        for name, count in [("same", 3), ("same", 3), *changes]:
            model.head.weight.data = CHANGES[name](model.head.weight)
            x = ids(count, device)
            try:
                found = fast(ids=x)
            except AddressMovedError as error:
                assert "head" in str(error)
                pg.reset()
                found = fast(ids=x)
            assert_same(found, model(ids=x))
