"""pg.bisect: names the first step that departs and who is nearer the reference, and leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_graph_cases import Centring, Setup
from hypothesis import given, strategies as st
from internals import call_replaced, difference, replace_compile
from models import build, call, random_ids
from torch import Tensor, nn
from toys import WIDTH, Blocks, centred, compiled, define, ops, rows, through_torch

import piecewise_graph as pg
from piecewise_graph.errors import NotCompiledError, PiecewiseError

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 3

define("leaky(Tensor x) -> Tensor", centred, torch.empty_like)
pg.register_splitting_op("toy::leaky", padded=True)  # a lie: padded rows change the mean of the others


def sides(found: Any, graph: int = 0) -> dict[str, Any]:
    return {side.name: side for side in found.traces[graph].sides}


def departed(found: Any) -> dict[str, str]:
    """Side -> the step at which it departs."""
    return {name: side.departure.step for name, side in sides(found).items() if side.departure}


# --- what agrees ------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", [compiled, through_torch])
def test_a_right_model_departs_nowhere(entry: Callable[..., Any], device: torch.device) -> None:
    fast = entry(Blocks(LAYERS).to(device))
    x = rows(3, device)
    fast(x), fast(x)
    found = pg.bisect(fast, x)
    assert found.departure is None and found.model_error < 1e-6
    (trace,) = found.traces
    assert (trace.tokens, trace.steps, trace.reference) == (3, 2 * LAYERS + 1, "float64")
    assert list(sides(found)) == ["eager", "compiled", "tape", "piecewise", "full"]
    assert all(side.error is not None and side.error < 1e-6 for side in trace.sides[:-1])
    assert "asks for no full graph" in sides(found)["full"].note
    assert "nothing departs" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["traces"][0]["tokens"] == 3


def test_a_model_of_transformers_is_compared_in_float64(device: torch.device) -> None:
    model = build("llama", layers=2, device=device).to(torch.bfloat16)
    fast = pg.compile(model, max_tokens=16, compiler="eager")
    inputs = call("llama", random_ids(11, device=device))
    found = pg.bisect(fast, **inputs)  # its first call
    assert found.departure is None
    unit = torch.finfo(torch.bfloat16).eps
    assert all(side.error is None or 0 < side.error < 16 * unit for side in found.traces[0].sides)


def test_every_graph_of_a_call_is_compared(device: torch.device) -> None:
    first, second = Blocks(1).to(device), Blocks(2).to(device)

    def broken(x: Tensor) -> Tensor:
        x = first(x)
        torch._dynamo.graph_break()
        return second(x)

    found = pg.bisect(compiled(broken), rows(3, device))
    assert [trace.steps for trace in found.traces] == [2 * 1 + 1, 2 * 2 + 1]
    assert found.departure is None and found.model_error < 1e-6


def test_a_full_graph_is_compared_where_the_context_asks_for_it(device: torch.device) -> None:
    setup = Setup(device)
    setup.live.fill_(3)
    with pg.forward_context(live=setup.live, full_graph=True):
        found = pg.bisect(setup.fast, rows(3, device))
        assert pg.get_forward_context().full_graph
    assert found.departure is None
    assert sides(found)["full"].error < 1e-6 and "bucket 4" in sides(found)["full"].note


# --- what departs -----------------------------------------------------------------------------------


def miscompile(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]) -> None:
    """Segments that add are compiled to something else: all but the first segment."""

    def compile_wrongly(original: Callable[..., Any], gm: Any, inputs: Any, compiler: str) -> Any:
        run = original(gm, inputs, compiler)
        adds = any("add" in str(node.target) for node in gm.graph.nodes)
        return (lambda *args: [wrong(out) for out in run(*args)]) if adds else run

    replace_compile(monkeypatch, compile_wrongly)


def test_a_miscompiled_segment_is_named(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    miscompile(monkeypatch, lambda out: out * 1.01)
    found = pg.bisect(compiled(Blocks(LAYERS).to(device)), rows(3, device))
    assert departed(found) == dict.fromkeys(("compiled", "tape", "piecewise"), "segment_2")
    departure = found.departure
    assert departure is not None and departure.side == "compiled" and departure.nearer == "eager"
    assert departure.error == pytest.approx(0.01, rel=0.01) and departure.eager_error < 1e-6
    assert departure.ops == ("add", "linear (self.linears.1)")
    assert departure.tensor == f"float32[3, {WIDTH}]" and len(departure.at) == 2
    text = str(found)
    assert "compiled departs at segment_2: error 0.01" in text and "eager is nearer" in text


def test_a_side_that_is_nearer_than_eager_departs_nowhere(device: torch.device) -> None:
    """Compiled code that rounds less is no fault."""
    found = difference(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    coarse = difference(torch.tensor([1.5]), torch.tensor([1.0], dtype=torch.float64))
    assert not found.departs(coarse) and coarse.departs(found)


def test_nan_in_one_row_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    miscompile(monkeypatch, lambda out: out.index_fill(0, torch.tensor([1], device=out.device), float("nan")))
    departure = pg.bisect(compiled(Blocks(LAYERS).to(device)), rows(3, device)).departure
    assert departure is not None and departure.error == float("inf") and departure.at[0] == 1


def test_an_op_that_mixes_padded_rows_in_is_named(device: torch.device) -> None:
    fast = compiled(lambda x: ops.leaky(x * 2) + 1)
    assert departed(pg.bisect(fast, rows(3, device))) == dict.fromkeys(("tape", "piecewise"), "toy::leaky")
    assert departed(pg.bisect(fast, rows(4, device))) == {}  # a whole bucket has no padded rows


def test_graphs_of_old_weights_are_named(device: torch.device) -> None:
    model = Blocks(LAYERS).to(device)
    fast = compiled(model, check="off")
    x = rows(3, device)
    fast(x)
    model.linears[1].weight.data = torch.randn(WIDTH, WIDTH, device=device)
    assert departed(pg.bisect(fast, x)) == {"piecewise": "segment_2"}


def test_a_replay_that_would_refuse_says_so(device: torch.device) -> None:
    model = Blocks(LAYERS).to(device)
    fast = compiled(model)
    x = rows(3, device)
    fast(x)
    model.linears[1].weight.data = torch.randn(WIDTH, WIDTH, device=device)
    side = sides(pg.bisect(fast, x))["piecewise"]
    assert side.error is None and "AddressMovedError" in side.note and "linears.1.weight" in side.note


def test_a_trace_that_is_not_the_model_is_told_apart(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks(LAYERS).to(device)
    fast = compiled(model)
    fast(rows(3, device))
    call_replaced(monkeypatch, fast, lambda x: model(x) + 1)
    departure = pg.bisect(fast, rows(3, device)).departure
    assert departure is not None and departure.step == "trace" and departure.nearer == "the model itself"


# --- what has no sides ------------------------------------------------------------------------------


def test_sides_that_do_not_exist_say_why(device: torch.device) -> None:
    fast = compiled(Blocks(LAYERS).to(device))
    found = sides(pg.bisect(fast, rows(9, device)))
    assert found["tape"].note == found["piecewise"].note == "above_max_tokens"
    random = pg.bisect(compiled(lambda x: ops.mix(x) + torch.rand_like(x)), rows(3, device))
    assert {side.note for side in random.traces[0].sides} == {"random_numbers"}


def test_a_trace_that_was_not_split_says_why(device: torch.device) -> None:
    weight = nn.Parameter(rows(1, device))
    with torch.enable_grad():
        found = pg.bisect(compiled(lambda x: ops.mix(x) * weight), rows(3, device))
    assert found.traces[0].sides[0].note == "grad_enabled"


@pytest.mark.parametrize("strange", [None, 3, nn.Linear(2, 2), print])
def test_what_was_not_compiled_is_refused(strange: object) -> None:
    with pytest.raises(NotCompiledError, match="pass the object that"):
        pg.bisect(strange, torch.zeros(1))


def test_a_call_without_tokens_is_refused(device: torch.device) -> None:
    with pytest.raises(PiecewiseError, match="reached no graph"):
        pg.bisect(compiled(Blocks(LAYERS).to(device)), rows(0, device))


# --- it only looks ----------------------------------------------------------------------------------


class Remembers(nn.Module):
    """An op adds every call's rows up in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        ops.append(x, self.cache)
        return x + self.cache


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_state_is_as_before(outputs: str, device: torch.device) -> None:
    model = Remembers().to(device)
    fast = compiled(model, outputs=outputs)
    x = rows(3, device)
    for _ in range(3):
        kept = fast(x)
    cache, answer, given = model.cache.clone(), kept.clone(), x.clone()
    counted, explained, random = pg.counters.snapshot(), pg.explain(fast).to_dict(), torch.get_rng_state()
    assert pg.bisect(fast, x).departure is None
    assert torch.equal(model.cache, cache) and torch.equal(kept, answer) and torch.equal(x, given)
    assert pg.counters.snapshot() == counted and torch.equal(torch.get_rng_state(), random)
    assert pg.explain(fast).to_dict() == explained
    with pg.counters.expect(replays=1, tapes=0, traces=0):
        torch.testing.assert_close(fast(x), x * 2 + cache + 2 * x.sum(0))


def test_an_input_that_the_model_writes_is_put_back(device: torch.device) -> None:
    def writes(x: Tensor) -> Tensor:
        x.mul_(2)
        return ops.mix(x) + 1

    x = rows(3, device)
    given = x.clone()
    found = pg.bisect(compiled(writes), x)
    assert found.departure is None and found.model_error < 1e-6
    assert sides(found)["compiled"].error < 1e-6 and sides(found)["tape"].note == "writes_an_input"
    assert torch.equal(x, given)


def test_nothing_is_captured_for_a_model_that_captured_nothing(device: torch.device) -> None:
    fast = compiled(Blocks(LAYERS).to(device))
    pg.bisect(fast, rows(3, device))
    assert pg.explain(fast).traces[0].buckets == () and pg.explain(fast).pool_bytes == 0
    with pg.counters.expect(tapes=1, captures=LAYERS + 1):
        fast(rows(3, device))


# --- the measure ------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.integers(0, 11),
    st.sampled_from([1e-2, 1.0, 1e3]),
)
def test_the_difference_is_relative_to_the_largest_value(
    values: list[float], place: int, scale: float
) -> None:
    wanted = torch.tensor([*values, 100.0], dtype=torch.float64)
    found = wanted.clone()
    found[place % len(values)] += 1.0
    one = difference(found * scale, wanted * scale)
    assert one.error == pytest.approx(0.01) and one.at == (place % len(values),)
    assert difference(wanted, wanted).error == 0


@pytest.mark.parametrize(
    ("found", "wanted", "error"),
    [
        ([1, 2, 3, 4], [1, 2, 0, 4], 0.25),
        ([True, True], [True, False], 0.5),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0),
        ([float("nan"), 1.0], [2.0, 1.0], float("inf")),
        ([1.0], [1.0, 1.0], float("inf")),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
    ],
)
def test_integers_infinities_and_shapes_are_compared_too(
    found: list[Any], wanted: list[Any], error: float
) -> None:
    assert difference(torch.tensor(found), torch.tensor(wanted)).error == error


@pytest.mark.gpu
def test_captured_graphs_are_what_runs(device: torch.device) -> None:
    model = Blocks(LAYERS).to(device)
    fast = compiled(model, compiler="inductor", check="off")
    x = rows(3, device)
    fast(x)
    assert pg.bisect(fast, x).departure is None
    model.linears[2].weight.data = torch.randn(WIDTH, WIDTH, device=device)
    assert departed(pg.bisect(fast, x)) == {"piecewise": "segment_4"}
    fresh = compiled(Centring().to(device))
    with pg.forward_context(live=torch.tensor([3], device=device), full_graph=True):
        found = sides(pg.bisect(fresh, x))
    assert found["full"].error < 1e-5 and "captured for this" in found["full"].note
