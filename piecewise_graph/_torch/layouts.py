"""Whether a forward asks how tensors are laid out: Dynamo answers that in Python, while it traces."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import sympy
import torch
from torch import Tensor

from piecewise_graph._torch.graphs import graph_in_the_making
from piecewise_graph._torch.symbols import expression

_QUESTIONS = frozenset({"stride", "is_contiguous", "storage_offset", "dim_order"})
_ASKED = "_piecewise_asked"  # of Dynamo's graph: the questions


@cache
def note_layout_questions() -> None:
    """From now on traces know what they were asked about layouts (`layout_questions`)."""
    from torch._dynamo.variables.tensor import TensorVariable

    kind: Any = TensorVariable
    kind.call_method = _noting(kind.call_method)


def layout_questions() -> frozenset[str]:
    """Methods by which the forward being traced asked how a tensor is laid out; for backends."""
    return frozenset(getattr(graph_in_the_making(), _ASKED, ()))


def has_symbolic_strides(value: Any) -> bool:
    """A fake tensor with strides that follow from sizes."""
    return isinstance(value, Tensor) and any(isinstance(step, torch.SymInt) for step in value.stride())


def has_symbolic_sizes(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def is_row_major(tensor: Tensor) -> bool:
    """Its elements lie one behind the other, the last dimension first, as far as is known without a guard."""
    expected = sympy.Integer(1)
    for size, step in reversed(list(zip(tensor.shape, tensor.stride(), strict=True))):
        if expression(size) != 1 and expression(step) != expected:
            return False
        expected = expected * expression(size)
    return True


def overlaps_itself(tensor: Tensor) -> bool:
    """It was expanded: some of its elements are one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(expression(size) != 1 and expression(step) == 0 for size, step in pairs)


def _noting(call_method: Any) -> Any:
    @wraps(call_method)
    def noted(variable: Any, tx: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        output = graph_in_the_making() if name in _QUESTIONS else None
        if output is not None:
            vars(output).setdefault(_ASKED, set()).add(name)
        return call_method(variable, tx, name, *args, **kwargs)

    return noted
