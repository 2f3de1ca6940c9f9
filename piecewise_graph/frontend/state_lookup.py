"""From the object that a user holds to the state of its model."""

from __future__ import annotations

from typing import Any

import torch

from piecewise_graph import _torch
from piecewise_graph.frontend.compile import CompiledModel
from piecewise_graph.runtime.model_state import ModelState, alive_ids, states_binding, states_from


def original_of(compiled: Any) -> Any | None:
    """The module or function that was given to pg.compile or torch.compile, or compiled in place, or None."""
    if isinstance(compiled, CompiledModel):
        return compiled._model
    original = _torch.original_callable(compiled)
    if original is None and _torch.is_compiled_in_place(compiled):
        return compiled
    owner = getattr(original, "__self__", None)  # of a compiled method: `torch.compile(model.__call__)`
    return owner if isinstance(owner, torch.nn.Module) else original


def state_of(compiled: Any) -> ModelState | None:
    """The model state of what `original_of` knows; None where it has had no trace yet.

    A torch.compile'd module is found by its parameters, a function by its code.
    """
    if isinstance(compiled, CompiledModel):
        return compiled.model_state
    original = original_of(compiled)
    if isinstance(original, torch.nn.Module):
        tensors = [*original.parameters(), *original.buffers()]
        found = list(states_binding([part for tensor in tensors for part in _torch.inner_tensors(tensor)]))
        if not found:  # of its class, but not another module's
            of_class = states_from(type(original).forward.__code__)
            found = [s for s in of_class if s.traces and not any(alive_ids(t.bound) for t in s.traces)]
    else:
        found = list(states_from(getattr(original, "__code__", None)))
    live = [state for state in found if state.traces or state.ended]
    return live[-1] if live else None
