"""A vLLM that lacks what the plugin is attached to is refused, with the name of what is missing."""

from __future__ import annotations

import importlib
import sys
import types

import pytest
import vllm_doubles as doubles
from vllm_worker_doubles import GPUModelRunner, Worker, config, worker

from piecewise_graph.integrations import vllm as plugin
from piecewise_graph.integrations.errors import IntegrationError


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch)
    plugin.register()


def test_a_vllm_without_the_first_hook_starts_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys.modules["vllm.config"], "VllmConfig", type("VllmConfig", (), {}))
    plugin.register()
    assert "vLLM 0.23.0 has no vllm.config.VllmConfig.__post_init__" in caplog.text


@pytest.mark.parametrize("field", ["kv_transfer_config", "kernel_config", "offload_config"])
def test_a_setting_that_moved_is_named(field: str) -> None:
    given = vars(config(compilation={"backend": "inductor"}))
    del given[field]
    given["compilation_config"] = doubles.CompilationConfig(backend="piecewise")
    with pytest.raises(IntegrationError, match=f"VllmConfig.{field}"):
        sys.modules["vllm.config"].VllmConfig.__post_init__(types.SimpleNamespace(**given))


@pytest.mark.parametrize("name", ["init_device", "wake_up", "finish_weight_update"])
def test_a_method_of_the_worker_that_moved_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = config()
    monkeypatch.delattr(Worker, name)
    ours = importlib.import_module("piecewise_graph.integrations.vllm_worker").PiecewiseWorker
    with pytest.raises(IntegrationError, match=f"Worker.{name}, which"):
        ours(made).init_device()


@pytest.mark.parametrize("name", ["profile_cudagraph_memory", "capture_model"])
def test_a_method_of_the_runner_that_moved_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GPUModelRunner, name)
    with pytest.raises(IntegrationError, match=f"GPUModelRunner.{name}, which"):
        worker()


@pytest.mark.parametrize(
    "gone",
    [
        "vllm.forward_context:set_forward_context",
        "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper",
        "vllm.v1.worker.gpu_worker:Worker",
    ],
)
def test_a_module_without_its_attribute_is_named(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doubles.install(monkeypatch, without=[gone])
    plugin.register()
    with pytest.raises(IntegrationError, match=gone.replace(":", ".")):
        worker()
