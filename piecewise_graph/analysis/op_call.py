"""One op as it ran on fake tensors, in the form that rules read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import (
    Claim,
    Dim,
    Mark,
    Padding,
    Role,
    is_symbolic,
    refuse,
    require,
)

State: TypeAlias = Claim | Mark | None


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one call of `op` by name, defaults filled in."""
    given = zip(op._schema.arguments, args, strict=False)
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return defaults | {a.name: value for a, value in given} | dict(kwargs)


@dataclass(frozen=True)
class Call:
    """One op with its arguments, results and the claims of its arguments.

    Attributes:
        name: "aten::add"; that of an in-place op is without the underscore.
        arguments: by name, defaults filled in.
        tensors: the tensors among the arguments, in order.
        results: the tensors that it returned.
        padding: which sizes are padded.
        state_of: what is known of a tensor.
    """

    op: Any
    name: str
    arguments: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    padding: Padding
    state_of: Callable[[Tensor], State]

    @classmethod
    def of(
        cls,
        op: Any,
        args: Any,
        kwargs: Any,
        result: Any,
        padding: Padding,
        state_of: Callable[[Tensor], State],
    ) -> Call:
        schema, arguments = op._schema, arguments_of(op, args, kwargs)
        name = schema.name[:-1] if schema.is_mutable and schema.name.endswith("_") else schema.name
        return cls(op, name, arguments, tensors_of((args, kwargs)), tensors_of(result), padding, state_of)

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The arguments that the schema says are written."""
        writes = [a.name for a in self.op._schema.arguments if a.alias_info and a.alias_info.is_write]
        return tensors_of([self.arguments.get(name) for name in writes])

    def writes(self, tensor: Tensor) -> bool:
        return any(tensor is other for other in self.written)

    @property
    def new(self) -> tuple[Tensor, ...]:
        """The results that are no written arguments."""
        return tuple(tensor for tensor in self.results if not self.writes(tensor))

    def given(self, *names: str) -> Any:
        """The first of these arguments that is not None."""
        return next((v for v in map(self.arguments.get, names) if v is not None), None)

    def claim(self, tensor: Tensor) -> Claim:
        """The claim of an argument whose elements are read."""
        claim = self.layout(tensor)
        require(claim.role is not Role.UNWRITTEN, "reads memory that nothing wrote")
        return claim

    def layout(self, tensor: Tensor) -> Claim:
        """The claim of an argument that is only arranged in another way; it may be unwritten."""
        state = self.state_of(tensor)
        if isinstance(state, Mark):
            refuse(f"reads the {state.kind} of a mixture's groups")
        if state is None:
            refuse("reads a value that is not clean")
        return state

    def reads_unwritten_alone(self) -> bool:
        """All that it reads is memory that nothing wrote, as where DTensor runs an op to learn of a shape."""
        states = [self.state_of(tensor) for tensor in self.tensors]
        unwritten = [isinstance(state, Claim) and state.role is Role.UNWRITTEN for state in states]
        return bool(states) and all(unwritten) and not self.written

    def mark(self, tensor: Any, kind: str) -> Mark | None:
        state = self.state_of(tensor) if isinstance(tensor, Tensor) else None
        return state if isinstance(state, Mark) and state.kind == kind else None

    def numbers_are_constant(self, *but: str) -> None:
        """No argument is a number that depends on a size: it would differ between the two runs."""
        for name, value in self.arguments.items():
            if name not in but:
                require(not any(map(is_symbolic, _torch.flatten(value)[0])), "size as a number")

    def dim_of(self, tensor: Tensor, name: str = "dim") -> int:
        """The dimension that an argument names, counted from 0."""
        return int(self.arguments[name]) % max(tensor.ndim, 1)

    def dims_of(self, value: Any, rank: int) -> list[int]:
        """Dimensions that an argument names, counted from 0; all of them for None and []."""
        if value is None or value == []:
            return list(range(rank))
        named = value if isinstance(value, (list, tuple)) else [value]
        return [int(dim) % max(rank, 1) for dim in named]

    def is_pointwise(self) -> bool:
        return torch.Tag.pointwise in self.op.tags and self.op.namespace in ("aten", "prims")

    def fresh(self, tensor: Tensor) -> tuple[Dim, ...]:
        """The dimensions of a result, read from its sizes."""
        return tuple(self.padding.dim(size) for size in tensor.shape)


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """The tensors in arguments or results, nested ones too."""
    return tuple(_leaves(value))


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))


def replaced(dims: Sequence[Dim], at: int, new: Dim) -> tuple[Dim, ...]:
    return (*dims[:at], new, *dims[at + 1 :])


def without(dims: Sequence[Dim], at: int) -> tuple[Dim, ...]:
    return (*dims[:at], *dims[at + 1 :])
