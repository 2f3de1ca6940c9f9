"""One of vLLM's models: compiled, captured when vLLM captures its own, and replayed in its place.

Note [Calls]
vLLM's runner calls a module; torch sends the call to its compiled-call slot, where a `ServedModel` stands.
The profile run, warm-ups and mixed batches come with mode NONE and their live length: they are replayed
piecewise, or run compiled. Decode batches come with mode FULL, padded by vLLM, with a batch descriptor: they
are one graph each, captured in the buffers that vLLM fills at every step, and the descriptor is its key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg
from piecewise_graph import _torch
from piecewise_graph.errors import FreezeError, NotCompiledError
from piecewise_graph.integrations.captures import capture_sizes
from piecewise_graph.integrations.errors import IntegrationError
from piecewise_graph.integrations.stacks import VLLM
from piecewise_graph.integrations.vllm_attention import DecodeAttention
from piecewise_graph.integrations.vllm_decode import DecodeBatch

log = logging.getLogger("vllm.piecewise_graph")

# Arguments of vLLM's models, with the dimension that counts tokens.
_TOKEN_DIM = {"input_ids": 0, "positions": -1, "inputs_embeds": 0, "hidden_states": 0}

Inputs = Mapping[str, Any]


class ServedModel:
    """What the compiled-call slot of one of vLLM's modules holds.

    Args:
        module: the model; called as a module, it comes here.
        part: what logs and errors call it.
        sizes: token counts to capture, ascending; none = no graphs.
        inductor: options of Inductor's config.
        attention: serves attention of decode batches; None = vLLM does.

    Attributes:
        captures_full: a call in mode FULL is captured, because vLLM is capturing.
        admits: the step has requests that the step before had not (Note [Shared pages] in vllm_attention.py).
        hidden_row: an example of what the model's logits are computed of; None before the first call.
    """

    def __init__(
        self,
        module: nn.Module,
        part: str,
        sizes: Sequence[int],
        inductor: dict[str, Any],
        attention: DecodeAttention | None,
    ) -> None:
        self.part, self.sizes, self._inductor, self._attention = part, tuple(sizes), inductor, attention
        self.captures_full = self.admits = False
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
            if batch is not None and self.admits and batch.own_attention:
                return self._piecewise(inputs)
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
        ways = [("its attention is vLLM's", self._attention)] if self._attention is not None else []
        for instead, attention in (*ways, ("not captured", None)):
            try:
                with nullcontext() if attention is None else attention.instead(context):
                    graph = pg.capture_in_place(self._compiled, **inputs)
            except Exception as error:  # whatever it was: its pieces are captured
                log.warning("%s model, %s: %s: %s", self.part, context.batch_descriptor, instead, error)
                continue
            own = attention is not None and bool(attention.served)
            batch = DecodeBatch(inputs, context, graph, own_attention=own)
            self._full[context.batch_descriptor] = batch
            return batch
        return None

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
        if self._attention is not None:
            self._attention.forget()

    def report(self) -> str:
        """What became of the model, in a few lines."""
        if self._compiled is None:
            return "never called"
        own = sum(batch.own_attention for batch in self._full.values())
        told = f"{len(self._full)} decode batches, one graph each; {own} with attention of this backend"
        return f"{pg.explain(self._compiled).summary()}\n{told}"

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
