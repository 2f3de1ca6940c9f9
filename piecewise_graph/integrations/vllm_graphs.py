"""The graphs of one of vLLM's model runners: of its models, and of their logits.

Note [When graphs are captured]
Only in vLLM's `capture_model`, so never while memory is profiled. Piecewise graphs first: what they hold has
nothing to do with KV caches, because attention runs between them. So they are captured without attention
metadata, as vLLM captures its own: attention then fills its output with zeros, and no KV is written. Then
vLLM calls the model once per decode batch in mode FULL, with metadata in the buffers that it will use again.
What the kernels read from there (addresses, the number of requests) is part of the graph, so a full graph is
never captured while serving. A later batch whose buffers lie elsewhere is replayed piecewise. Graphs of
logits come last.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm import ATTENTION
from piecewise_graph.integrations.vllm_attention import DecodeAttention
from piecewise_graph.integrations.vllm_logits import MOST_ROWS, ServedLogits
from piecewise_graph.integrations.vllm_model import ServedModel
from piecewise_graph.integrations.vllm_settings import setting
from piecewise_graph.integrations.vllm_sizes import graph_sizes, prompt_sizes

log = logging.getLogger("vllm.piecewise_graph")

# Ops that write the KV cache or its scales, and stand in no list of vLLM's.
_KV_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
_HOST_BOUND = ("vllm::maybe_calc_kv_scales",)


def register_splitting_ops(compilation: Any) -> None:
    """Cut at vLLM's attention ops and at those that write KV.

    They bear padded rows: vLLM itself calls them between its graphs on padded tensors, with metadata of the
    live batch, and captures all but the last ones in full graphs.

    Raises:
        IntegrationError: vLLM has no list of them.
    """
    for name in (*VLLM.required(compilation, "_attention_ops", "CompilationConfig"), *_KV_UPDATES):
        pg.register_splitting_op(name, capturable=True)
    for name in _HOST_BOUND:
        pg.register_splitting_op(name)


class RunnerGraphs:
    """The graphs of one model runner: those of its model, and of its draft model.

    Args:
        runner: vLLM's; two of its methods are exchanged, on this object alone, and `compute_logits` of its
            models.

    Raises:
        IntegrationError: it does not have them.
    """

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.models: list[ServedModel] = []
        self.logits: list[ServedLogits] = []
        self._inductor: dict[str, Any] = {}
        self.captured = False
        VLLM.required(runner, "profile_cudagraph_memory", "GPUModelRunner")
        self._capture_model = VLLM.required(runner, "capture_model", "GPUModelRunner")
        self._set_context = VLLM.imported("vllm.forward_context", "set_forward_context")
        runner.profile_cudagraph_memory = self.planned_bytes
        runner.capture_model = self.capture

    def serve(self) -> None:
        """Take the calls of the models that the runner has loaded.

        Raises:
            IntegrationError: vLLM lacks what that needs.
        """
        runner = self.runner
        compilation = VLLM.required(runner, "compilation_config", "GPUModelRunner")
        register_splitting_ops(compilation)
        given = VLLM.required(compilation, "cudagraph_capture_sizes", "CompilationConfig") or []
        sizes = graph_sizes(given, VLLM.required(runner, "uniform_decode_query_len", "GPUModelRunner"))
        most = VLLM.required(runner, "max_num_tokens", "GPUModelRunner")
        most_rows = min(max(sizes, default=0), MOST_ROWS)  # of logits: prompts have one row each
        sizes += prompt_sizes(sizes, VLLM.required(runner, "vllm_config", "GPUModelRunner"), most)
        self._inductor = VLLM.required(compilation, "inductor_compile_config", "CompilationConfig")
        self.models, self.logits = [], []
        self._take(VLLM.required(runner, "model", "GPUModelRunner"), "target", sizes, most_rows)
        speculative = getattr(runner, "speculative_config", None)
        if speculative is None:
            return
        if VLLM.required(speculative, "use_eagle", "SpeculativeConfig")():
            self._take(VLLM.required(runner, "drafter.model", "GPUModelRunner"), "draft", sizes, most_rows)
        else:
            log.warning("drafts are made without graphs: a drafter of this kind is not compiled")

    def _take(self, module: nn.Module, part: str, sizes: Sequence[int], most_rows: int) -> None:
        """The calls of a module, which was not called yet, and of its logits.

        The first arrive where vLLM has put its torch.compile of the module.
        """
        VLLM.required(module, "_compiled_call_impl", "torch.nn.Module")
        attention = DecodeAttention(sizes) if setting(self.runner.vllm_config, ATTENTION) else None
        served = module._compiled_call_impl = ServedModel(module, part, sizes, self._inductor, attention)
        self.models.append(served)
        if sizes and hasattr(module, "compute_logits"):
            self.logits.append(ServedLogits(module, lambda: served.hidden_row, most_rows))

    def planned_bytes(self) -> int:
        """In place of `profile_cudagraph_memory`: no KV cache and no capture is needed to tell.

        Full graphs share the memory of piecewise ones; what the driver needs per graph is not counted.
        """
        planned = sum(model.planned_bytes() for model in self.models)
        planned += sum(each.planned_bytes() for each in self.logits)
        log.info("planned memory of graphs: %.1f MiB", planned / 2**20)
        return planned

    def capture(self) -> int:
        """In place of `capture_model`: piecewise graphs, then what vLLM's own round asks for, then logits."""
        with _torch.inductor_settings(self._inductor):  # a size may be traced and compiled here alone
            with self._without_metadata():
                taken = sum(model.capture_pieces() for model in self.models)
            with self._capturing_full():
                taken += self._capture_model()
            with self._without_metadata():
                for model in self.models:
                    model.freeze()
                self._capture_logits()
        self.captured = True
        for model in self.models:
            for line in model.report().splitlines():
                log.info("%s model: %s", model.part, line)
        return taken

    def _capture_logits(self) -> None:
        for each in self.logits:
            try:
                each.capture()
            except Exception as error:  # whatever it was: vLLM computes them
                each.forget()
                log.warning("logits are computed without graphs: %s", error)

    def begin_step(self, scheduled: Any) -> None:
        """Before the runner executes what vLLM has scheduled."""
        resumed = scheduled.scheduled_cached_reqs.resumed_req_ids
        for model in self.models:
            model.admits = bool(scheduled.scheduled_new_reqs or resumed)

    def drop(self) -> None:
        """Drop all graphs: what they read is about to go, or to be replaced."""
        pg.reset()
        for model in self.models:
            model.forget()
        for each in self.logits:
            each.forget()

    @contextmanager
    def _without_metadata(self) -> Iterator[None]:
        with torch.inference_mode(), self._set_context(None, self.runner.vllm_config):
            yield

    @contextmanager
    def _capturing_full(self) -> Iterator[None]:
        for model in self.models:
            model.captures_full = True
        try:
            yield
        finally:
            for model in self.models:
                model.captures_full = False
