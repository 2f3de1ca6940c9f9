"""Whether a forward asks how tensors are laid out: Dynamo answers that in Python, while it traces."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from piecewise_graph._torch.graphs import example_value, graph_in_the_making

_QUESTIONS = frozenset({"stride", "is_contiguous", "storage_offset", "dim_order"})
_ASKED = "_piecewise_asked"  # of Dynamo's graph: the tensors that were asked about


@cache
def note_layouts_asked() -> None:
    """From now on traces know which tensors they were asked about (`asks_for_layouts`)."""
    from torch._dynamo.variables.tensor import TensorVariable

    kind: Any = TensorVariable
    kind.call_method = _noting(kind.call_method)


def asks_for_layouts() -> bool:
    """The forward being traced asked how a tensor is laid out whose layout is not numbers alone.

    To be called from a backend. Dynamo keeps its guards on numbers.
    """
    return any(map(has_symbolic_layout, getattr(graph_in_the_making(), _ASKED, ())))


def has_symbolic_layout(value: Any) -> bool:
    """A fake tensor with strides, or an offset in its storage, that follow from the call."""
    steps = (*value.stride(), value.storage_offset()) if isinstance(value, Tensor) else ()
    return any(isinstance(step, torch.SymInt) for step in steps)


def _noting(call_method: Any) -> Any:
    @wraps(call_method)
    def noted(variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        output = graph_in_the_making() if name in _QUESTIONS else None
        if output is not None:
            vars(output).setdefault(_ASKED, []).append(example_value(variable.proxy.node))
        return call_method(variable, tx, name, *args, **kwargs)

    return noted
