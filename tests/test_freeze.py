"""pg.freeze: the model's signature and outputs, without Dynamo, beside everything else."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import models
import pytest
import torch
from hypothesis import given, settings, strategies as st
from internals import forbid_dynamo
from torch import Tensor, nn
from toys import SIZES, WIDTH, Blocks, Weighs, assert_same, compiled, frozen, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.errors import ContextError, FreezeError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- right answers ------------------------------------------------------------------------------------


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
    """pg.freeze finds the graph's inputs by the example's tensors, and these two look the same."""
    x = rows(3, device)
    with pytest.raises(FreezeError, match=r"'x' and 'y'.*same memory"):
        pg.freeze(compiled(Weighs()), x, other(x))
    call = pg.freeze(compiled(Weighs()), x, x.clone())
    y = rows(3, device)
    assert_same(call(x, y), Weighs()(x, y))
    assert_same(call(x, x), Weighs()(x, x))


@pytest.mark.parametrize("asked", [{}, {"return_dict": False}])
def test_owned_outputs_are_whole_objects_of_their_own(asked: dict[str, bool], device: torch.device) -> None:
    """The library makes them without the class's constructor; users must not notice."""
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


# --- with everything else -----------------------------------------------------------------------------


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


def test_full_graphs_of_two_keys_are_told_apart(device: torch.device) -> None:
    """Each key has tensors of its own; the same token count comes under both."""
    from test_full_graph import Centring

    model = Centring().to(device)
    lives = {key: torch.zeros(1, dtype=torch.int32, device=device) for key in ("decode", "verify")}
    with pg.forward_context(live=lives["decode"].fill_(3), full_graph=True, graph_key="decode"):
        call = pg.freeze(compiled(model), rows(3, device))
    with pg.counters.expect(tapes=1, full_replays=7, not_full=0):
        for key, count in [("decode", 3), ("verify", 3)] * 3 + [("verify", 2), ("decode", 2)]:
            x = rows(count, device)
            with pg.forward_context(live=lives[key].fill_(count)):
                wanted = model(x)
            with pg.forward_context(live=lives[key], full_graph=True, graph_key=key):
                assert_same(call(x), wanted)


def test_padded_op_sees_zeros_behind_the_live_rows(device: torch.device) -> None:
    """In a frozen call as in every other: rows of the call before must not stay there."""
    call = frozen(lambda x: ops.mix_padded(x * 2) + x, device)
    for count in (8, 5, 8, 5, 6, 8, 6):
        with watching() as seen:
            call(rows(count, device))
        assert {one.tokens for one in seen} == {8}
        assert not seen[-1].value[count:].any()


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
