"""Whether a forward asks how its arguments are laid out: Dynamo answers that in Python, while it traces."""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph._torch.graphs import argument_values, example_value, graph_in_the_making
from piecewise_graph._torch.tensors import share_storage

_QUESTIONS = ("method_stride", "method_is_contiguous")
_ASKED = "_piecewise_asked"  # of Dynamo's graph: the tensors that were asked about


@cache
def note_layouts_asked() -> None:
    """From now on traces know which tensors they were asked about (`asks_for_layouts`)."""
    from torch._dynamo.variables.tensor import TensorVariable

    for name in _QUESTIONS:
        setattr(TensorVariable, name, _noting(getattr(TensorVariable, name)))


def asks_for_layouts(gm: GraphModule) -> bool:
    """The forward being traced asked how an argument with a symbolic size, or a view of one, is laid out.

    To be called from a backend.
    """
    arguments = [x for x in argument_values(gm) if isinstance(x, Tensor)]
    varying = [x for x in arguments if any(isinstance(size, torch.SymInt) for size in x.shape)]
    asked = getattr(graph_in_the_making(), _ASKED, ())
    return any(share_storage(tensor, argument) for tensor in asked for argument in varying)


def _noting(answer: Any) -> Any:
    @wraps(answer)
    def noted(variable: Any, *args: Any, **kwargs: Any) -> Any:
        output, tensor = graph_in_the_making(), example_value(variable.proxy.node)
        if output is not None and isinstance(tensor, Tensor):
            vars(output).setdefault(_ASKED, []).append(tensor)
        return answer(variable, *args, **kwargs)

    return noted
