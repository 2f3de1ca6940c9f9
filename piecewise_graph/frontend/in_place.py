"""pg.capture_in_place: one call as one graph that reads its inputs where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.context import ForwardContext, get_forward_context, in_place_of_active
from piecewise_graph.errors import CaptureError
from piecewise_graph.frontend.frozen_trace import Observed, observe
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.recorder.mode import FULL
from piecewise_graph.runtime.captured_context import CapturedContext, check_tokens, unwritten_in_forward
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.sizes import overwrite
from piecewise_graph.telemetry import counters

_COUNTED = (("replays", 1), ("full_replays", 1))


def capture_in_place(compiled: Any, *args: Any, **kwargs: Any) -> InPlaceGraph:
    """Capture this very call as one graph, for a loop that keeps its inputs in buffers of its own.

    Nothing is copied or padded at a replay: write the inputs in place, then call what this returns, under
    the forward context of the capture. The graph lies in the pool of the model's other graphs and goes with
    them (`pg.reset`); it counts towards no `max_graph_bytes`, and `pg.explain` does not list it.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned.
        args, kwargs: a legal call. The model runs on them two or three times, effects of its splitting ops
            (a KV cache) included. So call this under torch.no_grad(), with the metadata that ops read.

    Raises:
        FreezeError: the call is not served by one graph of this backend.
        CaptureError: the model cannot be one graph.
        ContextError: the forward context holds what could change unseen.
        GraphPoolError: the caller is capturing a graph already.
        torch.OutOfMemoryError: the graph does not fit.
        RuntimeError: what else torch raises while it captures.
    """
    if state_of(compiled) is None:
        observe(compiled, args, kwargs)  # only its trace tells of what module it is
    return InPlaceGraph(compiled, args, kwargs)


class InPlaceGraph:
    """What `pg.capture_in_place` returns: call it to replay.

    Inputs, weights and the forward context's tensors are read where they were at the capture, and kept
    alive. After replacing a weight, capture anew. On a CPU a replay runs the model again, as it is by then.
    """

    def __init__(self, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = state_of(compiled)
        assert state is not None
        self._compiled, self._args, self._kwargs, self._state = compiled, args, kwargs, state
        context = get_forward_context()
        self._captured, self._context = CapturedContext.of(context), ForwardContext(dict(context.fields))
        with ExitStack() as held:  # so that no graph answers
            for pool in state.pools:
                held.enter_context(pool.using())
            seen = self._run_uncounted()
        runtime, program = seen.runtime, seen.runtime.program
        if reason := _unsupported(program, state):
            raise CaptureError.nothing_captured([reason])
        self._tokens = runtime.count(seen.args)
        check_tokens(context, self._tokens)
        self._kept_alive = runtime, _read_by_graphs(program, seen.args)
        self._leaves, self._structure = list[Any](), None
        self._is_captured, self._look_inside = False, True
        name = "the call captured in place"
        read = [x for _, x in program.bound_arguments(program.with_merged(seen.args))]
        read += unwritten_in_forward(context)
        self._graph = runtime.pool.capture_call(self._run, device=program.device, name=name, unwritten=read)
        self._is_captured = True
        counters.add("captures")

    @property
    def dropped(self) -> bool:
        """The graph is gone: pg.reset() or GraphPool.release() has dropped it."""
        return self._graph.replay is None

    @property
    def outputs(self) -> Any:
        """What the call returned, overwritten by each replay of the pool's graphs."""
        return self._leaves[0] if self._is_one else _torch.unflatten(self._leaves, self._structure)

    def __call__(self) -> Any:
        """Replay; the outputs.

        Raises:
            ContextError: the forward context differs from that of the capture.
            GraphPoolError: the graph was dropped, or another graph of the pool is in use.
        """
        context = get_forward_context()
        if context.fields or self._captured.values:
            self._captured.check(context, self._tokens, self._tokens, thorough=self._look_inside)
            self._look_inside = self._state.config.check == "always"
        self._graph()
        counters.add_each(_COUNTED)
        return self.outputs

    def _run_uncounted(self) -> Observed:
        """The call without graphs, and without the padding that a full graph's context asks for."""
        with self._state.channel.calls_for(Purpose.WARM_UP), in_place_of_active(self._context):
            return observe(self._compiled, self._args, self._kwargs)

    def _run(self) -> None:
        """As often as the pool asks for it: to warm up, to capture, and on a CPU for each replay."""
        seen = self._run_uncounted()
        leaves, structure = _torch.flatten(seen.result)
        if self._is_captured:
            _overwrite_each(self._leaves, leaves)
            return
        self._structure = structure
        self._is_one = len(leaves) == 1 and leaves[0] is seen.result
        # The memory of outputs is shared with later captures, as that of the pool's other graphs is.
        made = {id(output) for output in seen.outputs if isinstance(output, Tensor) and output.is_cuda}
        made -= {id(argument) for argument in seen.args}
        self._leaves = [_torch.weak_alias(leaf) if id(leaf) in made else leaf for leaf in leaves]


def _unsupported(program: Program, state: ModelState) -> str | None:
    """Why no call can be one graph. torch's own attention is no reason: no row here is padding."""
    if state.config.cuda_graphs == "off":
        return "cuda_graphs_off"
    if any(segment.facts.host_sync for segment in program.compiled.values()):
        return "data_dependent"
    if program.split.is_cut_at_attention and not program.split.has_other_devices:
        return None
    return FULL.unsupported(program)


def _read_by_graphs(program: Program, args: Sequence[Any]) -> list[Tensor]:
    """What has to stay alive; detached, so that a parameter whose data is swapped keeps its old storage."""
    tensors = enumerate(program.with_merged(args))
    read = [(index, x) for index, x in tensors if isinstance(x, Tensor) and index in program.last_use]
    return [x if program.split.inputs[index].merged else x.detach() for index, x in read]


def _overwrite_each(static: Sequence[Any], made: Sequence[Any]) -> None:
    for old, new in zip(static, made, strict=True):
        if isinstance(old, Tensor) and old is not new:
            overwrite(old, new)
