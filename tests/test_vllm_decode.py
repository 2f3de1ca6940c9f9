"""Decode batches and logits under vLLM: what their graphs read, and when they are used."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import vllm_doubles as doubles
from vllm_worker_doubles import GPUModelRunner, eagle, registered, worker

import piecewise_graph as pg
from piecewise_graph.frontend import one_token
from piecewise_graph.integrations.vllm_decode import DecodeBatch

BATCH = [(0, [8]), (1, [9])]
METADATA = ("seq_lens", "block_table", "slot_mapping")  # beside query_start_loc


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)


@pytest.mark.parametrize("order", ["aabb", "abab", "abba"])
@pytest.mark.parametrize("moved", ["ids", "a", "b", "slots", *METADATA, None])
def test_a_decode_batch_is_served_where_all_that_it_reads_lies_where_it_did(order: str, moved: Any) -> None:
    def call(moved: Any) -> tuple[dict[str, Any], Any]:
        starts = {group: buffers[group].clone() if moved == group else buffers[group] for group in "ab"}
        fields = {name: buffers[name].clone() if moved == name else buffers[name] for name in METADATA}
        groups = {g: types.SimpleNamespace(**fields | {"query_start_loc": starts[g]}) for g in "ab"}
        metadata = {str(layer): groups[group] for layer, group in enumerate(order)}
        ids, slots = (buffers[n].clone() if moved == n else buffers[n][:] for n in ("ids", "slots"))
        context = types.SimpleNamespace(attn_metadata=metadata, slot_mapping=dict.fromkeys(metadata, slots))
        return {"input_ids": ids, "inputs_embeds": None}, context

    buffers = {name: torch.zeros(2) for name in ("ids", "slots", "a", "b", *METADATA)}
    graph = types.SimpleNamespace(dropped=False)
    batch = DecodeBatch(*call(None), graph)
    assert batch.fits(*call(moved)) == (moved is None)
    assert not batch.fits(call(None)[0] | {"inputs_embeds": torch.zeros(2)}, call(None)[1])
    graph.dropped = True
    assert not batch.fits(*call(None))


@pytest.mark.parametrize("decorated", [False, True])
def test_what_vllm_traces_once_is_not_traced_at_one_token(
    decorated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decorated:
        bases = (doubles.Attention, doubles.TorchCompileWithNoGuardsWrapper)
        monkeypatch.setattr(doubles, "Attention", type("Attention", bases, {}))
    looks: list[Any] = []
    look = one_token._Noting.__call__
    monkeypatch.setattr(one_token._Noting, "__call__", lambda *a: looks.append(a) or look(*a))
    worker().model_runner.execute_model([(0, [8])])
    assert len(looks) == (not decorated)


def test_logits_of_few_rows_are_graphs() -> None:
    runner = worker().model_runner
    hidden = torch.randn(max(doubles.SIZES) + 1, doubles.WIDTH)
    for rows in (1, 3, len(hidden)):
        with torch.inference_mode(), torch.profiler.profile() as trace:
            given = runner.model.compute_logits(hidden[:rows])
        torch.testing.assert_close(given, hidden[:rows] @ runner.model.embed.weight.t())
        found = [event.name for event in trace.events() if event.name.startswith("logits of")]
        assert found == [f"logits of {rows} rows"] * (rows <= max(doubles.SIZES))
    with torch.no_grad():  # vLLM's apply_model is not in inference mode
        torch.testing.assert_close(
            runner.model.compute_logits(hidden[:2]), hidden[:2] @ runner.model.embed.weight.t()
        )
    with pytest.raises(RuntimeError, match="dtype"):  # of the model itself: nothing is converted
        runner.model.compute_logits(hidden[:2].double())


def test_logits_of_a_draft_model_are_graphs_from_the_start() -> None:
    drafter = worker(speculative_config=eagle()).model_runner.drafter
    with torch.inference_mode(), torch.profiler.profile() as trace:
        drafter.model.compute_logits(torch.randn(3, doubles.WIDTH))
    assert any(event.name == "logits of 3 rows" for event in trace.events())


def test_a_model_whose_logits_take_more_arguments_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = doubles.Model.compute_logits
    monkeypatch.setattr(
        doubles.Model, "compute_logits", lambda self, hidden, spec_step_idx: compute(self, hidden)
    )
    monkeypatch.setattr(GPUModelRunner, "profile_run", lambda runner: runner._dummy_run(doubles.MOST_TOKENS))
    model = worker().model_runner.model
    hidden = torch.randn(2, doubles.WIDTH)
    torch.testing.assert_close(model.compute_logits(hidden, spec_step_idx=1), hidden @ model.embed.weight.t())


def test_batches_are_answered_after_a_reset_of_all_graphs() -> None:
    runner = worker().model_runner
    runner.execute_model(BATCH)
    pg.reset()
    with pg.counters.expect(full_replays=0):
        hidden, _ = runner.execute_model(BATCH)
    assert len(hidden) == len(BATCH)


def test_a_batch_that_cannot_be_captured_is_piecewise(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("no such kernel")

    monkeypatch.setattr(pg, "capture_in_place", fails)
    runner = worker().model_runner
    assert "not captured: no such kernel" in caplog.text
    with pg.counters.expect(full_replays=0, replays=1, fallbacks=0):
        runner.execute_model(BATCH)


def test_logits_that_cannot_be_captured_are_computed_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = doubles.Model.compute_logits, []

    def only_once(self: Any, hidden: Any) -> Any:
        calls.append(len(hidden))
        if len(calls) == 3:  # behind the profile run, and the look at one row
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute(self, hidden)

    monkeypatch.setattr(doubles.Model, "compute_logits", only_once)
    hidden, logits = worker().model_runner.execute_model(BATCH)
    assert "logits are computed without graphs: operation not permitted" in caplog.text
    assert len(hidden) == len(logits) == calls[-1] == len(BATCH)
