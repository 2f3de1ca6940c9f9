"""FrozenCall: one frozen call of a known token count. What is left to do is copy, replay, return."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.context import ForwardContext
from piecewise_graph.graph_pool import capturing_elsewhere
from piecewise_graph.kernels.copies import bind_copy
from piecewise_graph.recorder.tape import own_outputs
from piecewise_graph.runtime.replay import Replay
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.sizes import overwrite, same_layout

MISS = object()  # the answer to a call that this object does not serve


class FrozenCall:
    """The calls of one token count.

    Args:
        inputs: index of each activation among the graph's arguments, in the order of `tensors`.
        tensors: a call's activations; others have to be of their kind.
        template: the graph's arguments with the weights in their places.
        rebuild: the graph's outputs -> what the model returns.
    """

    def __init__(
        self,
        runtime: Runtime,
        replay: Replay,
        inputs: Sequence[int],
        tensors: Sequence[Tensor],
        template: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], Any],
    ) -> None:
        config, copies = runtime.state.config, replay.bound.copy_in
        self._runtime, self._replay = runtime, replay
        self._generation, self._device = runtime.generation, runtime.program.device
        self._kinds = [(tensor.dtype, tensor.device) for tensor in tensors]
        compared = dict(runtime.program.contract.strides)
        self._strides = [(i, t.stride()) for i, t in enumerate(tensors) if inputs[i] in compared]
        self._copies, self._bounds = copies, copies.bounds
        views, expanded = copies.views, dict(copies.expanded)
        self._views = [views[index] for index in inputs]
        self._expanded = frozenset(place for place, index in enumerate(inputs) if index in expanded)
        launches = self._device.type == "cuda" and not self._expanded
        self._copy = bind_copy(self._views) if launches else None
        self._padding, self._turns = copies.padding, runtime.pool.using()
        self._addressed = template if config.check == "always" else None
        made = rebuild(replay.bound.outputs)
        self._static = made if config.outputs == "static" else None
        self._remake = _remake_like(made, replay.bound.outputs) or rebuild

    def run(self, tensors: Sequence[Tensor], context: ForwardContext) -> Any:
        """Replay; MISS where a capture came since, or the inputs, whose shapes fit, are of another kind.

        An input that lies in a buffer of another one is of another kind too. What the caller did not write in
        place is copied.
        """
        if self._generation != self._runtime.generation or capturing_elsewhere(self._device):
            return MISS
        for place, strides in self._strides:
            if not same_layout(tensors[place], strides):
                return MISS
        foreign = [place for place, view in enumerate(self._views) if tensors[place] is not view]
        for place in foreign:
            tensor, (dtype, device) = tensors[place], self._kinds[place]
            if tensor.dtype is not dtype or tensor.device != device:
                return MISS
            inside = bisect_right(self._bounds, tensor.data_ptr()) % 2  # `is_apart` takes a microsecond
            if inside and not self._copies.is_apart(tensor, self._views[place]):
                return MISS
        with self._turns as nested:
            if nested:
                return MISS
            self._replay.check(context, self._addressed)
            if foreign and not (self._copy is not None and self._copy(tensors)):
                self._copy_one_by_one(tensors, foreign)
            if self._padding:
                torch._foreach_zero_(self._padding)
            self._replay.launch()
            if self._static is not None:
                return self._static
            return self._remake(own_outputs(self._runtime.program, self._replay.bound, (), copy=True))

    def _copy_one_by_one(self, tensors: Sequence[Tensor], foreign: Sequence[int]) -> None:
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
