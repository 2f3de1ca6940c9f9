"""pg.capture: before serving, largest first, then sealed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals import fail_capture, is_sealed, pool_of
from torch import Tensor
from toys import SIZES, Blocks, assert_same, captured, compiled, fallbacks, rows, through_torch

import piecewise_graph as pg
from piecewise_graph.errors import CaptureError

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 2


def test_every_size_is_captured_largest_first(model: Blocks, device: torch.device) -> None:
    sizes = [1, 2, 4, 8]
    fast = compiled(model, capture_sizes=sizes)
    with pg.counters.expect(traces=1, tapes=len(sizes), captures=len(sizes) * (LAYERS + 1)):
        report = captured(fast, device)
    assert [bucket.tokens for bucket in report.captured] == sorted(sizes, reverse=True)
    assert all(bucket.graphs == LAYERS + 1 for bucket in report.captured)
    assert report.failed == {}
    assert report.seconds >= sum(bucket.seconds for bucket in report.captured) > 0
    assert report.buffer_bytes > 0
    assert report.pool_bytes == pool_of(fast).bytes()


def test_report_reads_well(model: Blocks, device: torch.device) -> None:
    text = str(captured(compiled(model), device))
    assert text.startswith(f"captured 2 buckets ({2 * (LAYERS + 1)} graphs) in ")
    assert "MiB" in text


def test_everything_replays_afterwards(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    captured(fast, device)
    with pg.counters.expect(replays=8, captures=0, fallbacks=0):
        for count in range(1, 9):
            x = rows(count, device)
            assert_same(fast(x), model(x))


def test_subset_is_captured_and_the_rest_stays_uncaptured(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    report = captured(fast, device, sizes=[8])
    assert [bucket.tokens for bucket in report.captured] == [8]
    with pg.counters.expect(tapes=0, replays=1, **{"fallbacks:not_captured": 1}):
        for count in (6, 3):
            x = rows(count, device)
            assert_same(fast(x), model(x))
    assert pg.explain(fast).sealed


def test_missing_sizes_can_be_captured_later(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    captured(fast, device, sizes=[8])
    report = captured(fast, device, sizes=[4])
    assert [bucket.tokens for bucket in report.captured] == [4]
    with pg.counters.expect(replays=2, fallbacks=0):
        fast(rows(3, device)), fast(rows(6, device))


def test_capturing_twice_captures_nothing_anew(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    captured(fast, device)
    with pg.counters.expect(tapes=0, captures=0):
        again = captured(fast, device)
    assert [bucket.tokens for bucket in again.captured] == [8, 4]


def test_explicit_mode_never_captures_lazily(model: Blocks, device: torch.device) -> None:
    fast = compiled(model, capture="explicit")
    with pg.counters.expect(tapes=0, **{"fallbacks:not_captured": 3}):
        for count in (3, 3, 8):
            fast(rows(count, device))
    captured(fast, device)
    with pg.counters.expect(replays=2, tapes=0):
        fast(rows(3, device)), fast(rows(8, device))


def test_reset_unseals(model: Blocks, device: torch.device) -> None:
    fast = compiled(model)
    captured(fast, device, sizes=[8])
    pg.reset()
    with pg.counters.expect(tapes=1):
        fast(rows(3, device))
    assert not pg.explain(fast).sealed


@pytest.mark.parametrize("sizes", [[3], [4, 16], [0], [-4], ["4"], [None]])
def test_sizes_that_are_no_capture_sizes_are_refused(
    sizes: list[Any], model: Blocks, device: torch.device
) -> None:
    fast = compiled(model)
    with pytest.raises(CaptureError, match=r"(?s)capture sizes.*\[4, 8\]"):
        captured(fast, device, sizes=sizes)
    assert not is_sealed(fast)


def test_empty_list_of_sizes_is_refused(model: Blocks, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="capture sizes"):
        captured(compiled(model), device, sizes=[])


@pytest.mark.parametrize("made", [None, 3, "ids", {1, 2}])
def test_make_inputs_of_a_strange_type_is_refused(made: object, model: Blocks) -> None:
    with pytest.raises(CaptureError, match=rf"make_inputs\(8\) returned a {type(made).__name__}"):
        pg.capture(compiled(model), lambda n: made, progress=False)


@pytest.mark.parametrize("form", ["tensor", "tuple", "list", "dict"])
def test_make_inputs_may_return_any_form(form: str, model: Blocks, device: torch.device) -> None:
    def make(n: int) -> Any:
        x = rows(n, device)
        return {"tensor": x, "tuple": (x,), "list": [x], "dict": {"x": x}}[form]

    assert len(pg.capture(compiled(model), make, progress=False).captured) == len(SIZES)


def test_make_inputs_of_another_size_is_named_with_the_size_asked_for(
    model: Blocks, device: torch.device
) -> None:
    """make_inputs that ignores its argument must not cost a bucket silently."""
    try:
        report = pg.capture(compiled(model), lambda n: rows(4, device), progress=False)
    except CaptureError as error:
        assert "make_inputs(8)" in str(error)
    else:
        assert "make_inputs(8)" in report.failed[8]
        assert "not captured: 8 tokens" in str(report)


def test_error_of_make_inputs_passes_through_and_nothing_is_sealed(
    model: Blocks, device: torch.device
) -> None:
    fast = compiled(model)

    def broken(n: int) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pg.capture(fast, broken, progress=False)
    with pg.counters.expect(tapes=1):
        fast(rows(3, device))


def test_grad_mode_is_refused_with_the_remedy(model: Blocks, device: torch.device) -> None:
    with torch.enable_grad(), pytest.raises(CaptureError, match=r"(?s)grad_enabled.*torch\.no_grad"):
        captured(compiled(model), device)


def test_graphs_off_captures_nothing_and_says_so(model: Blocks, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="cuda_graphs_off"):
        captured(compiled(model, cuda_graphs="off"), device)


def test_out_of_memory_in_one_bucket_is_in_the_report(
    model: Blocks, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_capture(monkeypatch, torch.OutOfMemoryError("wanted 12 GiB"), at=6)
    fast = compiled(model, capture_sizes=[4, 6])
    report = captured(fast, device)
    assert [bucket.tokens for bucket in report.captured] == [4]
    assert list(report.failed) == [6]
    assert "wanted 12 GiB" in report.failed[6]
    assert "not captured: 6 tokens: out of memory" in str(report)
    x = rows(5, device)
    assert_same(fast(x), model(x))
    assert fallbacks(fast)["capture_failed"] == 1


@pytest.mark.parametrize("progress", [True, False])
def test_progress_bar(
    progress: bool, model: Blocks, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    pg.capture(compiled(model), lambda n: rows(n, device), progress=progress)
    shown = capsys.readouterr()
    assert ("capturing" in shown.err) == progress
    assert shown.out == ""


@pytest.mark.parametrize("warm", [False, True], ids=["never called", "called before"])
def test_plain_torch_compile_is_captured_in_one_dynamic_trace(
    warm: bool, model: Blocks, device: torch.device
) -> None:
    fast = through_torch(model)
    if warm:
        fast(rows(3, device))
    report = captured(fast, device)
    assert [bucket.tokens for bucket in report.captured] == [8, 4]
    with pg.counters.expect(replays=7, captures=0, fallbacks=0):
        for count in range(2, 9):  # at T = 1 Dynamo traces anew
            x = rows(count, device)
            assert_same(fast(x), model(x))


def test_object_of_another_backend_is_refused(model: Blocks, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="no piecewise trace"):
        captured(torch.compile(model, backend="eager"), device)


def test_model_that_was_not_compiled_is_refused(model: Blocks, device: torch.device) -> None:
    with pytest.raises(CaptureError, match="no piecewise trace"):
        captured(model, device)


def test_models_of_one_class_are_captured_for_themselves(device: torch.device) -> None:
    models = [Blocks().to(device) for _ in range(2)]
    for model in models:
        options = {"compiler": "eager", "capture_sizes": SIZES, "max_tokens": 8, "capture": "explicit"}
        fast = torch.compile(model, backend="piecewise", options=options)
        pg.capture(fast, lambda n: rows(n, device), progress=False)
        with pg.counters.expect(replays=2, fallbacks=0):
            for count in (4, 7):
                fast(rows(count, device))
