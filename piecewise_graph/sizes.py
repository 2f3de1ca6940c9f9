"""Symbolic sizes: what a tensor's shape is at a token count, and for which calls a trace is valid."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.errors import InputError

_MOST_VIOLATIONS = 4096  # that a contract remembers

Sizes = Mapping[sympy.Symbol, int]
Range = tuple[int | None, int | None]


@dataclass(frozen=True)
class TensorSpec:
    """dtype, device and symbolic layout of a tensor that flows between steps."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        shape = tuple(_torch.expression(size) for size in tensor.shape)
        stride = tuple(_torch.expression(step) for step in tensor.stride())
        return cls(tensor.dtype, _torch.device_of(tensor), shape, stride)

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Of its sizes and strides."""
        return set().union(*(size.free_symbols for size in (*self.shape, *self.stride)))

    def token_dims(self, token: sympy.Symbol | None) -> tuple[int, ...]:
        """Dimensions that are exactly the token count: those that can be narrowed."""
        return tuple(dim for dim, size in enumerate(self.shape) if size == token)

    def is_derived(self, token: sympy.Symbol | None) -> bool:
        """Some size depends on the token count without being it (B*T, T+1): not narrowable."""
        return any(size != token and token in size.free_symbols for size in self.shape)

    def strides_vary(self, token: sympy.Symbol | None) -> bool:
        """Strides that matter depend on the token count: fewer tokens are no view of more in this layout."""
        pairs = zip(self.shape, self.stride, strict=True)
        return any(size != 1 and token in step.free_symbols for size, step in pairs)

    def with_numbers(self, sizes: Sizes) -> TensorSpec:
        """With these symbols taken for numbers."""
        shape = tuple(substitute(size, sizes) for size in self.shape)
        return replace(self, shape=shape, stride=tuple(substitute(step, sizes) for step in self.stride))

    def shape_at(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(evaluate(size, sizes) for size in self.shape)

    def stride_at(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(evaluate(step, sizes) for step in self.stride)

    def overlaps(self, sizes: Sizes) -> bool:
        """Elements of different places share memory (windows that overlap); expanded dimensions aside."""
        dims = zip(self.stride_at(sizes), self.shape_at(sizes), strict=True)
        end = 0  # of what the dimensions of smaller steps reach
        for step, size in sorted(dim for dim in dims if dim[0] > 0 and dim[1] > 1):
            if step <= end:
                return True
            end += (size - 1) * step
        return False

    def storage_numel(self, sizes: Sizes) -> int:
        """Elements that a buffer of this layout spans."""
        shape, stride = self.shape_at(sizes), self.stride_at(sizes)
        if 0 in shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))

    def empty(self, sizes: Sizes) -> Tensor:
        return torch.empty_strided(
            self.shape_at(sizes), self.stride_at(sizes), dtype=self.dtype, device=self.device
        )


def same_layout(tensor: Tensor, strides: Sequence[int]) -> bool:
    """Strides are equal where they matter: in dimensions of more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    return all(found == wanted for size, found, wanted in pairs if size > 1)


def evaluate(expr: sympy.Basic, sizes: Sizes) -> int:
    """The value of a size expression: an integer, of a condition a bool."""
    if expr.is_Integer:
        return int(expr)
    value = sizes.get(expr)  # most expressions are the token symbol itself
    return _computed(expr, tuple(sizes.items())) if value is None else value


@lru_cache(maxsize=4096)
def _computed(expr: sympy.Basic, sizes: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    """The layers of a model ask for the same strides over and over."""
    value = substitute(expr, dict(sizes))
    return bool(value) if value.is_Boolean else int(value)


def substitute(expr: sympy.Basic, sizes: Mapping[sympy.Symbol, int | sympy.Symbol]) -> sympy.Basic:
    return expr.xreplace({symbol: sympy.sympify(value) for symbol, value in sizes.items()})


def is_scalar(value: Any) -> bool:
    """Integers, sizes, symbolic floats and booleans, and tuples of them."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(is_scalar, value))
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def in_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of `tensor` in these strides, also where elements share memory by them."""
    made = torch.empty_strided(tuple(tensor.shape), strides, dtype=tensor.dtype, device=tensor.device)
    overwrite(made, tensor)
    return made


def overwrite(destination: Tensor, source: Tensor) -> None:
    """`destination.copy_(source)`, where `destination` may be expanded (a dimension of stride 0)."""
    destination, source = each_once(destination, source)
    destination.copy_(source)


@contextmanager
def kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """The tensors are at the end of the block what they are at its beginning."""
    copies = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode(), torch.no_grad():  # only there may what was made there be written
            for tensor, copy in zip(tensors, copies, strict=True):
                overwrite(tensor, copy)


def each_once(destination: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Views of both in which `destination` has every element once, for `copy_`.

    copy_ refuses to write one memory location twice; the first of equal elements is enough.
    """
    for dim in repeated_dims(destination):
        destination, source = destination.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    return destination, source


def repeated_dims(tensor: Tensor) -> list[int]:
    """Dimensions along which all elements are one (stride 0)."""
    pairs = enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    return [dim for dim, (size, step) in pairs if step == 0 and size > 1]


class ShapeMiss(InputError):
    """A call reached a trace that is not valid for its shapes; pg.compile answers with another trace.

    Attributes:
        sizes_differ: dimensions differ that were equal when the trace was made, or strides do.
    """

    def __init__(self, what: str, *, sizes_differ: bool) -> None:
        shown = InputError.shape_contract(what)
        super().__init__(shown.what, shown.remedy)
        self.sizes_differ = sizes_differ


@dataclass(frozen=True)
class ShapeContract:
    """For which arguments a trace is valid, as far as sizes go (Note [One trace] in frontend/compile.py).

    Attributes:
        symbols: the size symbols of the trace, the token symbol first where there is one.
        sources: where each symbol's value is read: (argument index, dim), dim None for an int argument.
        dims: (argument index, dim, expression) of every size of an argument that Dynamo made a symbol of, and
            of every int argument, whose dim is None. The expression of one that it found to be the same in
            every call is a number.
        guards: conditions over the symbols that the trace relies on.
        ranges: (lowest, highest) of each symbol, None where unbounded.
        names: argument names, for messages.
        is_whole: no other size or number, and no Python before the trace, chose what was traced; where one
            did, only Dynamo's guards check it.
        strides: (argument index, strides) of arguments of which the trace does something else with other
            strides, or whose elements share memory by them; of all where one is written.
    """

    symbols: tuple[sympy.Symbol, ...]
    sources: tuple[tuple[int, int | None], ...]
    dims: tuple[tuple[int, int | None, sympy.Expr], ...]
    guards: tuple[sympy.Basic, ...]
    ranges: tuple[Range, ...]
    names: tuple[str, ...]
    is_whole: bool
    strides: tuple[tuple[int, tuple[sympy.Expr, ...]], ...] = ()

    def with_numbers(self, sizes: Sizes) -> ShapeContract:
        """With these symbols taken for numbers that are in their ranges."""
        left = [index for index, symbol in enumerate(self.symbols) if symbol not in sizes]
        guards = (substitute(guard, sizes) for guard in self.guards)
        return replace(
            self,
            symbols=tuple(self.symbols[index] for index in left),
            sources=tuple(self.sources[index] for index in left),
            dims=tuple((index, dim, substitute(expr, sizes)) for index, dim, expr in self.dims),
            strides=tuple((i, tuple(substitute(step, sizes) for step in steps)) for i, steps in self.strides),
            guards=tuple(guard for guard in guards if guard != sympy.true),
            ranges=tuple(self.ranges[index] for index in left),
        )

    def with_strides(self, specs: Iterable[tuple[int, TensorSpec]]) -> ShapeContract:
        """The same, and these are the arguments whose strides are compared."""
        return replace(self, strides=tuple((index, spec.stride) for index, spec in specs))

    def admit(self, args: Sequence[Any]) -> Sizes:
        """The value of each symbol in this call, which the trace is valid for.

        Raises:
            ShapeMiss: it is not.
        """
        sizes = self.read_sizes(args)
        differing = self.dim_violation(args, sizes) or self._stride_violation(args, sizes)
        violation = differing or self.size_violation(sizes)
        if violation is not None:
            raise ShapeMiss(violation, sizes_differ=differing is not None)
        return sizes

    @cached_property
    def _violations(self) -> dict[tuple[int, ...], str | None]:
        """What `size_violation` said, by sizes: to evaluate a guard is slow."""
        return {}

    def read_sizes(self, args: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The value of each symbol in this call."""
        return {
            symbol: _size(args, index, dim)
            for symbol, (index, dim) in zip(self.symbols, self.sources, strict=True)
        }

    def dim_violation(self, args: Sequence[Any], sizes: Sizes) -> str | None:
        """Which argument has another size than the trace says it has at `sizes`; None when all agree."""
        for index, dim, expr in self.dims:
            found, expected = _size(args, index, dim), evaluate(expr, sizes)
            if found != expected:
                return InputError.other_size(self.names[index], dim, found, expected)
        return None

    def _stride_violation(self, args: Sequence[Any], sizes: Sizes) -> str | None:
        for index, strides in self.strides:
            expected = tuple(evaluate(step, sizes) for step in strides)
            if not same_layout(args[index], expected):
                return InputError.other_strides(self.names[index], args[index].stride(), expected)
        return None

    def size_violation(self, sizes: Sizes) -> str | None:
        """Why the trace is not valid at `sizes` (a call's or a bucket's); None when it is."""
        key = tuple(sizes.values())
        if key not in self._violations:
            if len(self._violations) >= _MOST_VIOLATIONS:
                self._violations.clear()
            self._violations[key] = next(self._violated(sizes), None)
        return self._violations[key]

    def outside_ranges(self, sizes: Sizes) -> Iterator[str]:
        """Which of these sizes, of some symbols or all, the trace is not valid for by itself."""
        for symbol, (low, high) in zip(self.symbols, self.ranges, strict=True):
            value = sizes.get(symbol, low)
            if value is None:
                continue
            if (low is not None and value < low) or (high is not None and value > high):
                yield InputError.outside_range(value, range_text((low, high)))

    def _violated(self, sizes: Sizes) -> Iterator[str]:
        yield from self.outside_ranges(sizes)
        for guard in self.guards:
            if not _may_hold(guard, sizes):
                yield InputError.guard_not_met(guard, sizes)


def _may_hold(guard: sympy.Basic, sizes: Sizes) -> bool:
    """Where a guard cannot be evaluated (it divides by T - 1), the trace is not valid."""
    try:
        return substitute(guard, sizes) != sympy.false
    except (ZeroDivisionError, AssertionError):  # AssertionError: torch's Mod of a negative number
        return False


def _size(args: Sequence[Any], index: int, dim: int | None) -> Any:
    """A size of a tensor among a call's arguments, or a number there."""
    return args[index] if dim is None else args[index].shape[dim]


def range_text(bounds: Range) -> str:
    """`2 to 32 tokens`, `2 tokens or more`, `1 token or more`."""
    low, high = bounds
    return f"{low} token{'s' * (low != 1)} or more" if high is None else f"{low} to {high} tokens"


def relaxed_range(bounds: Range) -> Range:
    """Let a range that starts at 2 only because torch assumes so start at 1.

    For the token count, which pg.compile checks at one token, and for every size of a model that is trusted.
    Another size that is 1 has a trace of its own. A range of 2 alone was found while compiling, and stays.
    """
    low, high = bounds
    return (1, high) if low == 2 != high else bounds
