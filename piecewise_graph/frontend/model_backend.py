"""ModelBackend: the backend that pg.compile hands to Dynamo, and which guards of a trace it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.backend import build
from piecewise_graph.frontend.one_token import signature
from piecewise_graph.frontend.onward import marking_onward
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.runtime import Runtime


class ModelBackend:
    """The backend of one torch.compile call: its traces join the model's."""

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self._checks_sizes = False  # the trace that was made last does so itself

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        _torch.tell_of_reset(self)
        self._state.signatures.append(signature(gm))
        onward = marking_onward(gm) if _torch.returns_intermediates(gm) else None
        trace = build(gm, example_inputs, lambda weights: self._state)
        runtime = self._state.traces[-1]
        self._checks_sizes = isinstance(runtime, Runtime) and runtime.program.contract.is_whole
        return trace if onward is None else onward(trace)

    def reset(self) -> None:
        """Reached by torch._dynamo.reset(), which drops every trace."""
        self._state.reset()
        self._state.signatures.clear()

    def kept_guards(self, guards: Sequence[Any]) -> list[bool]:
        """A `guard_filter_fn`: all but those on sizes, where the trace's contract checks these.

        Behind a graph break all stay: a part of the forward has run already, so a miss would come too late
        for another trace.
        """
        checks, self._checks_sizes = self._checks_sizes, False
        if self._state.channel.graphs_run or not checks:
            return [True] * len(guards)
        return _torch.drop_shape_guards(guards)
