"""pg.freeze: calls that differ from the example are refused by name; so are moved weights."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn
from toys import WIDTH, Blocks, assert_same, compiled, frozen, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, FreezeError, InputError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- what it refuses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.double(), r"'x' is float64\[3, 8\].*float32"),
        (lambda x: x[:, :4].contiguous(), r"'x' is float32\[3, 4\].*size 8 in dimension 1"),
        (lambda x: x[None], r"'x' is float32\[1, 3, 8\]"),
        (lambda x: 3.0, r"'x' is float.*tensor"),
        (lambda x: None, r"'x' is NoneType.*tensor|called with"),
    ],
)
def test_other_kind_of_input_is_refused_by_name(
    change: Any, message: str, model: Blocks, device: torch.device
) -> None:
    call = frozen(model, device)
    x = rows(3, device)
    call(x)
    with pytest.raises(FreezeError, match=message):
        call(change(x))
    assert_same(call(x), model(x))


def test_other_arguments_are_refused(model: Blocks, device: torch.device) -> None:
    call = frozen(model, device)
    with pytest.raises(FreezeError, match="called with nothing"):
        call()
    with pytest.raises(FreezeError, match="frozen with x"):
        call(rows(3, device), rows(3, device))


def test_other_constant_is_refused_by_name(device: torch.device) -> None:
    call = pg.freeze(
        pg.compile(models.build("llama", device=device), compiler="eager", capture_sizes=[4]),
        input_ids=models.random_ids(3, device=device),
        use_cache=False,
        logits_to_keep=0,
    )
    with pytest.raises(FreezeError, match=r"'logits_to_keep' is 1, but .* frozen with 0"):
        call(input_ids=models.random_ids(3, device=device), use_cache=False, logits_to_keep=1)


def test_disagreeing_token_counts_are_refused(device: torch.device) -> None:
    fast = compiled(lambda x, y: ops.mix(x) + y, token_dim={"x": 0, "y": 0})
    call = pg.freeze(fast, rows(3, device), rows(3, device))
    for _ in range(2):
        with pytest.raises(InputError, match="size 4 in dimension 0"):
            call(rows(3, device), rows(4, device))


def test_grad_mode_is_refused(model: Blocks, device: torch.device) -> None:
    call = frozen(model, device)
    for _ in range(2):
        call(rows(3, device))
        with torch.enable_grad(), pytest.raises(FreezeError, match="grad enabled"):
            call(rows(3, device))


def test_switched_training_flag_is_refused(model: Blocks, device: torch.device) -> None:
    call = frozen(model.eval(), device)
    model.train()
    with pytest.raises(FreezeError, match="training=False"):
        call(rows(3, device))


def test_example_with_gradients_is_refused(model: Blocks, device: torch.device) -> None:
    with torch.enable_grad(), pytest.raises(FreezeError, match="grad_enabled"):
        frozen(model, device)


def test_graph_break_is_refused(device: torch.device) -> None:
    def model(x: Tensor) -> Tensor:
        y = ops.mix(x)
        torch._dynamo.graph_break()
        return ops.mix(y + 1)

    with pytest.raises(FreezeError, match="ran 2 graphs"):
        frozen(model, device)


def test_model_that_was_not_compiled_is_refused(model: Blocks, device: torch.device) -> None:
    with pytest.raises(FreezeError, match="no piecewise trace"):
        pg.freeze(model, rows(3, device))


# --- weights ------------------------------------------------------------------------------------------


def test_weights_written_in_place_are_seen(model: Blocks, device: torch.device) -> None:
    call, x = frozen(model, device), rows(3, device)
    call(x)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter))
    assert_same(call(x), model(x))


@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.parametrize("replace", ["data", "parameter"])
def test_rebind_after_weights_were_replaced(
    replace: str, check: str, model: Blocks, device: torch.device
) -> None:
    """With check="off" nobody but `rebind` looks where the weights are."""
    call, x = frozen(model, device, check=check), rows(3, device)
    call(x)
    for linear in model.linears:
        new = torch.randn_like(linear.weight)
        if replace == "data":
            linear.weight.data = new
        else:
            linear.weight = nn.Parameter(new)
    call.rebind()
    for _ in range(3):
        assert_same(call(x), model(x))


def test_rebind_takes_graphs_of_all_sizes_along(device: torch.device) -> None:
    """A trace of several sizes has a runtime for each combination that returned."""

    class Batched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return ops.mix(self.linear(x.flatten(0, -2))).view(x.shape) * 2

    model = Batched().to(device)
    options = {"compiler": "eager", "batch_sizes": []}
    fast = torch.compile(model, backend="piecewise", dynamic=True, options=options)
    inputs = [torch.randn(*sizes, WIDTH, device=device) for sizes in ((2, 4), (3, 5))]
    for x in 3 * inputs:
        fast(x)
    call = pg.freeze(fast, inputs[0])
    model.linear.weight.data = torch.randn(WIDTH, WIDTH, device=device)
    call.rebind()
    for x in 3 * inputs:
        assert_same(fast(x), model(x))
    assert_same(call(inputs[0]), model(inputs[0]))


def test_check_always_refuses_a_moved_weight(model: Blocks, device: torch.device) -> None:
    call, x = frozen(model, device, check="always"), rows(3, device)
    call(x), call(x)
    model.linears[1].weight.data = torch.randn_like(model.linears[1].weight)
    with pytest.raises(AddressMovedError, match="linears"):
        call(x)
