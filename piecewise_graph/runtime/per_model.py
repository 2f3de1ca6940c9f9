"""One trace, several models.

Dynamo shares a trace between modules of one class whose guards agree: a second model reaches the function
that was built for the first, with weights of its own among the arguments. Graphs hold weights by address, so
each model gets a runtime, tapes and model state of its own; what was compiled is shared.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.runtime.model_state import FindState
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.unsplit import UnsplitRuntime

Bound = Sequence[tuple[int, Tensor]]
AnyRuntime = Runtime | UnsplitRuntime
MakeRuntime = Callable[[Any, Bound], AnyRuntime]


def per_model(
    make: MakeRuntime, find_state: FindState, bound: Bound, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The function handed to Dynamo: finds the runtime of the model whose weights are among its arguments.

    A plain function, because depyf and other tools read the code of what a backend returns.

    Args:
        make: (model state, bound tensors with their argument indices) -> a runtime.
        bound: tensors that graphs read by address, of the model that was traced.
    """
    indices = [index for index, _ in bound]
    # Two weights tell models apart; a model that shares both with another is caught by its addresses.
    weights = [index for index, tensor in bound if isinstance(tensor, torch.nn.Parameter)]
    telling = sorted({weights[0], weights[-1]}) if weights else []
    runtimes: dict[tuple[int, ...], AnyRuntime] = {}

    def runtime_for(args: Sequence[Any]) -> AnyRuntime:
        key = tuple(id(args[index]) for index in telling)
        if key not in runtimes:
            state = find_state([args[index] for index in weights])
            runtimes[key] = make(state, [(index, args[index]) for index in indices])
            for index in telling:  # a model that dies takes its graphs along, and frees its ids
                weakref.finalize(args[index], runtimes.pop, key, None)
        return runtimes[key]

    def forward(*args: Any) -> Any:
        runtime = runtime_for(args)
        channel = runtime.state.channel
        channel.enter()
        outputs = runtime(*args)
        channel.leave(runtime, args, outputs)
        return outputs

    runtime_for(example_inputs)
    return forward
