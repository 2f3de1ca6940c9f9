"""pg.freeze: calls that differ from the example are refused by name; so are moved weights."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class Scale:
    by: float = 2.0


@dataclass
class Hidden:
    hidden: Tensor


@pytest.mark.parametrize(
    ("given", "change"),
    [
        (Scale(), lambda given: setattr(given, "by", 5.0)),
        ({1}, lambda given: given.add(2)),
        (set(), lambda given: given.add(2)),
        (types.SimpleNamespace(by=2.0), lambda given: setattr(given, "by", 5.0)),
        (types.SimpleNamespace(by=2.0), lambda given: setattr(given, "by", 2)),
        (Scale(0.0), lambda given: setattr(given, "by", False)),
    ],
    ids=["a dataclass", "a set", "an empty set", "an object", "an equal integer", "an equal bool"],
)
def test_an_argument_that_was_changed_in_place_is_refused(
    given: Any, change: Callable[[Any], None], device: torch.device
) -> None:
    def model(x: Tensor, given: Any) -> Tensor:
        return ops.mix_padded(x) * (len(given) if isinstance(given, set) else given.by)

    x = rows(4, device)
    call = pg.freeze(compiled(model, token_dim={"x": 0}, compiler="eager"), x, given)
    assert_same(call(x, given), model(x, given))
    change(given)
    with pytest.raises(FreezeError, match="argument 'given' is an object with"):
        call(x, given)
    call.rebind()
    assert_same(call(x, given), model(x, given))


RESULTS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a dataclass": (lambda x: Hidden(ops.mix_padded(x)), "returns a Hidden"),
    "an object": (lambda x: types.SimpleNamespace(hidden=ops.mix_padded(x)), "returns a SimpleNamespace"),
    "a set": (lambda x: (ops.mix_padded(x), {x.shape[0], 1}), "returns a set"),
    "a shape": (lambda x: (ops.mix_padded(x), x.shape), "numbers that depend on the token count"),
    "a quotient": (lambda x: (ops.mix_padded(x), x.shape[0] / 2), "numbers that depend on the token count"),
}


@pytest.mark.parametrize(("model", "message"), RESULTS.values(), ids=RESULTS)
def test_a_result_that_holds_more_than_tensors_and_constants_is_refused(
    model: Callable[[Tensor], Any], message: str, device: torch.device
) -> None:
    fast = compiled(model, token_dim={"x": 0}, compiler="eager")
    for count in (3, 5):
        fast(rows(count, device))
    with pytest.raises(FreezeError, match=message):
        pg.freeze(fast, rows(4, device))


COUNT, LOG = 0, list[int]()


class Counts(nn.Module):
    calls = 0

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        global COUNT  # noqa: PLW0603 - that is what is refused
        if self.what == "COUNT":
            COUNT += 1
        elif self.what == "LOG":
            LOG.append(1)
        elif self.what == "restored":
            COUNT, before = 7, COUNT
            x, COUNT = x * COUNT, before
        else:
            type(self).calls += 1
        return ops.mix_padded(x)


@pytest.mark.parametrize(("what", "named"), [("COUNT",) * 2, ("LOG",) * 2, ("calls", r"type\(self\)")])
def test_a_forward_that_changes_globals_or_its_class_is_refused(
    what: str, named: str, device: torch.device
) -> None:
    fast = compiled(Counts(what), token_dim={"x": 0}, compiler="eager")
    with pytest.raises(FreezeError, match=f"changes {named} in Python"):
        pg.freeze(fast, rows(4, device))


def test_a_global_that_is_put_back_is_not_changed(device: torch.device) -> None:
    model = Counts("restored")
    call = pg.freeze(compiled(model, token_dim={"x": 0}, compiler="eager"), rows(4, device))
    x = rows(3, device)
    assert_same(call(x), model(x))


def test_strides_of_a_tensor_that_is_only_asked_for_them_are_refused(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix_padded(x) + y.stride(0)

    x, y = rows(4, device), torch.zeros(4, 4, device=device)
    options: Any = {"compiler": "eager", "capture_sizes": [4], "max_tokens": 4}
    call = pg.freeze(torch.compile(model, backend="piecewise", options=options), x, y)
    assert_same(call(x, y), model(x, y))
    with pytest.raises(FreezeError, match=r"'y' is of strides \(8, 1\).* frozen with \(4, 1\)"):
        call(x, torch.zeros(4, 8, device=device)[:, :4])
    with pytest.raises(FreezeError, match=r"frozen with 0\.0"):
        zero = pg.freeze(compiled(lambda x, k: x * 2 / k, token_dim={"x": 0}), x, 0.0)
        zero(x, -0.0)
