"""What is known of one value when rows are padded: its claim.

A segment runs on `n` tokens (exact) or on `B >= n` (padded, with anything in the rows past `n`, the tail).
A claim says which elements of the padded value are live, and states that each live element equals the element
of the exact value in the same place, for all n, B and tails. A value of which that cannot be said has no
claim.

The live elements are named per dimension. A dimension is a tuple of atoms in row-major order, or UNIFORM:

    ()                  size 1                        (8,)            size 8, all live
    (Tokens(s),)        s elements, n of them live    (Tokens(s), 2)  tokens times top_k, flattened
    (Tokens(s, 3, 3),)  s + 3 elements, the first n + 3 live (three constant rows, then tokens)
    (Sorted(7, ...),)   rows in the order of sort 7: an element is live where the row it came from is
    UNIFORM             as many elements as you like, all equal

Atoms carry their size symbol, so that two padded dimensions in one value stay apart.

Integers become indices, and a tail that leads out of a table is an illegal address. So an integer's claim
also says between which bounds its live elements and its tail lie. None is "not known"; the live elements of
an index are trusted to be legal, because the exact run uses the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import sympy
import torch
from torch import Tensor

from piecewise_graph import _torch


class Unproved(Exception):
    """A rule cannot show its result clean; the message says why."""


def require(condition: bool, why: str) -> None:
    if not condition:
        raise Unproved(why)


def refuse(why: str) -> NoReturn:
    raise Unproved(why)


@dataclass(frozen=True)
class Tokens:
    """`symbol + extra` elements, of which the first `symbol + live` are live; `live <= extra`."""

    symbol: sympy.Symbol
    extra: int = 0
    live: int = 0


@dataclass(frozen=True)
class Sorted:
    """Rows in the order of one sort; `number` tells sorts apart, `before` is the dimension that was
    sorted."""

    number: int
    before: tuple[int | Tokens, ...]


class Uniform(Enum):
    """All elements along the dimension are equal, at every size."""

    UNIFORM = "uniform"


UNIFORM: Literal[Uniform.UNIFORM] = Uniform.UNIFORM
Atom: TypeAlias = int | Tokens | Sorted
Dim: TypeAlias = tuple[Atom, ...] | Uniform


@dataclass(frozen=True)
class Bounds:
    """`low <= value < stop`. Either may count tokens (of the run that the value belongs to).

    Attributes:
        stored: they are those of a buffer's elements now. Others may be written: as indices they have to be
            legal too, but nothing may be concluded from their values.
    """

    low: sympy.Expr
    stop: sympy.Expr
    stored: bool = False

    @classmethod
    def of(cls, low: int | sympy.Expr, stop: int | sympy.Expr) -> Bounds:
        return cls(sympy.sympify(low), sympy.sympify(stop))

    @property
    def negated(self) -> Bounds:
        return Bounds(1 - self.stop, 1 - self.low, self.stored)


class Role(Enum):
    """What a few rules say to one another about an integer value."""

    COUNTING = "element i is i"
    PERMUTATION = "the order of a sort: each row's place before it, every place once"
    SORTED_KEYS = "the keys of a sort, ascending; bounds hold for live elements and tail"
    UNWRITTEN = "allocated, and nothing was written to it"


@dataclass(frozen=True)
class Claim:
    """The live elements of the padded value equal the exact value.

    Attributes:
        dims: which elements are live.
        live: of integers: bounds of the live elements.
        tail: of integers: bounds of all other elements of a padded run.
        points_into: of integers: each live element is, counted from 0, the place of a live element in such a
            dimension.
        role: for single rules.
    """

    dims: tuple[Dim, ...]
    live: Bounds | None = None
    tail: Bounds | None = None
    points_into: Dim | None = None
    role: Role | None = None

    @property
    def is_plain(self) -> bool:
        """Every dimension is constant, or its live elements are exactly the tokens: it can be narrowed."""
        return all(is_plain(dim) for dim in self.dims)

    @property
    def has_tail(self) -> bool:
        return any(dim is not UNIFORM and not is_constant(dim) for dim in self.dims)

    @property
    def anywhere(self) -> Bounds | None:
        """Bounds of every element, live or not."""
        return hull([self.live, self.tail]) if self.has_tail else self.live

    def with_dims(self, dims: Sequence[Dim]) -> Claim:
        """The same elements, arranged in another way; equal elements may become live ones and tail."""
        tail = self.anywhere if UNIFORM in self.dims or not self.has_tail else self.tail
        role = self.role if self.role is Role.UNWRITTEN else None
        return replace(self, dims=tuple(dims), tail=tail, role=role)


@dataclass(frozen=True)
class Mark:
    """A value that is not clean and yet means something to one rule (the sizes of a mixture's groups)."""

    kind: Literal["inverse", "counts", "offsets"]
    order: Dim


# --- dimensions -----------------------------------------------------------------------------------


def merged(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    """Atoms without ones, neighbouring constants multiplied."""
    result: list[Atom] = []
    for atom in atoms:
        if isinstance(atom, int) and result and isinstance(result[-1], int):
            result[-1] *= atom
        elif atom != 1:
            result.append(atom)
    return tuple(result)


def is_constant(dim: Dim) -> bool:
    """The size is a number, and all elements are live."""
    return dim is not UNIFORM and all(isinstance(atom, int) for atom in dim)


def is_plain(dim: Dim) -> bool:
    return dim is not UNIFORM and (is_constant(dim) or dim == (Tokens(_symbol(dim)),))


def leading_tokens(dim: Dim) -> Tokens | None:
    """The only atom of tokens (+ c); else None."""
    if dim is UNIFORM or len(dim) != 1 or not isinstance(dim[0], Tokens):
        return None
    return dim[0]


def keeps_places(dim: Dim) -> bool:
    """A live element has the same place at every size: no atom stands before the tokens."""
    return dim is not UNIFORM and (
        is_constant(dim) or (isinstance(dim[0], Tokens) and is_constant(tuple(dim[1:])))
    )


def _symbol(dim: tuple[Atom, ...]) -> Any:
    return next((atom.symbol for atom in dim if isinstance(atom, Tokens)), None)


def join(*dims: Dim) -> Dim:
    """The dimension of a broadcast result: what is live in all operands."""
    real = {dim for dim in dims if dim is not UNIFORM and dim != ()}
    if not real:
        return UNIFORM if UNIFORM in dims else ()
    counted = [leading_tokens(dim) for dim in real]
    if len({(t.symbol, t.extra) for t in counted if t is not None}) == 1 and None not in counted:
        return (min((t for t in counted if t is not None), key=lambda t: t.live),)
    require(len(real) == 1, "rows of different orders meet")
    return real.pop()


def broadcast(claims: Sequence[Claim]) -> tuple[Dim, ...]:
    """The dimensions of an elementwise result."""
    rank = max((len(claim.dims) for claim in claims), default=0)
    filled: list[tuple[Dim, ...]] = [((),) * (rank - len(c.dims)) + c.dims for c in claims]
    return tuple(join(*column) for column in zip(*filled, strict=True))


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Padding:
    """Which size symbols are padded, and how large they may get.

    Attributes:
        symbols: the size symbols that count tokens.
        largest: no run has more tokens than this; None where that is not known.
    """

    symbols: frozenset[sympy.Symbol]
    largest: int | None = None

    def dim(self, size: Any) -> tuple[Atom, ...]:
        """The dimension of a live value: a constant or exactly the tokens.

        Raises:
            Unproved: a derived size (2 * T, T + 1).
        """
        expr = _torch.expression(size)
        if expr in self.symbols:
            return (Tokens(expr),)
        require(expr.is_Integer, "derived size")
        return merged([int(expr)])

    def uniform(self, size: Any) -> Dim:
        """A dimension along which all elements are equal."""
        return UNIFORM if is_symbolic(size) else self.dim(size)

    def counted(self, size: Any) -> tuple[Atom, ...]:
        """The dimension of a value whose every element is live at every size: c, T + c or T * c elements."""
        expr = _torch.expression(size)
        for symbol in self.symbols:
            extra = expr - symbol
            if extra.is_Integer:
                return (Tokens(symbol, int(extra), int(extra)),)
        factor, counted = self.factors(size)
        require(len(counted) <= 1, "derived size")
        return merged([*(Tokens(symbol) for symbol in counted), factor])

    def prefix(self, size: Any, symbol: sympy.Symbol, live: int) -> tuple[Atom, ...]:
        """`symbol + c` elements, of which `symbol + live` would be live if there were as many."""
        extra = _torch.expression(size) - symbol
        require(extra.is_Integer, "derived size")
        return (Tokens(symbol, int(extra), min(live, int(extra))),)

    def factors(self, size: Any) -> tuple[int, list[sympy.Symbol]]:
        """(k, symbols) of a size that is k times token counts."""
        number, rest = _torch.expression(size).as_coeff_Mul()
        symbols: list[sympy.Symbol] = []
        for base, power in rest.as_powers_dict().items():
            if base != 1:
                require(base in self.symbols and power.is_Integer and power > 0, "derived size")
                symbols += [base] * int(power)
        require(number.is_Integer, "derived size")
        return int(number), symbols

    def at_most(self, bound: sympy.Expr, size: Any) -> bool:
        """`bound <= size` in every run."""
        return never_larger(bound, _torch.expression(size), self.largest)


def is_symbolic(value: Any) -> bool:
    """A number that depends on a size."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return not _torch.is_constant(value)
    return isinstance(value, torch.SymBool)


def regroup(claim: Claim, old: Sequence[Any], new: Sequence[Any], padding: Padding) -> Claim:
    """The claim of a view in row-major order, from sizes `old` to sizes `new`."""
    source = _Regrouping(claim, old, padding)
    return claim.with_dims([source.take(size) for size in new] + source.rest())


class _Regrouping:
    """Atoms of the old dimensions, taken in row-major order."""

    def __init__(self, claim: Claim, old: Sequence[Any], padding: Padding) -> None:
        self.padding = padding
        self.whole = [(dim, size) for dim, size in zip(claim.dims, old, strict=True) if dim != ()]
        self.begun: list[Atom] = []  # what is left of a dimension that was taken in part

    def take(self, size: Any) -> Dim:
        """The new dimension of `size` elements."""
        if not self.begun and self.whole:
            dim, old = self.whole[0]
            if _torch.expression(old) == _torch.expression(size):
                self.whole.pop(0)
                return dim
        factor, symbols = self.padding.factors(size)
        taken: list[Atom] = []
        while factor != 1 or symbols:
            atom = self._next()
            if isinstance(atom, Tokens) and atom == Tokens(atom.symbol) and atom.symbol in symbols:
                symbols.remove(atom.symbol)
                taken.append(atom)
            else:
                require(isinstance(atom, int) and atom > 1 and factor > 1, "view across rows")
                assert isinstance(atom, int)
                part = math.gcd(atom, factor)
                if part not in (atom, factor):  # constant dimensions side by side may be cut anew as one
                    self._join(atom)
                    continue
                factor //= part
                taken.append(part)
                if atom != part:
                    self.begun.insert(0, atom // part)
        return merged(taken)

    def _next(self) -> Atom:
        if not self.begun:
            require(bool(self.whole), "view across rows")
            dim, size = self.whole.pop(0)
            if dim is UNIFORM:  # equal elements are live wherever they lie
                factor, symbols = self.padding.factors(size)
                self.begun = [*map(Tokens, symbols), *([factor] if factor > 1 else [])]
            else:
                self.begun = list(dim)
        return self.begun.pop(0)

    def _join(self, atom: int) -> None:
        """Put `atom` back as one with the next one."""
        following = self._next()
        if not isinstance(following, int):
            refuse("view across rows")
        self.begun.insert(0, atom * following)

    def rest(self) -> list[Dim]:
        """Nothing, where all atoms were taken."""
        require(not self.begun and not self.whole, "view across rows")
        return []


# --- bounds of integers ---------------------------------------------------------------------------


def hull(bounds: Iterable[Bounds | None]) -> Bounds | None:
    """Bounds of a value that is one of several; None where one of them is not known."""
    result: Bounds | None = None
    for one in bounds:
        if one is None:
            return None
        if result is None:
            result = one
            continue
        low, stop = larger(-result.low, -one.low), larger(result.stop, one.stop)
        if low is None or stop is None:
            return None
        result = Bounds(-low, stop, result.stored or one.stored)
    return result


def larger(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """The larger of two numbers, where which one that is does not depend on the token count."""
    if never_larger(a, b):
        return b
    return a if never_larger(b, a) else None


def never_larger(a: sympy.Expr, b: sympy.Expr, largest: int | None = None) -> bool:
    """`a <= b` for all token counts from 1 to `largest` (None: without end)."""
    slack = 0
    for term, factor in (b - a).as_coefficients_dict().items():
        if term == 1 or (term.is_Symbol and factor > 0):
            slack += factor
        elif term.is_Symbol and largest is not None:
            slack += factor * largest
        else:
            return False
    return bool(slack >= 0)


# --- where claims begin ---------------------------------------------------------------------------


class Layout(Protocol):
    """A tensor, or the symbolic layout of one."""

    @property
    def shape(self) -> Sequence[Any]: ...

    @property
    def dtype(self) -> torch.dtype: ...


def live_claim(tensor: Layout, tokens: Iterable[sympy.Symbol]) -> Claim | None:
    """The claim of a value that was written by live rows alone, integers past them zero; None: derived size.

    A call's input is one, a splitting op's result, and what a region that runs on live rows returns.
    """
    padding = Padding(frozenset(tokens))
    try:
        dims = tuple(padding.dim(size) for size in tensor.shape)
    except Unproved:
        return None
    zero = is_integer(tensor) and not all(map(is_constant, dims))
    return Claim(dims, boolean_bounds(tensor), Bounds.of(0, 1) if zero else None)


def stored_claim(tensor: Layout, stored: Tensor | None = None) -> Claim | None:
    """The claim of a weight or buffer: all of it is live; None where a size is symbolic.

    Args:
        stored: the real tensor, of integers that nobody changes; they may serve as indices (position ids).
    """
    claim = live_claim(tensor, ())
    if claim is None or stored is None or not is_integer(tensor) or stored.numel() == 0:
        return claim
    return replace(claim, live=Bounds.of(int(stored.min()), int(stored.max()) + 1))


def is_integer(tensor: Layout) -> bool:
    """Integers and booleans."""
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def boolean_bounds(tensor: Layout) -> Bounds | None:
    return Bounds.of(0, 2) if tensor.dtype == torch.bool else None
