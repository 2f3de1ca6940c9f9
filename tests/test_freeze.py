"""pg.freeze: the model's signature and outputs, no Dynamo, every difference refused by name."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import forbid_dynamo
from torch import Tensor, nn
from toys import SIZES, WIDTH, Blocks, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, ContextError, FreezeError, InputError


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def model(device: torch.device) -> Blocks:
    return Blocks(layers=2).to(device)


def frozen(model: Any, device: torch.device, **options: Any) -> Any:
    return pg.freeze(compiled(model, **options), rows(3, device))


class Weighs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x * 2) + y


# --- right answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_serves_every_token_count_without_dynamo(
    outputs: str, model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = compiled(model, outputs=outputs)
    call = pg.freeze(fast, rows(3, device))
    forbid_dynamo(monkeypatch, fast)
    with pg.counters.expect(traces=0, replays=7, tapes=1, **{"fallbacks:above_max_tokens": 1}):
        for count in (3, 4, 1, 2, 8, 5, 3, 8, 9):
            x = rows(count, device)
            assert_same(call(x), model(x))


@pytest.mark.parametrize("other", [lambda x: x, lambda x: x.view(x.shape)], ids=["same", "view"])
def test_example_that_names_one_tensor_twice_is_refused(device: torch.device, other: Any) -> None:
    """The graph's inputs are told apart by the example's tensors: these two could not be."""
    x = rows(3, device)
    with pytest.raises(FreezeError, match=r"'x' and 'y'.*same memory"):
        pg.freeze(compiled(Weighs()), x, other(x))
    call = pg.freeze(compiled(Weighs()), x, x.clone())
    y = rows(3, device)
    assert_same(call(x, y), Weighs()(x, y))
    assert_same(call(x, x), Weighs()(x, x))


@pytest.mark.parametrize("asked", [{}, {"return_dict": False}])
def test_owned_outputs_are_whole_objects_of_their_own(asked: dict[str, bool], device: torch.device) -> None:
    """They are made without the class's constructor; nothing that users do with them may tell."""
    model = models.build("llama", device=device)
    fast = pg.compile(model, compiler="eager", capture_sizes=[4])
    call = pg.freeze(fast, **models.call("llama", models.random_ids(3, device=device)), **asked)
    arguments = models.call("llama", models.random_ids(4, device=device)) | asked
    call(**arguments)
    first, second, wanted = call(**arguments), call(**arguments), model(**arguments)
    assert type(first) is type(wanted) and repr(first).partition("(")[0] == repr(wanted).partition("(")[0]
    found, other = torch.utils._pytree.tree_leaves(first), torch.utils._pytree.tree_leaves(second)
    assert not {x.data_ptr() for x in found} & {x.data_ptr() for x in other}
    for got, expected in zip(found, torch.utils._pytree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
    if not isinstance(wanted, tuple):
        assert vars(first).keys() == vars(wanted).keys() and first.keys() == wanted.keys()
        assert first.logits is first["logits"] is first[0] and first.past_key_values is None
        assert len(first.to_tuple()) == len(wanted.to_tuple())
        first["logits"] = second.logits
        first.loss = second.logits.sum()
        assert first.logits is second.logits and "loss" in first and "loss" not in second
        assert copy.deepcopy(second).keys() == wanted.keys()
        assert pickle.loads(pickle.dumps(second)).logits.equal(second.logits)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bert"])
def test_keeps_a_models_signature_and_output_class(name: str, device: torch.device) -> None:
    model = models.build(name, device=device)
    fast = pg.compile(model, compiler="eager", capture_sizes=[4, 16])
    call = pg.freeze(fast, **models.call(name, models.random_ids(3, device=device)))
    for count in (3, 4, 1, 9, 16, 20, 9):
        arguments = models.call(name, models.random_ids(count, device=device))
        found, wanted = call(**arguments), model(**arguments)
        assert type(found) is type(wanted)
        assert list(found) == list(wanted)
        torch.testing.assert_close(models.rows(found), models.rows(wanted), rtol=1e-3, atol=1e-4)


def test_of_plain_torch_compile(model: Blocks, device: torch.device) -> None:
    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "capture_sizes": (4, 8)})
    fast(rows(3, device)), fast(rows(4, device))
    call = pg.freeze(fast, rows(3, device))
    for count in (2, 3, 4, 8):
        x = rows(count, device)
        assert_same(call(x), model(x))


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0, *, extra: dict[str, Tensor]) -> Pair:
        z = ops.mix(x + y * 2) * scale + extra["bias"]
        return Pair(z, {"none": None, "both": [z + 1, x * 3], "text": "as it is"})


def nested_inputs(count: int, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    return rows(count, device), rows(count, device), {"bias": rows(count, device)}


def test_nested_arguments_and_results(device: torch.device) -> None:
    model = Nested()
    fast = torch.compile(model, backend="piecewise", options={"compiler": "eager", "capture_sizes": (4, 8)})
    for count in (3, 4):
        x, y, extra = nested_inputs(count, device)
        fast(x, y, extra=extra)
    call = pg.freeze(fast, x, y, extra=extra)
    for count in (2, 4, 7):
        x, y, extra = nested_inputs(count, device)
        assert_same(tuple(call(x, y, extra=extra).rest["both"]), tuple(model(x, y, extra=extra).rest["both"]))
        assert call(x, y, extra=extra).rest["text"] == "as it is"


def test_arguments_by_position_or_by_name(device: torch.device) -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        return ops.mix(x - y) + y

    fast = compiled(model, token_dim={"x": 0, "y": 0})
    a, b = rows(3, device), rows(3, device)
    call = pg.freeze(fast, a, y=b)
    for args, kwargs in (((a,), {"y": b}), ((a, b), {}), ((), {"y": b, "x": a}), ((), {"x": a, "y": b})):
        for _ in range(2):
            assert_same(call(*args, **kwargs), model(a, b))


def test_kept_outputs_are_the_callers(model: Blocks, device: torch.device) -> None:
    call = frozen(model, device)
    x = rows(4, device)
    kept, wanted = call(x), model(x)
    call(rows(4, device)), call(rows(3, device))
    assert_same(kept, wanted)


def test_static_inputs_are_read_without_a_copy(model: Blocks, device: torch.device) -> None:
    call = frozen(model, device)
    call(rows(4, device))
    place = call.static_inputs(4)["x"]
    for _ in range(3):
        x = rows(4, device)
        place.copy_(x)
        assert_same(call(place), model(x))
    with pytest.raises(FreezeError, match="no tape serves 8 tokens"):
        call.static_inputs(8)


# --- what it refuses --------------------------------------------------------------------------------------


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


# --- weights ----------------------------------------------------------------------------------------------


def test_weights_written_in_place_are_seen(model: Blocks, device: torch.device) -> None:
    call, x = frozen(model, device), rows(3, device)
    call(x)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter))
    assert_same(call(x), model(x))


@pytest.mark.parametrize("replace", ["data", "parameter"])
def test_rebind_after_weights_were_replaced(replace: str, model: Blocks, device: torch.device) -> None:
    call, x = frozen(model, device), rows(3, device)
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


def test_check_always_refuses_a_moved_weight(model: Blocks, device: torch.device) -> None:
    call, x = frozen(model, device, check="always"), rows(3, device)
    call(x), call(x)
    model.linears[1].weight.data = torch.randn_like(model.linears[1].weight)
    with pytest.raises(AddressMovedError, match="linears"):
        call(x)


# --- with everything else ---------------------------------------------------------------------------------


def test_reset_and_release_capture_again(model: Blocks, device: torch.device) -> None:
    pool = pg.GraphPool()
    call, x = frozen(model, device, pool=pool), rows(3, device)
    for forget in (pg.reset, pool.release):
        call(x)
        forget()
        with pg.counters.expect(tapes=1, replays=1):
            call(x)
            assert_same(call(x), model(x))


def test_full_graphs_check_their_context(device: torch.device) -> None:
    from test_full_graph import Centring

    model = Centring().to(device)
    live = torch.zeros(1, dtype=torch.int32, device=device)
    fast = compiled(model)
    with pg.forward_context(live=live.fill_(3), full_graph=True):
        call = pg.freeze(fast, rows(3, device))
    with pg.counters.expect(full_replays=4, not_full=0):
        for count in (3, 2, 4, 3):
            x = rows(count, device)
            with pg.forward_context(live=live.fill_(count)):
                wanted = model(x)
            with pg.forward_context(live=live, full_graph=True):
                assert_same(call(x), wanted)
    with pytest.raises(ContextError, match="'live'"), pg.forward_context(live=live.clone(), full_graph=True):
        call(x)


@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(1, SIZES[-1] + 2), min_size=1, max_size=10),
    outputs=st.sampled_from(["copy", "static"]),
    strided=st.booleans(),
)
def test_any_sequence_equals_eager(counts: list[int], outputs: str, strided: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        model = Blocks().to(device)
        call = frozen(model, device, outputs=outputs)
        for count in counts:
            x = rows(count, device, 2 * WIDTH)[:, ::2] if strided else rows(count, device)
            assert_same(call(x), model(x))
