"""ModelBackend: the backend that pg.compile hands to Dynamo, and which guards of a trace it keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.backend import build
from piecewise_graph.errors import TokenDimError
from piecewise_graph.frontend.one_token import note_signature
from piecewise_graph.frontend.onward import marking_onward
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.runtime import Runtime

log = logging.getLogger(__name__)


class ModelBackend:
    """The backend of one torch.compile call: its traces join the model's.

    Args:
        entry: the file that calls what is compiled.
    """

    def __init__(self, state: ModelState, entry: str) -> None:
        self._state, self._entry = state, entry
        self._checks_sizes = False  # the trace that was made last does so itself
        self._fixed: set[int] = set()  # token counts with a trace of their own

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        _torch.tell_of_reset(self)
        note_signature(self._state.signatures, gm)
        onward = marking_onward(gm) if _torch.returns_intermediates(gm) else None
        trace = build(gm, example_inputs, lambda weights: self._state)
        runtime = self._state.traces[-1]
        if isinstance(runtime, Runtime):
            fixed = runtime.static_tokens
            is_whole = runtime.program.contract.is_whole and not _torch.traces_a_part(self._entry)
            self._checks_sizes = fixed is None and is_whole
            if fixed is not None and fixed > 1 and not self._state.channel.graphs_run:
                self._count_fixed(fixed)
        return trace if onward is None else onward(trace)

    def _count_fixed(self, count: int) -> None:
        """Another trace serves one token count alone."""
        self._fixed.add(count)
        if len(self._fixed) == 2:
            log.warning("%s", TokenDimError.fixed(sorted(self._fixed)))

    def reset(self) -> None:
        """Reached by torch._dynamo.reset(), which drops every trace."""
        self._state.reset()
        self._state.signatures.clear()

    def kept_guards(self, guards: Sequence[Any]) -> list[bool]:
        """A `guard_filter_fn`: all but those on sizes, where the trace's contract checks these.

        Behind a graph break all stay, whether a graph stands before it or not: a part of the forward has run
        already, so a miss would come too late for another trace. They stay too where the model fixes its
        token count while it is traced: Dynamo makes a trace per size.
        """
        _torch.forget_guarded_tensors(guards)
        checks, self._checks_sizes = self._checks_sizes, False
        if self._state.channel.graphs_run or not checks:
            return [True] * len(guards)
        return _torch.drop_shape_guards(guards)
