"""From the object a user holds to the family of its traces."""

from __future__ import annotations

from typing import Any

import torch

from piecewise_graph import _torch
from piecewise_graph.frontend.compile import CompiledModel
from piecewise_graph.runtime.model_state import Family, families_binding, families_from


def family_for(compiled: Any) -> Family | None:
    """The family of what pg.compile or torch.compile returned; None where it has no trace yet.

    A torch.compile'd module is found by its parameters, a function by its code.
    """
    if isinstance(compiled, CompiledModel):
        return compiled.family
    original = _torch.original_callable(compiled)
    if isinstance(original, torch.nn.Module):
        found = list(families_binding([*original.parameters(), *original.buffers()]))
        found += families_from(type(original).forward.__code__) if not found else []
    else:
        found = list(families_from(getattr(original, "__code__", None)))
    live = [family for family in found if family.runtimes]
    return live[-1] if live else None
