"""FrozenPlan: one frozen call whose every decision is made: what is left is copying, replaying, returning."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.context import ForwardContext
from piecewise_graph.kernels.copies import bind_copy
from piecewise_graph.recorder.tape import own_outputs
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.tape_set import Ready
from piecewise_graph.sizes import overwrite
from piecewise_graph.telemetry import counters

MISS = object()  # what a plan answers when the call is not one of its own


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
        self._runtime, self._ready = runtime, ready
        self._generation, self._num_tokens = runtime.generation, num_tokens
        self._kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        plan = ready.bound.copy_in
        views = dict(zip(plan.indices, plan.destinations, strict=True)) | dict(plan.expanded)
        self._views = [views[index] for index in inputs]
        self._expanded = frozenset(
            place for place, index in enumerate(inputs) if index in dict(plan.expanded)
        )
        self._copy = None if self._expanded else bind_copy(self._views)
        self._padding = plan.padding
        self._pool, self._template = runtime.family.pool, template
        self._on_gpu = runtime.program.device.type == "cuda"
        self._owned = runtime.family.config.outputs == "copy"
        self._always = runtime.family.config.check == "always"
        made = rebuild(ready.bound.outputs)
        self._static = None if self._owned else made
        self._remake = _remake_like(made, ready.bound.outputs) or rebuild

    def call(self, tensors: Sequence[Tensor], context: ForwardContext) -> Any:
        """Replay; MISS where the plan is out of date or the inputs, whose shapes fit, are of another kind."""
        if self._generation != self._runtime.generation or (self._on_gpu and _torch.capturing()):
            return MISS
        foreign = [place for place, view in enumerate(self._views) if tensors[place] is not view]
        for place in foreign:
            dtype, device = self._kinds[place]
            if tensors[place].dtype is not dtype or tensors[place].device != device:
                return MISS
        with self._pool.using() as nested:
            return MISS if nested else self._run(tensors, foreign, context)

    def _run(self, tensors: Sequence[Tensor], foreign: Sequence[int], context: ForwardContext) -> Any:
        ready = self._ready
        ready.check(context, self._num_tokens, always=self._always)
        if self._always:
            self._runtime.addresses.check(self._template)
        if foreign:
            self._copy_in(tensors, foreign)
        if self._padding:  # zeros, as in every replay
            torch._foreach_zero_(self._padding)
        self._pool.run_off_default_stream(ready.bound.calls)
        counters.add("replays")
        if ready.not_full is not None:
            counters.add("not_full", reason=ready.not_full)
        for reason, segments in ready.bound.unpadded.items():
            counters.add("unpadded_segments", segments, reason=reason)
        if not self._owned:
            return self._static
        return self._remake(own_outputs(self._runtime.program, ready.bound.outputs, (), copy=True))

    def _copy_in(self, tensors: Sequence[Tensor], foreign: Sequence[int]) -> None:
        """Bring what the caller did not write in place, in one launch."""
        if self._copy is not None and self._copy(tensors):
            return
        plain = [place for place in foreign if place not in self._expanded]
        if plain:
            torch._foreach_copy_([self._views[i] for i in plain], [tensors[i] for i in plain])
        for place in self._expanded.intersection(foreign):
            overwrite(self._views[place], tensors[place])


def _remake_like(made: Any, outputs: Sequence[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """How to make another output like `made`, faster than its constructor; None where that is not known.

    Known are transformers' flat outputs: dataclasses that are dictionaries of the fields that are set, here
    all of them graph outputs. Their constructor looks at every field in several ways, which takes ten
    microseconds; what it ends in is a dictionary's items and the same values as attributes.
    """
    kind, places = type(made), {id(value): index for index, value in enumerate(outputs)}
    if not (is_dataclass(kind) and issubclass(kind, OrderedDict)):
        return None
    attributes = dict(vars(made))
    plain = all(id(value) in places and attributes.get(name) is value for name, value in made.items())
    if not plain or any(value is not None for name, value in attributes.items() if name not in made):
        return None
    items = [(name, places[id(value)]) for name, value in made.items()]
    put, new = OrderedDict.__setitem__, kind.__new__

    def remake(outputs: Sequence[Any]) -> Any:
        result = new(kind)
        own = vars(result)
        own.update(attributes)
        for name, index in items:
            own[name] = outputs[index]
            put(result, name, outputs[index])
        return result

    return remake
