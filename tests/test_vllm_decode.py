"""Decode batches and logits under vLLM: what their graphs read, and when they are used."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import vllm_doubles as doubles
from vllm_worker_doubles import worker

from piecewise_graph.frontend.compile import CompiledModel
from piecewise_graph.integrations import vllm as plugin
from piecewise_graph.integrations.vllm_decode import DecodeBatch

BATCH = [(0, [8]), (1, [9])]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch)
    monkeypatch.setenv("PIECEWISE_GRAPH_COMPILER", "eager")
    plugin.register()


@pytest.mark.parametrize("order", ["aabb", "abab", "abba"])
@pytest.mark.parametrize("moved", ["ids", "a", "b", "slots", None])
def test_a_decode_batch_is_served_where_all_that_it_reads_lies_where_it_did(order: str, moved: Any) -> None:
    def call(moved: Any) -> tuple[dict[str, Any], Any]:
        starts = {group: buffers[group].clone() if moved == group else buffers[group] for group in "ab"}
        groups = {group: types.SimpleNamespace(query_start_loc=starts[group]) for group in "ab"}
        metadata = {str(layer): groups[group] for layer, group in enumerate(order)}
        ids, slots = (buffers[n].clone() if moved == n else buffers[n][:] for n in ("ids", "slots"))
        context = types.SimpleNamespace(attn_metadata=metadata, slot_mapping=dict.fromkeys(metadata, slots))
        return {"input_ids": ids, "inputs_embeds": None}, context

    buffers = {name: torch.zeros(2) for name in ("ids", "slots", "a", "b")}
    batch = DecodeBatch(*call(None), replay=lambda: None)
    assert batch.fits(*call(moved)) == (moved is None)
    assert not batch.fits(call(None)[0] | {"inputs_embeds": torch.zeros(2)}, call(None)[1])


@pytest.mark.parametrize("decorated", [False, True])
def test_what_vllm_traces_once_is_not_traced_at_one_token(
    decorated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if decorated:
        bases = (doubles.Attention, doubles.TorchCompileWithNoGuardsWrapper)
        monkeypatch.setattr(doubles, "Attention", type("Attention", bases, {}))
    looks: list[Any] = []
    look = CompiledModel._traced_at_one_token
    monkeypatch.setattr(CompiledModel, "_traced_at_one_token", lambda *a: looks.append(a) or look(*a))
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
    other = hidden[:2].double()
    with pytest.raises(RuntimeError, match="dtype"):  # of the model itself: nothing is converted
        runner.model.compute_logits(other)


def test_logits_that_cannot_be_captured_are_computed_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, calls = doubles.Model.compute_logits, []

    def only_once(self: Any, hidden: Any) -> Any:
        calls.append(len(hidden))
        if len(calls) == 2:  # behind the profile run
            raise RuntimeError("operation not permitted when stream is capturing")
        return compute(self, hidden)

    monkeypatch.setattr(doubles.Model, "compute_logits", only_once)
    hidden, logits = worker().model_runner.execute_model(BATCH)
    assert "logits are computed without graphs: operation not permitted" in caplog.text
    assert len(hidden) == len(logits) == calls[-1] == len(BATCH)
