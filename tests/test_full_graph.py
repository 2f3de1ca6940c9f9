"""FULL mode: one graph per bucket and key, for the context that it was captured with, or a counted reason."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import fail_capture
from torch import Tensor, nn
from toys import SIZES, WIDTH, assert_same, compiled, define, note, ops, rows, watching

import piecewise_graph as pg
from piecewise_graph.errors import AddressMovedError, CaptureError, ContextError

LAYERS = 2
call_backs: list[Any] = []  # what the op below calls when it runs


@contextmanager
def calling_back(function: Any) -> Iterator[None]:
    call_backs.append(function)
    try:
        yield
    finally:
        call_backs.clear()


def _centre_live(x: Tensor, out: Tensor) -> None:
    """Subtract the mean of the live rows, whose number is in the context; padded rows become zeros."""
    note("centre_live", x)
    for call_back in call_backs:
        call_back(call_backs)
    context = pg.get_forward_context()
    live = (torch.arange(x.shape[0], device=x.device) < context.live)[:, None]
    known = torch.where(live, x, 0)
    mean = known.sum(0, keepdim=True) / live.sum()
    out.copy_(torch.where(live, known - mean, 0) * context.get("factor", 1.0))


define("centre_live(Tensor x, Tensor(a!) out) -> ()", _centre_live, lambda x, out: None)
pg.register_splitting_op("toy::centre_live", capturable=True)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.no_grad():
        yield


class Centring(nn.Module):
    """LAYERS capturable ops between LAYERS + 1 segments."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            y = linear(x)
            out = torch.empty_like(y)
            ops.centre_live(y, out)
            x = x + out
        return x * 2


class Setup:
    """A model, compiled, and the context of its full graphs: a count that is written in place."""

    def __init__(self, device: torch.device, model: nn.Module | None = None, **options: Any) -> None:
        self.device = device
        self.model = (model or Centring()).to(device)
        self.fast = compiled(self.model, **options)
        self.live = torch.zeros(1, dtype=torch.int32, device=device)

    def call(self, count: int, *, full: bool = True, key: object = None, **fields: Any) -> None:
        """One forward of `count` tokens, compared with eager."""
        x = rows(count, self.device)
        self.live.fill_(count)
        with pg.forward_context(live=self.live, **fields):
            wanted = self.model(x)
        with pg.forward_context(live=self.live, full_graph=full, graph_key=key, **fields):
            found = self.fast(x)
        assert_same(found, wanted)


def test_every_bucket_is_one_graph(device: torch.device) -> None:
    setup = Setup(device)
    expected = {"traces": 1, "captures": len(SIZES), "tapes": len(SIZES), "not_full": 0, "fallbacks": 0}
    with pg.counters.expect(**expected, replays=6, full_replays=6):
        for count in (3, 8, 4, 1, 2, 6, 8, 3):
            setup.call(count)


def test_budget_keeps_full_graphs_from_being_captured_too(device: torch.device) -> None:
    setup = Setup(device, max_graph_bytes=1)
    with pg.counters.expect(tapes=0, **{"not_full:over_budget": 3, "fallbacks:over_budget": 3}):
        for count in (3, 3, 8):
            setup.call(count)


def test_captures_once_per_bucket_and_key(device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(captures=2 * len(SIZES), full_replays=4):
        for key in ("decode", ("verify", 8)):
            for count in (3, 8, 4, 5):
                setup.call(count, key=key)


def test_both_modes_live_side_by_side(device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(captures=1 + (LAYERS + 1), full_replays=2, replays=4):
        for full in (True, False, True, False, True, False):
            setup.call(3, full=full)
    modes = {bucket.mode for bucket in pg.explain(setup.fast).traces[0].buckets}
    assert modes == {"full", "piecewise"}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled_segments_become_one_graph(compiler: str, device: torch.device) -> None:
    setup = Setup(device, compiler=compiler)
    with pg.counters.expect(captures=1, full_replays=2):
        for count in (3, 2, 4):
            setup.call(count)


@pytest.mark.parametrize("outputs", ["copy", "static"])
def test_owned_and_static_outputs(outputs: str, device: torch.device) -> None:
    setup = Setup(device, outputs=outputs)
    x, y = rows(4, device), rows(4, device)
    setup.live.fill_(4)
    with pg.forward_context(live=setup.live, full_graph=True):
        setup.fast(x)
        first = setup.fast(x)
        kept = first.clone()
        setup.fast(y)
    assert torch.equal(first, kept) == (outputs == "copy")


# --- what a full graph was captured with ------------------------------------------------------------------


def test_another_object_in_the_context_is_refused_by_name(device: torch.device) -> None:
    """The graph reads the old tensor: an answer for another batch, at full speed."""
    setup = Setup(device)
    setup.call(3)
    setup.call(3)
    setup.live = setup.live.clone()
    with pytest.raises(ContextError, match=r"(?s)4 tokens.*another 'live'.*in place"):
        setup.call(3)
    setup.call(3, key="another")  # a key of its own is captured anew


def test_view_of_the_same_memory_is_the_same_tensor(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3)
    setup.live = setup.live[:]
    with pg.counters.expect(full_replays=1):
        setup.call(3)


def test_numbers_in_the_context_are_compared_by_value(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3, factor=2.0)
    setup.call(2, factor=float("2.0"))
    with pytest.raises(ContextError, match="'factor'"):
        setup.call(3, factor=3.0)


@pytest.mark.parametrize("late", [True, False])
def test_fields_that_come_or_go_are_refused(late: bool, device: torch.device) -> None:
    setup = Setup(device)
    fields = {"factor": 2.0}
    setup.call(3, **({} if late else fields))
    with pytest.raises(ContextError, match="'factor'"):
        setup.call(3, **(fields if late else {}))


def test_piecewise_replays_take_any_context(device: torch.device) -> None:
    setup = Setup(device)
    for factor in (1.0, 2.0, 3.0):
        setup.live = setup.live.clone()
        setup.call(3, full=False, factor=factor)


def test_moved_weight_is_refused(device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3)
    setup.model.linears[0].weight.data = setup.model.linears[0].weight.data.clone()
    with pytest.raises(AddressMovedError, match="weight"):
        setup.call(3)


def move_data(live: Tensor) -> None:
    live.data = live.data.clone()


def grow(live: Tensor) -> None:
    live.resize_(2)


@pytest.mark.parametrize("change", [move_data, grow])
@pytest.mark.parametrize("inside", [False, True])
def test_tensor_that_was_moved_is_refused(change: Any, inside: bool, device: torch.device) -> None:
    """The object is the same, its memory is not."""
    setup = Setup(device, check="always")
    fields = {"batch": types.SimpleNamespace(nested=(setup.live,))} if inside else {}
    setup.call(3, **fields)
    setup.call(2, **fields)
    change(setup.live)
    context = pg.forward_context(live=setup.live, full_graph=True, **fields)
    with pytest.raises(ContextError, match=r"tensor of .*(live|batch).* moved"), context:
        setup.fast(rows(3, device))


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {1}])
def test_mutable_field_is_refused_by_name(value: Any, device: torch.device) -> None:
    setup = Setup(device)
    setup.call(3, lengths=value)
    assert "'lengths' is a" in pg.explain(setup.fast).traces[0].failed[4]


def test_tuples_of_constants_are_compared_by_value(device: torch.device) -> None:
    setup = Setup(device)
    for _ in range(3):
        setup.call(3, lengths=(1, *[2]))
    with pytest.raises(ContextError, match="'lengths'"):
        setup.call(3, lengths=(1, 3))


@pytest.mark.parametrize("key", [[1], ([1],), float("nan"), torch.zeros(1)])
def test_key_that_cannot_tell_graphs_apart_is_refused(key: Any) -> None:
    with pytest.raises(ContextError, match="cannot tell graphs apart"), pg.forward_context(graph_key=key):
        pass


@pytest.mark.parametrize("name", ["get", "fields"])
def test_reserved_field_is_refused(name: str) -> None:
    with pytest.raises(ContextError, match=f"cannot be called '{name}'"), pg.forward_context(**{name: 1}):
        pass


# --- calls that cannot be one graph -----------------------------------------------------------------------


def test_op_that_is_not_capturable_leaves_the_call_piecewise(device: torch.device) -> None:
    class Mixed(Centring):
        def forward(self, x: Tensor) -> Tensor:
            return ops.mix(super().forward(x)) + 1

    setup = Setup(device, Mixed())
    with pg.counters.expect(full_replays=0, replays=2, fallbacks=0, **{"not_full:op_not_capturable": 3}):
        for _ in range(3):
            setup.call(4)


class LastRow(Centring):
    """Its last segment reads the last row: padding would answer for a padded one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[-1:] * 3


def test_segment_that_must_not_be_padded_makes_full_graphs_exact(device: torch.device) -> None:
    setup = Setup(device, LastRow())
    with pg.counters.expect(full_replays=2):
        for count in (4, 4, 3, 3, 2, 4):
            setup.call(count)
    counts = pg.counters.snapshot()
    assert counts["not_full:mixes_tokens"] == counts["not_full"] > 0


def test_capture_that_fails_costs_the_bucket_and_says_why(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, RuntimeError("the stream broke"), at=4, of="full")
    setup = Setup(device)
    setup.call(3)
    assert "the stream broke" in pg.explain(setup.fast).traces[0].failed[4]
    with pg.counters.expect(failed_captures=0, full_replays=1, replays=3, **{"not_full:capture_failed": 3}):
        for count in (3, 2, 4, 7, 8):  # piecewise: captured, replayed twice; then a full graph of 8
            setup.call(count)


def test_ops_run_once_per_forward(device: torch.device) -> None:
    """Rehearsal and capture included."""
    if device.type == "cuda":
        pytest.skip("a replayed graph calls no Python")
    setup = Setup(device)
    for count in (3, 3, 2, 8):
        with pg.forward_context(live=setup.live.fill_(count), full_graph=True), watching() as seen:
            setup.fast(rows(count, device))
        ran = [call.tokens for call in seen]
        assert ran == [4 if count < 5 else 8] * LAYERS


@pytest.mark.parametrize("count", [9, 12])
def test_above_max_tokens_runs_compiled(count: int, device: torch.device) -> None:
    setup = Setup(device)
    with pg.counters.expect(**{"fallbacks:above_max_tokens": 2}, full_replays=0):
        setup.call(count)
        setup.call(count)


def test_graphs_switched_off(device: torch.device) -> None:
    setup = Setup(device, cuda_graphs="off")
    with pg.counters.expect(**{"fallbacks:cuda_graphs_off": 2}, captures=0):
        setup.call(3)
        setup.call(3)


# --- padding and aliasing, where a forward answers uncaptured -----------------------------------------------


def centred_live(y: Tensor) -> Tensor:
    out = torch.empty_like(y)
    ops.centre_live(y, out)
    return out


class Function(nn.Module):
    """A function as a module, for `Setup`."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def writes_a_view(x: Tensor) -> Tensor:
    y = x + x[-1:]
    buffer = torch.zeros(x.shape[0], 2 * WIDTH, device=x.device)
    ops.centre_live(y, buffer[:, :WIDTH])
    return buffer * 2 + 1


def writes_an_earlier_value(x: Tensor) -> Tensor:
    h = x * 2
    o = centred_live(h)
    h[0:1].mul_(3.0)
    z = h + h[-1:]
    return h + centred_live(z + o)


def sums_rows(x: Tensor) -> Tensor:
    h = x * 2 + 1
    return h.sum(0, keepdim=True) + centred_live(h)


def adds_the_last_row_in_place(x: Tensor) -> Tensor:
    h = x * 2
    o = centred_live(h)
    h.add_(h[-1:].clone())
    return h + centred_live(o)


@pytest.mark.parametrize(
    "function", [writes_a_view, writes_an_earlier_value, sums_rows, adds_the_last_row_in_place]
)
@pytest.mark.parametrize("capture", ["lazy", "explicit"])
@pytest.mark.parametrize("full", [True, False])
def test_segments_that_mix_or_alias_stay_right(
    function: Any, capture: str, full: bool, device: torch.device
) -> None:
    setup = Setup(device, Function(function), capture=capture)
    for count in (3, 3, 4, 2, 3, 8, 5, 5):
        setup.call(count, full=full)


def test_unprovable_inputs_are_not_padded(device: torch.device) -> None:
    """Equal ids hide whether rows mix; until that is known, the answer is computed without padding."""

    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            return h.sum(0, keepdim=True) + centred_live(h)

    model = Summing().to(device)
    fast = compiled(model)
    live = torch.zeros(1, dtype=torch.int32, device=device)
    for ids in ([0, 0, 0], [0], [0, 0, 0], [1, 2, 3], [0, 1]):
        x = torch.tensor(ids, device=device)
        with pg.forward_context(live=live.fill_(len(ids))):
            wanted = model(x)
        with pg.forward_context(live=live, full_graph=True):
            assert_same(fast(x), wanted)


@pytest.mark.parametrize("capture", ["lazy", "explicit"])
def test_output_that_views_an_input_is_the_callers(capture: str, device: torch.device) -> None:
    fast = compiled(lambda x: (centred_live(x * 2) + 1, x[:, :4]), capture=capture)
    live = torch.full((1,), 3, dtype=torch.int32, device=device)
    with pg.forward_context(live=live, full_graph=True):
        kept = fast(rows(3, device))[1]
        before = kept.clone()
        fast(rows(3, device)), fast(rows(3, device))
    assert torch.equal(kept, before)


def test_derived_sizes_have_full_graphs_at_exact_sizes(device: torch.device) -> None:
    setup = Setup(device, Function(lambda x: torch.cat([centred_live(x * 2), x])))
    with pg.counters.expect(failed_captures=0, full_replays=2):
        for count in (4, 4, 3, 4):
            setup.call(count)


# --- pg.capture -------------------------------------------------------------------------------------------


def test_capture_before_serving(device: torch.device) -> None:
    setup = Setup(device, capture="explicit")

    def context(count: int) -> dict[str, Any]:
        setup.live.fill_(count)
        return {"live": setup.live, "full_graph": True, "graph_key": "decode"}

    report = pg.capture(setup.fast, lambda n: {"x": rows(n, device)}, context=context, progress=False)
    assert [bucket.tokens for bucket in report.captured] == sorted(SIZES, reverse=True)
    assert [bucket.graphs for bucket in report.captured] == [1, 1]
    with pg.counters.expect(captures=0, full_replays=3, fallbacks=0):
        for count in (3, 8, 5):
            setup.call(count, key="decode")
    with pg.counters.expect(captures=0, **{"fallbacks:not_captured": 1, "not_full:not_captured": 1}):
        setup.call(3, key="unknown")


def test_capture_names_what_failed(device: torch.device) -> None:
    setup = Setup(device, capture="explicit")
    with pytest.raises(CaptureError, match="cuda_graphs_off"):
        fast = compiled(setup.model, cuda_graphs="off")
        pg.capture(
            fast,
            lambda n: {"x": rows(n, device)},
            context=lambda n: {"live": setup.live.fill_(n), "full_graph": True},
            progress=False,
        )


def test_capture_reports_a_mode_that_failed_although_the_other_is_there(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(device, capture="explicit")

    def capture(full: bool) -> Any:
        return pg.capture(
            setup.fast,
            lambda n: {"x": rows(n, device)},
            context=lambda n: {"live": setup.live.fill_(n), "full_graph": full},
            progress=False,
        )

    capture(full=False)
    unforeseen = KeyError("no such stream")
    fail_capture(monkeypatch, unforeseen, at=4, of="full")
    report = capture(full=True)
    assert [bucket.tokens for bucket in report.captured] == [8]
    assert "no such stream" in report.failed[4]


def test_weight_may_move_as_long_as_nothing_was_captured(device: torch.device) -> None:
    setup = Setup(device, capture="explicit")
    setup.call(3)
    setup.model.linears[0].weight.data = setup.model.linears[0].weight.data.clone()
    setup.call(3)


def test_forward_inside_a_splitting_op_is_not_replayed(device: torch.device) -> None:
    """Its replay would overwrite what the outer forward has computed so far."""
    setup, x = Setup(device), rows(3, device)
    setup.call(3, full=False), setup.call(3, full=False)
    with pg.forward_context(live=setup.live):
        wanted = setup.model(x)
    nested: list[Any] = []

    def again(seen: list[Any]) -> None:
        if not nested:
            nested.append(None)
            setup.fast(rows(2, device))

    with (
        calling_back(again),
        pg.forward_context(live=setup.live),
        pg.counters.expect(**{"fallbacks:nested_forward": 1}),
    ):
        assert_same(setup.fast(x), wanted)


def test_released_pool_captures_again(device: torch.device) -> None:
    pool = pg.GraphPool()
    setup = Setup(device, pool=pool)
    setup.call(3)
    pool.release()
    with pg.counters.expect(captures=1, full_replays=1):
        setup.call(3)
        setup.call(3)


# --- any order of calls -----------------------------------------------------------------------------------


@settings(max_examples=15)
@given(
    calls=st.lists(
        st.tuples(st.integers(1, 10), st.booleans(), st.sampled_from([None, "a", "b"])),
        min_size=1,
        max_size=12,
    ),
    last_row=st.booleans(),
)
def test_any_sequence_equals_eager(calls: list[tuple[int, bool, str | None]], last_row: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        setup = Setup(device, LastRow() if last_row else None)
        for count, full, key in calls:
            setup.call(count, full=full, key=key)
