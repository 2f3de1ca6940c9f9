"""pg.freeze: a model's forward without Dynamo, guards and parameters among the arguments.

Note [What a frozen call still checks]
Dynamo's guards make sure that a trace fits the call; a frozen callable knows which trace it belongs to and
checks what can differ between two calls of one loop, in plain Python: which arguments are there, constants by
value, dtype, device and shape of tensors, their strides where the trace depends on them, grad mode and
autocast, the model's training flag, and in FULL mode the forward context. Of an argument that is an object or
a set, the constants that it holds are compared. A tensor that is no input of the graph may still have been
asked for its shape or strides: it has to be like the example's. What it takes for granted is what the model
reads besides: whether two arguments are one, attributes of tensors, objects in objects, attributes of
modules, globals, and weights, whose addresses are compared at the first replay of every tape (always, with
check="always"). After replacing any of these, call `rebind()`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.context import ForwardContext, get_forward_context
from piecewise_graph.errors import AddressMovedError, FreezeError, MergedWeightsError
from piecewise_graph.frontend.argument_names import describe, forward_signature, leaf_names
from piecewise_graph.frontend.compile import CompiledModel
from piecewise_graph.frontend.frozen_call import MISS, FrozenCall
from piecewise_graph.frontend.frozen_trace import (
    FrozenTrace,
    Observed,
    check_distinct,
    observe,
    place_of,
    state_of_object,
)
from piecewise_graph.frontend.one_token import is_of_transformers
from piecewise_graph.frontend.state_lookup import original_of
from piecewise_graph.frontend.untraced import untraced
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.sizes import same_layout
from piecewise_graph.splitter.split_graph import Ref, SplitGraph


def freeze(compiled: Any, *example_args: Any, **example_kwargs: Any) -> Frozen:
    """A callable with the model's signature and outputs that only looks up a tape and replays it.

    The example is run once, to see which trace serves it and how its arguments and outputs map to the
    graph's. The frozen callable then serves every token count, like `compiled`; arguments that are no
    tensors, and every shape but the token dimension, are fixed.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned.
        example_args, example_kwargs: a legal call. The model runs on them, so call this under
            torch.no_grad(), and inside the forward context that the model needs.

    Returns:
        see `Frozen`.

    Raises:
        FreezeError: the example is not served by one graph of this backend, or its outputs cannot be
            mapped.
    """
    leaves, structure = _torch.flatten((example_args, example_kwargs))
    check_distinct(leaves, leaf_names(compiled, structure, len(leaves)))
    tracing = observe(compiled, example_args, example_kwargs)
    return Frozen(compiled, leaves, structure, FrozenTrace.of(tracing, leaves))


class Frozen:
    """What `pg.freeze` returns: call it like the model, under `torch.no_grad()` or inference mode.

    With `outputs="static"` a call returns the same tensors, and the same containers around them, whenever it
    has the same token count; the next replay overwrites them.
    """

    def __init__(self, compiled: Any, leaves: Sequence[Any], structure: Any, trace: FrozenTrace) -> None:
        self._compiled, self._structure, self._trace = compiled, structure, trace
        self._example = tuple(leaves)
        self._autocast_is_on = _autocast_question(trace.runtime.program.split)
        self._names = leaf_names(compiled, structure, len(leaves))
        self._flat_forms: set[Hashable] = set()
        self._constants = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        self._states = self._states_of_objects()
        inputs = dict(trace.inputs)
        self._unread = tuple(
            (i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in inputs
        )
        self._calls: dict[Hashable, FrozenCall] = {}
        self._untraced_call = untraced()
        model = original_of(compiled)
        self._module = model if isinstance(model, torch.nn.Module) else None
        self._training = self._module.training if self._module is not None else False

    @property
    def model_state(self) -> ModelState:
        return self._trace.runtime.state

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._untraced_call(self, args, kwargs)
        known = (len(args), *kwargs) in self._flat_forms
        leaves = [*args, *kwargs.values()] if known else self._learn(args, kwargs)
        static = self._trace.static
        if static and any(place_of(leaves[index]) != place for index, place in static):
            return self._compiled(*args, **kwargs)  # another static cache: it has graphs of its own
        tensors = [leaves[index] for index, _ in self._trace.inputs]
        context = get_forward_context()
        try:
            key = (*[tensor.shape for tensor in tensors], context.full_graph, context.graph_key)
        except AttributeError:  # no tensor where the example had one
            self._check_tensors(leaves)
            raise
        known_call = self._calls.get(key)
        if known_call is not None:
            self._check_call(leaves)
            result = known_call.run(tensors, context)
            if result is not MISS:
                return result
        return self._uncommon(leaves, tensors, key, context)

    def static_inputs(self, num_tokens: int) -> dict[str, Tensor]:
        """Where a replay of `num_tokens` tokens reads its inputs, by argument name.

        A caller that writes there and passes these very tensors saves the copy. They are the same memory for
        every token count; a tape of the count has to be captured.

        Raises:
            FreezeError: nothing is captured for this count.
        """
        context = get_forward_context()
        replay = self._trace.runtime.replay_for(num_tokens, context)
        if replay is None:
            raise FreezeError.not_captured(num_tokens)
        views = replay.bound.copy_in.views
        return {self._names[leaf]: views[index] for leaf, index in self._trace.inputs}

    def rebind(self) -> None:
        """Take the model as it is now: after weights were replaced rather than written in place.

        The example is run again through the compiled model. Tapes that hold old addresses are dropped and
        captured again (lazily, or by pg.capture).
        """
        self._calls.clear()
        self._trace = FrozenTrace.of(self._observe_anew(), self._example)
        self._states = self._states_of_objects()
        self._training = self._module.training if self._module is not None else False

    def _observe_anew(self) -> Observed:
        """The example's run, by graphs that read the weights where they are now."""
        args, kwargs = _torch.unflatten(self._example, self._structure)
        try:
            seen = observe(self._compiled, args, kwargs)
            if seen.runtime.addresses.hold(seen.args):
                return seen
        except (AddressMovedError, MergedWeightsError):  # graphs hold what was replaced
            pass
        self._trace.runtime.drop_graphs()
        self.model_state.sealed = False
        return observe(self._compiled, args, kwargs)

    def _states_of_objects(self) -> tuple[tuple[int, Any], ...]:
        states = ((index, state_of_object(leaf)) for index, leaf in self._constants)
        return tuple((index, state) for index, state in states if state is not None)

    def _check_call(self, leaves: Sequence[Any]) -> None:
        """Refuse what the trace does not cover, besides shapes (Note [What a frozen call still checks])."""
        if torch.is_grad_enabled():
            raise FreezeError.grad_enabled()
        if self._autocast_is_on():
            raise FreezeError.autocast()
        if self._module is not None and self._module.training != self._training:
            raise FreezeError.training_changed(self._training)
        for index, expected in self._constants:
            found = leaves[index]
            if found is not expected and not _is_equal(found, expected):
                raise FreezeError.constant(self._names[index], found, expected)
        for index, expected in self._states:
            found = state_of_object(leaves[index])
            if not _is_equal(found, expected):
                raise FreezeError.kind(self._names[index], f"an object with {found}", f"one with {expected}")
        for index, expected in self._unread:
            found, name = leaves[index], self._names[index]
            if (found.dtype, found.device, found.shape) != (expected.dtype, expected.device, expected.shape):
                raise FreezeError.kind(name, describe(found), describe(expected))
            if not same_layout(found, expected.stride()):
                raise FreezeError.kind(name, f"of strides {found.stride()}", f"{expected.stride()}")

    def _learn(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The caller's leaves in the example's order; remembers a call without containers."""
        leaves, structure = _torch.flatten((args, kwargs))
        if structure == self._structure:
            given = [*args, *kwargs.values()]
            if len(given) == len(leaves) and all(map(operator.is_, given, leaves)):
                self._flat_forms.add((len(args), *kwargs))
            return leaves
        bound = self._bind(args, kwargs)
        leaves, structure = _torch.flatten(bound)
        if structure != self._structure:
            raise FreezeError.arguments(self._described(args, kwargs), ", ".join(self._names))
        return leaves

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same call in the form that the example had, where the model's signature allows to tell."""
        example_args, example_kwargs = _torch.unflatten(self._example, self._structure)
        signature = forward_signature(self._compiled)
        if signature is None:
            return args, kwargs
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return args, kwargs
        given = {**{k: v for k, v in given.items() if k != "kwargs"}, **given.get("kwargs", {})}
        names = list(signature.parameters)[: len(example_args)]
        missing = object()
        positional = tuple(given.pop(name, missing) for name in names)
        ordered = {name: given.pop(name) for name in list(example_kwargs) if name in given}
        return positional, ordered | given

    def _described(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        return ", ".join([*(f"argument {i}" for i in range(len(args))), *kwargs]) or "nothing"

    def _uncommon(
        self, leaves: Sequence[Any], tensors: Sequence[Any], key: Hashable, context: ForwardContext
    ) -> Any:
        """A call of a token count that is new or out of date, or with inputs of another kind."""
        self._check_tensors(leaves)
        self._check_call(leaves)
        runtime, full = self._trace.runtime, list(self._trace.template)
        for (_, index), tensor in zip(self._trace.inputs, tensors, strict=True):
            full[index] = tensor
        for index, argument, dim in self._trace.symbols:
            full[index] = full[argument].shape[dim]
        if 1 in runtime.program.contract.read_sizes(full).values():
            self._check_one_token(leaves)
        outputs = runtime(*full)
        count = runtime.count(full)
        replay = runtime.replay_for(count, context)
        if replay is not None and not any(isinstance(value, Ref) for value in replay.bound.outputs):
            indices = [index for _, index in self._trace.inputs]
            template = self._trace.template
            self._calls[key] = FrozenCall(runtime, replay, indices, tensors, template, self._rebuild)
        return self._rebuild(outputs)

    def _check_one_token(self, leaves: Sequence[Any]) -> None:
        """A trace of several tokens is right for one token where its model does nothing else with one."""
        if isinstance(self._compiled, CompiledModel):
            args, kwargs = _torch.unflatten(leaves, self._structure)
            same = self._compiled.agrees_at_one_token(self._trace.signatures, args, kwargs)
        else:
            same = is_of_transformers(self._module)
        if not same:
            raise FreezeError.one_token()

    def _rebuild(self, outputs: Sequence[Any]) -> Any:
        leaves = [constant if index is None else outputs[index] for index, constant in self._trace.outputs]
        return _torch.unflatten(leaves, self._trace.structure)

    def _check_tensors(self, leaves: Sequence[Any]) -> None:
        inputs = dict(self._trace.inputs)
        specs = self._trace.runtime.program.split.inputs
        for position, (leaf, expected) in enumerate(zip(leaves, self._example, strict=True)):
            if not isinstance(expected, Tensor):
                continue
            name = self._names[position]
            if not isinstance(leaf, Tensor):
                raise FreezeError.kind(name, type(leaf).__name__, "a tensor")
            if (leaf.dtype, leaf.device, leaf.dim()) != (expected.dtype, expected.device, expected.dim()):
                raise FreezeError.kind(name, describe(leaf), describe(expected))
            spec = specs[inputs[position]].spec if position in inputs else None
            for dim, size in enumerate(spec.shape if spec is not None else ()):
                if size.is_Integer and leaf.shape[dim] != int(size):
                    raise FreezeError.kind(name, describe(leaf), f"size {size} in dimension {dim}")


def _is_equal(found: Any, expected: Any) -> bool:
    """Of one kind too: 1, 1.0 and True are equal to Python, as are 0.0 and -0.0."""
    if type(found) is not type(expected):
        return False
    if isinstance(found, (float, complex, set, frozenset)):
        return bool(_torch.exactly(found) == _torch.exactly(expected))
    if isinstance(found, dict):
        names = found.keys() == expected.keys()
        return names and all(v is expected[k] or _is_equal(v, expected[k]) for k, v in found.items())
    return bool(found == expected)


def _autocast_question(split: SplitGraph) -> Callable[[], bool]:
    """Asks whether autocast is on for a device of the trace."""
    kinds = {spec.device.type for spec in split.specs if spec is not None}
    if kinds == {"cuda"}:
        return torch.is_autocast_enabled  # of CUDA without an argument, in a quarter of the time
    known = list(filter(torch.amp.is_autocast_available, kinds))
    return lambda: any(map(torch.is_autocast_enabled, known))
