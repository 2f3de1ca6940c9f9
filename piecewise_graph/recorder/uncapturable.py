"""Which ops no graph can hold: those whose capture fails, found one by one after a capture that failed."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.errors import CaptureError
from piecewise_graph.graph_pool import GraphPool, clean_cublas


def uncapturable_nodes(program: Program, samples: Mapping[str, Sequence[Any]]) -> Mapping[str, str]:
    """Names of the trace's nodes that cannot be captured alone, and why.

    Each distinct segment runs once more, op by op; those that are given objects with a state do not.

    Args:
        samples: what one segment of each structure was given, by the structure's key; may be written.
    """
    failing: dict[str, Mapping[int, str]] = {}
    found: dict[str, str] = {}
    for step in program.split.segments:
        segment = program.compiled[step.index]
        given = samples.get(segment.key)
        if given is None or segment.facts.host_sync or any(map(_torch.may_keep_state, given)):
            continue
        if segment.key not in failing:
            failing[segment.key] = _OneByOne(step.gm, program.device).failing(given)
        nodes = list(step.gm.graph.nodes)  # segments of one structure have the same nodes in the same order
        found.update((step.origins[nodes[place].name], why) for place, why in failing[segment.key].items())
    return found


class _OneByOne(Interpreter):
    """Captures each node of a segment in a graph of its own."""

    def __init__(self, gm: GraphModule, device: torch.device) -> None:
        super().__init__(gm)
        self._gm = gm
        self._device, self._pool = device, GraphPool()
        self._pool.join(device, self)
        self._places = {node: place for place, node in enumerate(gm.graph.nodes)}
        self._failing: dict[int, str] = {}

    def failing(self, given: Sequence[Any]) -> Mapping[int, str]:
        """Places of the nodes whose capture fails, and why; up to a node that does not run at all."""
        try:
            with (
                self._pool.session(),
                clean_cublas(self._device),
                _torch.functions_of_wrappers(self._gm),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")  # torch remarks that the graph of a view is empty
                self._pool.capture(lambda: (), ())  # where not even nothing is captured, it is no op's fault
                self.run(*given)
        except Exception as error:
            if _torch.is_dynamo_control_flow(error):
                raise
        return self._failing

    def run_node(self, n: Node) -> Any:
        run = partial(super().run_node, n)
        result = run()  # before its capture, so that its kernels are loaded
        leaves, _ = _torch.flatten((self.fetch_args_kwargs_from_env(n), result))
        if n.op.startswith("call_") and any(isinstance(leaf, Tensor) for leaf in leaves):
            try:
                self._pool.capture(lambda: (run(), ())[1], ())
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                self._failing[self._places[n]] = CaptureError.op_failed(error)
        return result

    def drop_graphs(self) -> None:
        """None is kept."""
