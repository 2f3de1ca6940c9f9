"""What pg.freeze learns from one run of its example: how calls and results map to one trace."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import combinations
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.errors import FreezeError
from piecewise_graph.frontend.one_token import Signature
from piecewise_graph.frontend.state_lookup import state_of
from piecewise_graph.frontend.strides import plain_strides
from piecewise_graph.runtime.runtime import Runtime


@dataclass(frozen=True)
class Observed:
    """One run of the example: which runtime served it, what it got and returned, what the caller got."""

    runtime: Runtime
    args: Sequence[Any]
    outputs: Sequence[Any]
    result: Any


def observe(compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
    state = state_of(compiled)
    if state is None:
        compiled(*args, **kwargs)
        state = state_of(compiled)
    if state is None:
        raise FreezeError.no_trace(repr(compiled)[:80])
    with state.channel.observing() as seen:
        result = compiled(*args, **kwargs)
    if len(seen) != 1:
        raise FreezeError.not_one_graph(len(seen))
    (ran,) = seen
    if not isinstance(ran.trace, Runtime):
        raise FreezeError.not_split(ran.trace.blocked)
    if not ran.trace.program.contract.is_whole:
        raise FreezeError.steered()
    if ran.trace.program.changed:
        raise FreezeError.changes_objects(ran.trace.program.changed)
    return Observed(ran.trace, ran.args, ran.outputs, result)


Place = tuple[int, torch.Size, tuple[int, ...]]
Output = tuple[int | None, Any]
# Types whose value is their whole state.
_CONSTANTS = (
    type(None), int, float, complex, str, bytes, Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


@dataclass(frozen=True)
class FrozenTrace:
    """How calls map to one runtime.

    Attributes:
        template: the graph's arguments, with the weights in their places.
        inputs: (index of the leaf in the caller's arguments, index in the graph's arguments) of activations.
        symbols: (index in the graph's arguments, graph argument and dimension that it is the size of).
        outputs: per leaf of the result (index into the graph's outputs or None, constant).
        static: (index of the leaf in the caller's arguments, `place_of` it) of what graphs read there.
        structure: of the result.
        signatures: of the model's graphs so far, where pg.compile traced them (one_token.py).
    """

    runtime: Runtime
    template: tuple[Any, ...]
    inputs: tuple[tuple[int, int], ...]
    symbols: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int | None, Any], ...]
    static: tuple[tuple[int, Place | None], ...]
    structure: Any
    signatures: tuple[Signature, ...]

    @classmethod
    def of(cls, seen: Observed, leaves: Sequence[Any]) -> FrozenTrace:
        split = seen.runtime.program.split
        inputs, symbols, template = [], [], list(seen.args)
        for index, given in enumerate(split.inputs[: len(seen.args)]):
            if given.symbol is not None:
                symbols.append(_source_of(seen.runtime, index))
                template[index] = None
            elif given.spec is not None and not given.bound:
                inputs.append((_leaf_of(seen.args[index], leaves, given.name), index))
                template[index] = None
        outputs, structure = _map_outputs(seen, leaves)
        return cls(
            seen.runtime,
            tuple(template),
            tuple(inputs),
            tuple(symbols),
            tuple(outputs),
            _static_leaves(seen, leaves),
            structure,
            tuple(seen.runtime.state.signatures),
        )


def place_of(leaf: Any) -> Place | None:
    """Where a tensor lies, and which elements it is; None for anything else."""
    return (leaf.data_ptr(), leaf.shape, leaf.stride()) if isinstance(leaf, Tensor) else None


def state_of_object(leaf: Any) -> Any:
    """What can change in an argument that stays the same object: a set's elements, an object's constants.

    What its attributes hold in turn is taken for granted.
    """
    if isinstance(leaf, (set, bytearray)):
        return copy(leaf)
    if isinstance(leaf, (*_CONSTANTS, type, FunctionType, torch.nn.Module)):
        return None
    names = [field.name for field in fields(leaf)] if is_dataclass(leaf) else getattr(leaf, "__dict__", ())
    values = {name: getattr(leaf, name, None) for name in names}
    return {name: value for name, value in values.items() if isinstance(value, _CONSTANTS)} or None


def _static_leaves(seen: Observed, leaves: Sequence[Any]) -> tuple[tuple[int, Place | None], ...]:
    bound = [tensor for _, tensor in seen.runtime.program.bound_arguments(seen.args)]
    return tuple(
        (index, place_of(leaf))
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and any(leaf is tensor for tensor in bound)
    )


def _leaf_of(tensor: Tensor, leaves: Sequence[Any], name: str) -> int:
    """Which of the caller's leaves the graph's argument is."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and _same(plain_strides(leaf), tensor):
            return index
    raise FreezeError.unknown_input(name)


def check_distinct(leaves: Sequence[Any], names: Sequence[str]) -> None:
    """A tensor passed twice is one input of the graph, or two that nothing tells apart."""
    tensors = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)]
    for (one, first), (other, second) in combinations(tensors, 2):
        if _same(first, second) and first.numel():
            raise FreezeError.aliased(one, other)


def _same(leaf: Tensor, tensor: Tensor) -> bool:
    return leaf is tensor or (
        leaf.data_ptr() == tensor.data_ptr() and leaf.shape == tensor.shape and leaf.dtype == tensor.dtype
    )


def _source_of(runtime: Runtime, index: int) -> tuple[int, int, int]:
    contract, symbol = runtime.program.contract, runtime.program.split.inputs[index].symbol
    for argument, dim, expr in contract.dims:
        if expr == symbol and dim is not None:
            return index, argument, dim
    raise FreezeError.integer_argument(runtime.program.split.inputs[index].name)


def _map_outputs(seen: Observed, arguments: Sequence[Any]) -> tuple[list[Output], Any]:
    """What is no output of the graph is a constant, unless Dynamo's code makes it of such an output."""
    leaves, structure = _torch.flatten(seen.result, whole=torch.Size)
    returned = set(map(id, leaves))
    computes = any(isinstance(value, int) or id(value) not in returned for value in seen.outputs)
    found: list[Output] = []
    for leaf in leaves:
        places = [index for index, value in enumerate(seen.outputs) if value is leaf]
        if isinstance(leaf, Tensor) and not places:
            raise FreezeError.unknown_output(f"tensor of shape {tuple(leaf.shape)}")
        is_known = isinstance(leaf, (Tensor, torch.Size, torch.nn.Module, *_CONSTANTS))
        if not is_known and all(leaf is not given for given in arguments):
            raise FreezeError.unknown_output(type(leaf).__name__)
        if isinstance(leaf, torch.Size) or (computes and not isinstance(leaf, (Tensor, type(None)))):
            raise FreezeError.integer_output()
        found.append((places[0] if places else None, leaf if not places else None))
    return found, structure
