"""pg.capture_in_place: one call as one graph that reads its inputs where they lie."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.context import get_forward_context
from piecewise_graph.errors import CaptureError, FreezeError
from piecewise_graph.frontend.frozen_trace import observe
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.recorder.mode import FULL
from piecewise_graph.runtime.captured_context import CapturedContext
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.telemetry import counters

_COUNTED = (("replays", 1), ("full_replays", 1))


def capture_in_place(compiled: Any, *args: Any, **kwargs: Any) -> InPlaceGraph:
    """Capture this very call as one graph, for a loop that keeps its inputs in buffers of its own.

    Nothing is copied or padded at a replay: write the inputs in place, then call what this returns, under
    the forward context of the capture. The graph lies in the pool of the model's other graphs and goes with
    them (`pg.reset`).

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned.
        args, kwargs: a legal call. The model runs on them once to warm up, and before that where it was
            never called, effects of its splitting ops (a KV cache) included. So call this under
            torch.no_grad(), with the metadata that ops read.

    Raises:
        FreezeError: the call is not served by one graph of this backend.
        CaptureError: an op of the model cannot be captured.
        ContextError: the forward context holds what could change unseen.
        GraphPoolError: the caller is capturing a graph already.
        torch.OutOfMemoryError: the graph does not fit.
    """
    state = state_of(compiled)
    if state is None:
        compiled(*args, **kwargs)
    elif not state.traces:
        with state.channel.calls_for(Purpose.WARM_UP):
            compiled(*args, **kwargs)
    return InPlaceGraph(compiled, args, kwargs)


class InPlaceGraph:
    """What `pg.capture_in_place` returns: call it to replay.

    Inputs, weights and the forward context's tensors are read where they were at the capture, and kept
    alive. After replacing a weight, capture anew.

    Attributes:
        outputs: what the call returned, overwritten by each replay of the pool's graphs.
    """

    def __init__(self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._compiled, self._args, self._kwargs = compiled, args, kwargs
        self.outputs: Any = None
        self._context = CapturedContext.of(get_forward_context())
        state = state_of(compiled)
        if state is None or not state.traces:
            raise FreezeError.no_trace(repr(compiled)[:80])
        trace, self._channel = state.traces[-1], state.channel
        if not isinstance(trace, Runtime):
            raise FreezeError.not_split(str(trace.blocked))
        name, device = "call captured in place", trace.program.device
        self._graph = trace.pool.capture_call(self._run, device=device, name=name)
        counters.add("captures")

    def __call__(self) -> Any:
        """Replay; the outputs.

        Raises:
            ContextError: the forward context differs from that of the capture.
            GraphPoolError: the graph was dropped, or another graph of the pool is in use.
        """
        context = get_forward_context()
        if context.fields or self._context.values:
            self._context.check(context, self._tokens, self._tokens, thorough=False)
        self._graph()
        counters.add_each(_COUNTED)
        return self.outputs

    def _run(self) -> None:
        """The call without graphs, as often as the pool asks for it."""
        with self._channel.calls_for(Purpose.WARM_UP):
            seen = observe(self._compiled, self._args, self._kwargs)
        if reason := _unsupported(seen.runtime.program):
            raise CaptureError.nothing_captured([reason])
        leaves, structure = _torch.flatten(seen.result)
        # The memory of outputs is shared with later captures, as that of the pool's other graphs is.
        aliases = [_torch.weak_alias(leaf) if _is_on_gpu(leaf) else leaf for leaf in leaves]
        self.outputs = _torch.unflatten(aliases, structure)
        self._kept = [each.detach() for each in seen.args if isinstance(each, Tensor)]
        self._tokens = seen.runtime.count(seen.args)


def _unsupported(program: Program) -> str | None:
    """Why no call can be one graph. torch's own attention is no reason: no row here is padding."""
    if program.split.is_cut_at_attention and not program.split.has_other_devices:
        return None
    return FULL.unsupported(program)


def _is_on_gpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cuda
