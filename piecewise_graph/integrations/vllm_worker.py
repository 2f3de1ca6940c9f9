"""vLLM's worker for GPUs, with graphs of this backend; vLLM imports it by name, in the worker's process.

Note [Off the default stream]
With several GPUs vLLM leaves CUDA's default stream when it makes its communicators; with one GPU it does not.
This worker always does: there, each replay would take a detour (see the note of that name in graph_pool.py).
What vLLM runs besides (copies of outputs, drafts) waits for the current stream, whichever it is.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm import WORKER
from piecewise_graph.integrations.vllm_graphs import RunnerGraphs

try:
    from vllm.v1.worker.gpu_worker import Worker
except ImportError as error:
    raise VLLM.missing(WORKER) from error

_METHODS = (
    "init_device",
    "load_model",
    "initialize_from_config",
    "execute_model",
    "sleep",
    "wake_up",
    "reload_weights",
    "start_weight_update",
    "finish_weight_update",
    "shutdown",
)
_OUTPUT = "vllm.v1.core.sched.output"
_FIELDS = {
    ("vllm.forward_context", "ForwardContext"): (
        "attn_metadata", "batch_descriptor", "cudagraph_runtime_mode", "no_compile_layers", "slot_mapping",
    ),
    (_OUTPUT, "SchedulerOutput"): ("scheduled_new_reqs", "scheduled_cached_reqs"),
    (_OUTPUT, "CachedRequestData"): ("resumed_req_ids",),
}  # fmt: skip
_ASLEEP = frozenset({"weights", "kv_cache"})


def check_hooks() -> None:
    """Refuse a vLLM that does not have what this class overrides or reads.

    Raises:
        IntegrationError: with the name of the first thing that is missing.
    """
    for name in _METHODS:
        VLLM.required(Worker, name, WORKER)
    for (module, owner), names in _FIELDS.items():
        known = {field.name for field in fields(VLLM.imported(module, owner))}
        for name in names:
            if name not in known:
                raise VLLM.missing(f"{owner}.{name}")


def leave_default_stream() -> None:
    """Of the current device, for this thread and for good; see Note [Off the default stream]."""
    if torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.synchronize()  # buffers that vLLM has made are filled there
        torch.cuda.set_stream(torch.cuda.Stream())


class PiecewiseWorker(Worker):
    """Captures and replays; graphs go whenever the KV cache, the weights or their memory go."""

    _graphs: RunnerGraphs
    _asleep: frozenset[str] = frozenset()

    def init_device(self) -> None:
        check_hooks()
        super().init_device()
        if torch.cuda.is_available():
            leave_default_stream()
        self._graphs = RunnerGraphs(self.model_runner)

    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        self._graphs.serve()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._graphs.drop()  # full graphs hold the KV cache that was there
        super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        self._graphs.begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **options)

    def sleep(self, level: int = 1) -> None:
        self._graphs.drop()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # vLLM copies on the default stream, and unmaps what was copied
        super().sleep(level)
        self._asleep = _ASLEEP

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        self._asleep = self._asleep.difference(_ASLEEP if tags is None else tags)
        self._capture_again()

    def reload_weights(self, *args: Any, **options: Any) -> None:
        self._graphs.drop()
        super().reload_weights(*args, **options)
        self._capture_again()

    def start_weight_update(self, *args: Any, **options: Any) -> None:
        self._graphs.drop()
        super().start_weight_update(*args, **options)

    def finish_weight_update(self, *args: Any, **options: Any) -> None:
        super().finish_weight_update(*args, **options)
        self._capture_again()

    def shutdown(self) -> None:
        if hasattr(self, "_graphs"):  # not after a start that failed early
            self._graphs.drop()
            self._graphs.models.clear()  # they hold the model
            self._graphs.logits.clear()
        super().shutdown()

    def _capture_again(self) -> None:
        if self._graphs.captured and not self._asleep:
            self.model_runner.capture_model()
