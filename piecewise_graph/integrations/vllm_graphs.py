"""The graphs of vLLM's models: compiled, captured when vLLM captures its own, and replayed in their place.

Note [Calls]
vLLM's runner calls a module; torch sends the call to its compiled-call slot, where a `ServedModel` stands.
The profile run, warm-ups and mixed batches come with mode NONE and their live length: they are replayed
piecewise, or run compiled. Decode batches come with mode FULL, padded by vLLM, with a batch descriptor: they
are one graph each, captured in the buffers that vLLM fills at every step, and the descriptor is its key.

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.errors import FreezeError, NotCompiledError
from piecewise_graph.integrations.captures import capture_sizes
from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm_decode import DecodeBatch
from piecewise_graph.integrations.vllm_logits import MOST_ROWS, ServedLogits
from piecewise_graph.integrations.vllm_sizes import graph_sizes, prompt_sizes

log = logging.getLogger("vllm.piecewise_graph")

# Arguments of vLLM's models, with the dimension that counts tokens.
_TOKEN_DIM = {"input_ids": 0, "positions": -1, "inputs_embeds": 0, "hidden_states": 0}
# Ops that write the KV cache or its scales, and stand in no list of vLLM's.
_KV_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
_HOST_BOUND = ("vllm::maybe_calc_kv_scales",)

Inputs = Mapping[str, Any]


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


class ServedModel:
    """What the compiled-call slot of one of vLLM's modules holds.

    Args:
        module: the model; called as a module, it comes here.
        part: what logs and errors call it.
        sizes: token counts to capture, ascending; none = no graphs.
        inductor: options of Inductor's config.

    Attributes:
        captures_full: a call in mode FULL is captured, because vLLM is capturing.
        hidden_row: an example of what the model's logits are computed of; None before the first call.
    """

    def __init__(self, module: nn.Module, part: str, sizes: Sequence[int], inductor: dict[str, Any]) -> None:
        self.part, self.sizes, self._inductor = part, tuple(sizes), inductor
        self.captures_full = False
        self.hidden_row: Tensor | None = None
        self._forward = module.forward  # `module(...)` would come back here
        self._context: Callable[[], Any] = VLLM.imported("vllm.forward_context", "get_forward_context")
        self._full_mode = VLLM.imported("vllm.config.compilation", "CUDAGraphMode.FULL")
        # What vLLM compiles itself, it traces once, for every number of tokens.
        once = VLLM.imported("vllm.compilation.wrapper", "TorchCompileWithNoGuardsWrapper")
        self._one_token = "trusted" if any(isinstance(m, once) for m in module.modules()) else "traced"
        self._compiled: Any = None
        self._example: dict[str, Any] = {}
        self._frozen: Callable[..., Any] | None = None
        self._full: dict[Hashable, DecodeBatch] = {}
        self._told: set[Hashable] = set()

    def __call__(self, **inputs: Any) -> Any:
        context = self._context()
        if context.cudagraph_runtime_mode is self._full_mode:
            batch = self._full.get(context.batch_descriptor)
            if batch is not None and batch.fits(inputs, context):
                return batch.graph()
            if self.captures_full and (batch := self._capture_full(inputs, context)) is not None:
                return batch.graph()
            self._tell_piecewise(context.batch_descriptor)
        return self._piecewise(inputs)

    def _piecewise(self, inputs: Inputs) -> Any:
        compiled = self._compiled if self._compiled is not None else self._compile(inputs)
        if self._frozen is not None:
            try:
                return self._frozen(**inputs)
            except FreezeError as error:  # raised before anything ran
                self._tell("frozen", "a call of this kind goes through Dynamo's guards: %s", error)
        with _torch.inductor_settings(self._inductor):
            result = compiled(**inputs)
        if self.hidden_row is None:
            self.hidden_row = _hidden_row(result)
        return result

    def _compile(self, inputs: Inputs) -> Any:
        """At the first call, which is vLLM's profile run: it shows which arguments there are."""
        options: dict[str, Any] = {"cuda_graphs": "off"}
        if self.sizes:
            options = {"capture_sizes": self.sizes, "max_tokens": max(self.sizes), "capture": "explicit"}
        dims = {name: dim for name, dim in _TOKEN_DIM.items() if isinstance(inputs.get(name), Tensor)}
        # As in vLLM's own graphs, outputs are valid until the next forward: it is done with them by then.
        options |= {"token_dim": dims, "outputs": "static", "one_token": self._one_token}
        self._compiled = pg.compile(self._forward, **options)
        self._example = dict(inputs)
        return self._compiled

    def _capture_full(self, inputs: Inputs, context: Any) -> DecodeBatch | None:
        """Capture this very call, of vLLM's capture step; None where that is impossible."""
        try:
            graph = pg.capture_in_place(self._compiled, **inputs)
        except Exception as error:  # whatever it was: its pieces are captured
            log.warning("%s model, %s: not captured: %s", self.part, context.batch_descriptor, error)
            return None
        batch = self._full[context.batch_descriptor] = DecodeBatch(inputs, context, graph)
        return batch

    def capture_pieces(self) -> int:
        """Capture the piecewise graphs of all sizes, largest first; the bytes that they took."""
        sizes = [size for size in self.sizes if size <= self._largest()]
        if not sizes:
            return 0
        report = capture_sizes(self._compiled, self.part, sizes, self._inputs, log)
        return report.pool_bytes + report.buffer_bytes if report is not None else 0

    def planned_bytes(self) -> int:
        """What piecewise graphs of all sizes will take.

        Raises:
            IntegrationError: the model was never called.
        """
        if not self.sizes:
            return 0
        if self._compiled is None:
            raise IntegrationError.never_called(self.part)
        try:
            plan = pg.plan(self._compiled)
        except NotCompiledError as error:
            raise IntegrationError.never_called(self.part) from error
        return plan.pool_bytes + plan.buffer_bytes

    def freeze(self) -> None:
        """From now on, call without Dynamo and its guards, where that is possible."""
        if self._largest():
            try:
                self._frozen = pg.freeze(self._compiled, **self._inputs(self._largest()))
            except FreezeError as error:
                log.warning("%s model: each call pays for Dynamo's guards: %s", self.part, error)

    def forget(self) -> None:
        """Its graphs were dropped; calls go through Dynamo until the next capture."""
        self._frozen = None
        self._full.clear()

    def report(self) -> str:
        """What became of the model, in a few lines."""
        if self._compiled is None:
            return "never called"
        return f"{pg.explain(self._compiled).summary()}\n{len(self._full)} decode batches, one graph each"

    def _inputs(self, size: int) -> dict[str, Any]:
        """Inputs of `size` tokens, in the buffers that vLLM uses."""
        cut = {name: self._example[name] for name in _TOKEN_DIM if self._example.get(name) is not None}
        narrow = {name: value.narrow(_TOKEN_DIM[name], 0, size) for name, value in cut.items()}
        return self._example | narrow

    def _largest(self) -> int:
        """The largest size that vLLM's buffers hold; 0 = none, or the model was never called."""
        most = self._count(self._example) if self._example else 0
        return max((size for size in self.sizes if size <= most), default=0)

    def _count(self, inputs: Inputs) -> int:
        leader = next(name for name in _TOKEN_DIM if inputs.get(name) is not None)
        return int(inputs[leader].shape[_TOKEN_DIM[leader]])

    def _tell(self, topic: Hashable, what: str, *values: Any) -> None:
        """Log it once per topic: serving must not fill the log."""
        if topic not in self._told:
            self._told.add(topic)
            log.warning(f"%s model: {what}", self.part, *values)

    def _tell_piecewise(self, batch: Hashable) -> None:
        self._tell(batch, "%s is piecewise: no graph, or its inputs or metadata lie elsewhere now", batch)


def _hidden_row(result: Any) -> Tensor | None:
    """Hidden states are the first of what a model returns."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    return first[:1].clone() if isinstance(first, Tensor) else None


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
        served = module._compiled_call_impl = ServedModel(module, part, sizes, self._inductor)
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
