"""The plugin for vLLM, against doubles: what it sets, what it refuses, and vLLM's order of calls."""

from __future__ import annotations

import gc
import importlib
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm_doubles as doubles
from internals import replace_compile
from vllm_worker_doubles import GPUModelRunner, Worker, config, eagle, registered, started, worker

import piecewise_graph as pg
from piecewise_graph.integrations import vllm as plugin
from piecewise_graph.integrations.errors import IntegrationError

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
SEGMENTS = doubles.LAYERS + 1  # the write of KV and attention are one step
PREFILL = [(0, [3, 4, 5]), (1, [6, 7])]
DECODE = [(0, [8]), (1, [9])]
MIXED = [(0, [1]), (1, [2]), (2, [3, 4, 5])]
LONG = [(3, list(range(12)))]  # above the largest capture size
BATCHES = [PREFILL, DECODE, DECODE, MIXED, [*DECODE, (2, [7])], LONG, MIXED, [(2, [5])]]


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    registered(monkeypatch)


def reference() -> Any:
    """The double of vLLM without the plugin."""
    return started(Worker, config(compilation={"backend": "inductor", "mode": doubles.CompilationMode.NONE}))


def compare(served: Any, batches: Any = BATCHES) -> None:
    plain = reference()
    for batch in batches:
        expected = plain.model_runner.execute_model(batch)
        torch.testing.assert_close(served.model_runner.execute_model(batch), expected, rtol=1e-4, atol=1e-5)


# --- settings -----------------------------------------------------------------------------------------------


def test_the_entry_point_names_the_function() -> None:
    assert '"piecewise_graph.integrations.vllm:register"' in PYPROJECT.read_text()


def test_nothing_happens_unless_asked() -> None:
    plain = config(compilation={"backend": "inductor"})
    assert plain.compilation_config.mode is doubles.CompilationMode.VLLM_COMPILE
    assert plain.parallel_config.worker_cls == plugin.WORKER
    assert plain.compilation_config.custom_ops == []


def test_the_settings_follow_from_the_backend() -> None:
    made = config()
    compilation = made.compilation_config
    assert compilation.mode is doubles.CompilationMode.STOCK_TORCH_COMPILE
    assert compilation.cudagraph_mode is doubles.CUDAGraphMode.FULL_DECODE_ONLY
    assert compilation.custom_ops == ["none"]
    assert made.kernel_config.ir_op_priority.rms_norm == ["native"]
    assert made.parallel_config.worker_cls == plugin.OUR_WORKER


def test_what_the_user_set_stays() -> None:
    given = {"cudagraph_mode": doubles.CUDAGraphMode.NONE, "custom_ops": ["all"]}
    made = config(compilation=given).compilation_config
    assert (made.cudagraph_mode, made.custom_ops) == (doubles.CUDAGraphMode.NONE, ["all"])


def test_registering_twice_wraps_once() -> None:
    before = sys.modules["vllm.config"].VllmConfig.__post_init__
    plugin.register()
    assert sys.modules["vllm.config"].VllmConfig.__post_init__ is before


def test_a_configuration_made_of_another_one_is_accepted() -> None:
    """vLLM copies its configuration for a draft model; the copy is configured anew."""
    made = config()
    made.__post_init__()
    assert made.parallel_config.worker_cls == plugin.OUR_WORKER


# --- refusals -----------------------------------------------------------------------------------------------

CASES = {
    "pipeline parallelism": {"parallel_config": doubles.ParallelConfig(pipeline_parallel_size=2)},
    "tensor parallelism": {"parallel_config": doubles.ParallelConfig(tensor_parallel_size=2)},
    "data parallelism": {"parallel_config": doubles.ParallelConfig(data_parallel_size=2)},
    "dual batch overlap": {"parallel_config": doubles.ParallelConfig(use_ubatching=True)},
    "LoRA": {"lora_config": object()},
    "KV transfer": {"kv_transfer_config": object()},
    "KV scales": {"cache_config": types.SimpleNamespace(calculate_kv_scales=True)},
    "enforce_eager": {"model_config": doubles.ModelConfig(enforce_eager=True)},
    "pooling": {"model_config": doubles.ModelConfig(runner_type="pooling")},
    "worker class 'mine.Worker'": {"parallel_config": doubles.ParallelConfig(worker_cls="mine.Worker")},
    "compilation mode": {"compilation": {"mode": doubles.CompilationMode.DYNAMO_TRACE_ONCE}},
    "FULL_AND_PIECEWISE": {"compilation": {"cudagraph_mode": doubles.CUDAGraphMode.FULL_AND_PIECEWISE}},
}


@pytest.mark.parametrize("setting", CASES)
def test_what_is_not_served_is_refused_in_a_sentence(setting: str) -> None:
    with pytest.raises(IntegrationError, match=setting) as raised:
        config(**CASES[setting])
    assert "What to do" in str(raised.value)


def test_the_second_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_USE_V2_MODEL_RUNNER", True)
    with pytest.raises(IntegrationError, match="second model runner"):
        config()


# --- vLLM's order of calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("current", ["default", "other"])
def test_a_worker_leaves_the_default_stream_once_its_work_is_done(
    current: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    doubles_of_cuda = {
        "current_stream": lambda: current,
        "default_stream": lambda: "default",
        "synchronize": lambda: done.append("synchronize"),
        "Stream": lambda: "new",
        "set_stream": done.append,
    }
    for name, double in doubles_of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, double)
    importlib.import_module("piecewise_graph.integrations.vllm_worker").leave_default_stream()
    assert done == (["synchronize", "new"] if current == "default" else [])


@pytest.mark.gpu
def test_the_worker_is_off_the_default_stream() -> None:
    before = torch.cuda.current_stream()
    try:
        worker()
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
    finally:
        torch.cuda.set_stream(before)


def test_graphs_are_captured_at_the_capture_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    for owner, name in ((Worker, "determine_available_memory"), (GPUModelRunner, "initialize_kv_cache")):
        before = getattr(owner, name)

        def noting(*args: Any, before: Any = before) -> Any:
            result = before(*args)
            captures.append(pg.counters.snapshot()["captures"])
            return result

        monkeypatch.setattr(owner, name, noting)
    served = worker()
    assert captures == [0, 0]
    assert served.model_runner.order == ["load", "profile", "bind", "capture"]
    batches, segments = len(doubles.SIZES), 2 * doubles.LAYERS + 1
    sizes = batches + 1  # and the longest step that there is
    counts = pg.counters.snapshot()
    assert counts["tapes"] == sizes
    assert counts["captures"] == sizes * SEGMENTS + batches <= sizes * segments + batches


def test_inductor_has_the_options_that_vllm_would_give_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config as options

    found = []

    def compile_segment(original: Any, *args: Any) -> Any:
        found.append((options.combo_kernels, options.size_asserts))
        return original(*args)

    replace_compile(monkeypatch, compile_segment)
    forward = doubles.Model.forward

    def another_at_one_token(self: Any, input_ids: Any, *args: Any, **given: Any) -> Any:
        hidden = forward(self, input_ids, *args, **given)
        return hidden.sin() if input_ids.shape[0] == 1 else hidden  # so a capture compiles too

    monkeypatch.setattr(doubles.Model, "forward", another_at_one_token)
    worker(compilation={"inductor_compile_config": {"combo_kernels": True, "size_asserts": False}})
    assert found == [(True, False)] * len(found) != []
    assert (options.combo_kernels, options.size_asserts) != (True, False)


def test_batches_are_answered_as_without_the_plugin() -> None:
    served = worker()
    before = pg.counters.snapshot()
    compare(served)
    after = pg.counters.snapshot()
    changed = {name: after[name] - before.get(name, 0) for name in after}
    full = sum(all(len(tokens) == 1 for _, tokens in batch) for batch in BATCHES)
    assert changed["full_replays"] == full
    assert changed["replays"] == len(BATCHES)
    assert changed["fallbacks"] == 0
    assert changed["captures"] == 0


def test_graphs_go_when_the_kv_cache_is_bound_anew() -> None:
    served = worker()
    served.initialize_from_config(doubles.REQUESTS * doubles.LENGTH)
    with pg.counters.expect(replays=0, **{"fallbacks:not_captured": 2}):
        compare(served, [PREFILL, DECODE])
    served.model_runner.capture_model()
    with pg.counters.expect(full_replays=1, fallbacks=0):
        served.model_runner.execute_model(DECODE)


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]]])
def test_graphs_go_with_sleep_and_come_back_when_all_is_awake(tags: Any) -> None:
    served = worker()
    served.sleep(1)
    assert "0 replays of 0 graphs" in served._graphs.models[0].report()
    with pg.counters.expect(captures=0):
        for tag in tags[:-1]:
            served.wake_up(tag)
    served.wake_up(tags[-1])
    assert served.model_runner.order[-2:] == ["wake", "capture"]
    with pg.counters.expect(full_replays=1, replays=2, fallbacks=0):
        compare(served, [PREFILL, DECODE])


@pytest.mark.parametrize("calls", [["reload_weights"], ["start_weight_update", "finish_weight_update"]])
def test_weights_that_are_loaded_again_are_read(calls: list[str]) -> None:
    served = worker()
    for call in calls:
        getattr(served, call)()
    assert served.model_runner.order[-1] == "capture"
    with pg.counters.expect(full_replays=1, replays=2, fallbacks=0):
        compare(served, [PREFILL, DECODE])


def test_a_worker_that_ends_lets_its_model_and_graphs_go() -> None:
    served = worker()
    gone = weakref.ref(served.model_runner.model)
    served.vllm_config.compilation_config.static_forward_context.clear()
    served.shutdown()
    gc.collect()
    assert gone() is None


def test_a_worker_that_never_had_a_device_ends_too() -> None:
    made = config()
    ours = importlib.import_module("piecewise_graph.integrations.vllm_worker").PiecewiseWorker(made)
    ours.model_runner = types.SimpleNamespace()
    ours.shutdown()


def test_metadata_that_lies_elsewhere_is_not_read_by_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    served = worker()
    served.model_runner.lengths = served.model_runner.lengths.clone()
    with pg.counters.expect(replays=2, full_replays=0, fallbacks=0):
        compare(served, [PREFILL, DECODE])
    assert "metadata lie elsewhere" in caplog.text


def test_the_draft_model_is_replayed_too() -> None:
    served = worker(speculative_config=eagle())
    target, draft = served._graphs.models
    runner = served.model_runner
    with torch.inference_mode(), pg.counters.expect(replays=1, fallbacks=0):
        runner._draft(3)
    with torch.inference_mode(), doubles.set_forward_context(None, runner.vllm_config):
        inputs = {"input_ids": runner.input_ids[:3], "positions": runner.positions[:3]}
        given = runner.drafter.model(hidden_states=runner.drafter.hidden[:3], inputs_embeds=None, **inputs)
        expected = runner.drafter.model.draft(hidden_states=runner.drafter.hidden[:3], **inputs)
    torch.testing.assert_close(given, expected)
    assert draft.part == "draft" and target.part == "target"


def test_without_graphs_the_model_runs_compiled() -> None:
    graphs = {"cudagraph_mode": doubles.CUDAGraphMode.NONE, "cudagraph_capture_sizes": []}
    served = worker(compilation=graphs)
    with pg.counters.expect(replays=0, captures=0, **{"fallbacks:cuda_graphs_off": 2}):
        compare(served, [PREFILL, DECODE])


def test_memory_is_planned_before_the_kv_cache_is_sized() -> None:
    assert worker().cudagraph_memory_estimate > 0


def test_what_became_of_the_model_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.piecewise_graph")
    worker()
    assert "target model:" in caplog.text and "in the graph pool" in caplog.text


def test_a_call_that_does_not_fit_the_frozen_one_is_answered_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = worker().model_runner
    with torch.no_grad(), doubles.set_forward_context(None, runner.vllm_config):
        plain = {"input_ids": runner.input_ids[:3], "positions": runner.positions[:3]}
        expected = runner.model.forward(**plain)
        for _ in range(2):
            given = runner.model(**plain, intermediate_tensors="another", inputs_embeds=None)
            torch.testing.assert_close(given, expected)
    assert caplog.text.count("goes through Dynamo's guards") == 1
