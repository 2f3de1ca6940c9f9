"""One trace, several models, and several tensors in one place of a model.

Dynamo shares a trace between modules of one class whose guards agree: a second model reaches the function
that was built for the first, with weights of its own among the arguments. Graphs hold weights by address, so
each model gets a runtime, tapes and model state of its own; what was compiled is shared. A parameter that
another one replaced is the same case: the new one gets a runtime, and the old one takes its runtime along
when it dies.

Note [Tensors that change with every call]
A buffer or a plain tensor attribute may be replaced in every forward (`self.state = self.state * 0.5 + x`).
Graphs of its own would serve one call. An attribute that the traced code itself assigns is therefore an
activation (splitter/split.py). What is assigned elsewhere, behind a graph break or by the caller, becomes an
activation when it is replaced for the second time.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.other_forms import with_activations
from piecewise_graph.compiler.program import Program
from piecewise_graph.runtime.bound_addresses import Replaced
from piecewise_graph.runtime.model_state import FindState, ModelState
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.unsplit import UnsplitRuntime
from piecewise_graph.runtime.without_graphs import Rehearsals

Bound = Sequence[tuple[int, Tensor]]
Objects = Mapping[int, Any]
AnyRuntime = Runtime | UnsplitRuntime
MakeRuntime = Callable[[Any, Bound], AnyRuntime]
Key = tuple[Any, ...]
_OFTEN = 2
_MOST_RUNTIMES = 16  # of one model, the latest: one per static cache, for instance
_MOST_OBJECTS = 16  # opaque arguments of one model that have graphs, the latest


def unsplit_per_model(
    make: MakeRuntime, find_state: FindState, weights: Bound, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """The function handed to Dynamo for a trace that stays whole; see `per_model`."""
    return _forward(_WholeRuntimes(make, find_state, weights), example_inputs)


def per_model(
    program: Program, find_state: FindState, example_inputs: Sequence[Any], weights: Collection[int]
) -> Callable[..., Any]:
    """The function handed to Dynamo: finds the runtime of the model whose weights are among its arguments.

    A plain function, because depyf and other tools read the code of what a backend returns.

    Args:
        find_state: weights of a model -> what its traces share.
        weights: indices of the arguments that tell models apart: parameters, and what they are made of.
    """
    forward = _forward(_SplitRuntimes(program, find_state, example_inputs, weights), example_inputs)

    def forward_as_traced(*args: Any) -> Any:
        with _torch.traced_functions():
            return forward(*args)

    return forward_as_traced


def _forward(runtimes: _Runtimes, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        runtime = runtimes.of(args)
        channel = runtime.state.channel
        channel.enter()
        try:
            outputs = _answer(runtime, args)
        except Replaced:
            runtime = runtimes.instead_of(args)
            outputs = _answer(runtime, args)
            runtimes.show(args, runtime)
        channel.leave(runtime, args, outputs)
        return outputs

    runtimes.of(example_inputs)
    return forward


def _answer(runtime: AnyRuntime, args: Sequence[Any]) -> Any:
    answer = runtime.state.channel.answer
    return runtime(*args) if answer is None else answer(runtime, args)


class _Runtimes(ABC):
    """The runtimes of one trace, by the model that they belong to.

    Nothing of it refers to itself: with the last reference to a trace, its graphs go at once.

    Args:
        bound: tensors that are read by address, of the model that was traced.
        weights: indices of those that tell models apart.
        objects: indices of opaque arguments. Tapes hold them, so other ones need another runtime.
    """

    def __init__(
        self, find_state: FindState, bound: Bound, weights: Collection[int], objects: Sequence[int] = ()
    ) -> None:
        self._find_state, self._objects = find_state, objects
        self._indices = [index for index, _ in bound]
        # Two weights tell models apart; a model that shares both with another is told by its addresses.
        self._weights = [index for index in self._indices if index in weights]
        self._telling = sorted({self._weights[0], self._weights[-1]}) if self._weights else []
        self._all: dict[Key, list[AnyRuntime]] = {}
        self._states: dict[Key, Any] = {}  # by the weights that tell models apart

    @abstractmethod
    def _make(self, state: Any, bound: Bound, objects: Objects) -> AnyRuntime: ...

    def of(self, args: Sequence[Any]) -> AnyRuntime:
        """The runtime that served these weights last."""
        found = self._all.get(self._key(args))
        if found:
            return found[0]
        runtime = self._new(args)
        self.show(args, runtime)
        return runtime

    def instead_of(self, args: Sequence[Any]) -> AnyRuntime:
        """The runtime for a call whose tensors are not those that the one of these weights captured.

        A new one is to be shown when it has answered: until then no other thread captures its own tensors.
        """
        found = (each for each in self._all.get(self._key(args), ()) if isinstance(each, Runtime))
        held = next((each for each in found if each.addresses.captured and each.addresses.hold(args)), None)
        return self._new(args) if held is None else held

    def show(self, args: Sequence[Any], runtime: AnyRuntime) -> None:
        """Calls with these weights ask `runtime` first, from now on."""
        key = self._key(args)
        known = [runtime, *(each for each in self._all.get(key, ()) if each is not runtime)]
        self._all[key] = known[:_MOST_RUNTIMES]
        _end(known[_MOST_RUNTIMES:])
        if self._objects:
            self._forget_oldest(key)

    def _key(self, args: Sequence[Any]) -> Key:
        return (
            *(id(args[index]) for index in self._telling),
            *(_torch.comparable(args[index]) for index in self._objects),
        )

    def _new(self, args: Sequence[Any]) -> AnyRuntime:
        key, state = self._key(args), self._state(args)
        objects = {index: args[index] for index in self._objects}
        runtime = self._make(state, [(index, args[index]) for index in self._indices], objects)
        # A tensor that dies takes its graphs along; the trace may have died before.
        drop = weakref.WeakMethod(self._drop)
        watchers = [
            weakref.finalize(args[index], _call, drop, key, weakref.ref(runtime), index in self._telling)
            for index in self._indices
        ]
        weakref.finalize(runtime, _detach, watchers)  # weights outlive the runtimes of single caches
        return runtime

    def _state(self, args: Sequence[Any]) -> Any:
        """Of the model: a state outlives the runtimes of single caches."""
        telling = tuple(id(args[index]) for index in self._telling)
        state = self._states.get(telling)
        if state is None:
            state = self._states[telling] = self._find_state([args[index] for index in self._weights])
            forget = weakref.WeakMethod(self._forget_state)
            for index in self._telling:
                weakref.finalize(args[index], _call, forget, telling)
        return state

    def _forget_state(self, telling: Key) -> None:
        self._states.pop(telling, None)

    def _forget_oldest(self, key: Key) -> None:
        """An object that is another one in every call would leave graphs of each."""
        weights = key[: len(self._telling)]
        same = [other for other in self._all if other[: len(weights)] == weights]
        for other in same[:-_MOST_OBJECTS]:
            _end(self._all.pop(other))

    def _drop(self, key: Key, runtime: weakref.ref[AnyRuntime], is_model: bool) -> None:
        """Forget a runtime; with `is_model` the id of a weight that tells models apart is free."""
        gone = runtime()
        known = self._all.pop(key, [])
        left = [other for other in known if other is not gone]
        _end(other for other in known if other is gone)
        if left:
            self._all[key] = left


def _end(runtimes: Iterable[AnyRuntime]) -> None:
    """Keep what these served: they are let go."""
    for runtime in runtimes:
        several = runtime.several if isinstance(runtime, Runtime) else None
        runtime.state.end([runtime, *(several.runtimes if several is not None else ())])


def _call(method: weakref.WeakMethod[Callable[..., None]], *args: Any) -> None:
    found = method()
    if found is not None:
        found(*args)


def _detach(watchers: Sequence[weakref.finalize[..., Any]]) -> None:
    for watcher in watchers:
        watcher.detach()


class _WholeRuntimes(_Runtimes):
    """The runtimes of a trace that stays whole, each of them made by `make`."""

    def __init__(self, make: MakeRuntime, find_state: FindState, bound: Bound) -> None:
        self._made_by = make
        super().__init__(find_state, bound, [index for index, _ in bound])

    def _make(self, state: Any, bound: Bound, objects: Objects) -> AnyRuntime:
        return self._made_by(state, bound)


class _SplitRuntimes(_Runtimes):
    """The runtimes of a trace that was split (Note [Tensors that change with every call])."""

    def __init__(
        self,
        program: Program,
        find_state: FindState,
        example_inputs: Sequence[Any],
        weights: Collection[int],
    ) -> None:
        self._program = program
        self._stood: dict[Key, dict[int, weakref.ref[Tensor]]] = {}  # buffers and attributes of a model
        self._changes: Counter[tuple[Key, int]] = Counter()
        self._rehearsals: weakref.WeakKeyDictionary[ModelState, Rehearsals] = weakref.WeakKeyDictionary()
        bound = program.bound_arguments(example_inputs)
        super().__init__(find_state, bound, weights, program.split.opaque)

    def _make(self, state: Any, bound: Bound, objects: Objects) -> Runtime:
        rehearsals = self._rehearsals.setdefault(state, Rehearsals())
        return Runtime(self._program, state, self._program.static_tokens, bound, objects, rehearsals)

    def _new(self, args: Sequence[Any]) -> AnyRuntime:
        key = self._key(args)
        kept = {*self._weights, *self._program.static_writes}  # a copy would not be written for good
        values = [index for index in self._indices if index not in kept]
        stood = self._stood.get(key, {})
        self._changes.update((key, i) for i in values if i in stood and stood[i]() is not args[i])
        self._stood[key] = {index: weakref.ref(args[index]) for index in values}
        often = {index for index in values if self._changes[key, index] >= _OFTEN}
        if often and self._telling:
            self._program = with_activations(self._program, often)
            self._rehearsals.clear()
            self._indices = [index for index in self._indices if index not in often]
            _end(runtime for runtimes in self._all.values() for runtime in runtimes)
            self._all.clear()
        return super()._new(args)

    def _drop(self, key: Key, runtime: weakref.ref[AnyRuntime], is_model: bool) -> None:
        super()._drop(key, runtime, is_model)
        if is_model:  # another model may get this key
            self._stood.pop(key, None)
            self._changes = Counter({at: count for at, count in self._changes.items() if at[0] != key})
