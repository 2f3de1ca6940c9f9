"""FrozenPlan: one frozen call whose every decision is made: what is left is copying, replaying, returning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.context import ForwardContext
from piecewise_graph.full_graph import check_same_context
from piecewise_graph.graph_pool import capturing_elsewhere
from piecewise_graph.runtime import Runtime
from piecewise_graph.tape_set import Ready
from piecewise_graph.telemetry import counters


class FrozenPlan:
    """The replay of one token count.

    Args:
        inputs: index of each activation among the graph's arguments, in the order of `tensors`.
        tensors: a call's activations; others have to be of their kind.
        template: the graph's arguments with the weights in their places.
        rebuild: the graph's outputs -> what the model returns.
    """

    def __init__(
        self,
        runtime: Runtime,
        ready: Ready,
        num_tokens: int,
        inputs: Sequence[int],
        tensors: Sequence[Tensor],
        template: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], Any],
    ) -> None:
        self._runtime, self._ready, self._rebuild = runtime, ready, rebuild
        self._generation, self._num_tokens = runtime.generation, num_tokens
        self._kinds = tuple((tensor.dtype, tensor.device) for tensor in tensors)
        plan = ready.bound.copy_in
        self._order = [list(inputs).index(index) for index in plan.indices]
        self._destinations = plan.destinations
        self._expanded = [(list(inputs).index(index), view) for index, view in plan.expanded]
        self._padding = plan.padding
        self._pool, self._device = runtime.family.pool, runtime.program.device
        self._template = template
        self._owned = runtime.family.config.outputs == "copy"
        self._always = runtime.family.config.check == "always"
        self._static = None if self._owned else rebuild(ready.bound.outputs)

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """The plan is still good, and so are these inputs, whose shapes are known to fit."""
        if self._generation != self._runtime.generation or capturing_elsewhere(self._device):
            return False
        return all(
            tensor.dtype is dtype and tensor.device == device
            for tensor, (dtype, device) in zip(tensors, self._kinds, strict=True)
        )

    def run(self, tensors: Sequence[Tensor], context: ForwardContext) -> Any:
        ready = self._ready
        with self._pool.lock:
            if ready.context is not None:
                check_same_context(ready.context, context, ready.bucket, self._num_tokens)
                counters.add("full_replays")
            if self._always:
                self._runtime.addresses.check(self._template)
            self._copy_in(tensors)
            self._pool.run_off_default_stream(ready.bound.calls)
            counters.add("replays")
            if ready.not_full is not None:
                counters.not_full(ready.not_full)
            for reason, segments in ready.bound.unpadded.items():
                counters.unpadded(reason, segments)
            if not self._owned:
                return self._static
            return self._rebuild(self._runtime.own(ready.bound.outputs, tensors))

    def _copy_in(self, tensors: Sequence[Tensor]) -> None:
        """Copy what the caller did not write in place; then zero the tails, as every replay does."""
        sources, destinations = [], []
        for place, destination in zip(self._order, self._destinations, strict=True):
            if tensors[place].data_ptr() != destination.data_ptr():
                sources.append(tensors[place])
                destinations.append(destination)
        if sources:
            torch._foreach_copy_(destinations, sources)
        for place, destination in self._expanded:
            destination.copy_(tensors[place])
        if self._padding:
            torch._foreach_zero_(self._padding)
