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
    """From now on traces know which tensors they were asked about (see `asks_for_strides`)."""
    from torch._dynamo.variables.tensor import TensorVariable

    kind: Any = TensorVariable
    kind.call_method = _noting(kind.call_method)


def asks_for_strides() -> bool:
    """The forward being traced asked how a tensor is laid out whose strides follow from sizes.

    To be called from a backend. Dynamo keeps its guards on strides that are numbers.
    """
    return any(map(has_symbolic_strides, _asked()))


def asks_for_offsets() -> bool:
    """The same of a tensor whose offset in its storage differs from call to call."""
    return any(isinstance(tensor.storage_offset(), torch.SymInt) for tensor in _asked())


def has_symbolic_strides(value: Any) -> bool:
    """A fake tensor with strides that follow from sizes."""
    return isinstance(value, Tensor) and any(isinstance(step, torch.SymInt) for step in value.stride())


def _asked() -> list[Tensor]:
    return getattr(graph_in_the_making(), _ASKED, [])


def _noting(call_method: Any) -> Any:
    @wraps(call_method)
    def noted(variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        output = graph_in_the_making() if name in _QUESTIONS else None
        if output is not None:
            vars(output).setdefault(_ASKED, []).append(example_value(variable.proxy.node))
        return call_method(variable, tx, name, *args, **kwargs)

    return noted
