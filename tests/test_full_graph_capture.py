"""FULL mode: padding and aliasing of uncaptured forwards, and pg.capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from full_graph_cases import Setup, calling_back
from internals import fail_capture
from torch import Tensor, nn
from toys import SIZES, WIDTH, assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.errors import CaptureError

pytestmark = pytest.mark.usefixtures("no_grad")


# --- padding and aliasing of uncaptured forwards -----------------------------------------


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
    """Equal ids do not show whether rows mix. Until that is known, the call runs unpadded."""

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


# --- pg.capture ---------------------------------------------------------------------------------------


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
    """The replay would overwrite results of the outer forward."""
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
