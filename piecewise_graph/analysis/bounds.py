"""Between which bounds the elements of an integer result lie, so that indices stay inside their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import (
    UNIFORM,
    Bounds,
    Claim,
    Dim,
    Padding,
    hull,
    is_constant,
    is_integer,
    never_larger,
    require,
)
from piecewise_graph.analysis.op_call import Call

BoundsOf = Callable[[Any], Bounds | None]


def whole_range(size: Any) -> Bounds:
    """Every place of a dimension of `size` elements."""
    return Bounds.of(0, _torch.expression(size))


def require_inside(claim: Claim, size: Any, padding: Padding) -> None:
    """No element of an index's tail leads out of a dimension of `size` elements; live ones are trusted."""
    if not claim.has_tail:
        return
    require(claim.tail is not None, "index may leave the table")
    assert claim.tail is not None
    low = padding.at_most(sympy.Integer(-claim.tail.low), size)
    require(low and padding.at_most(claim.tail.stop, size), "index may leave the table")


def elementwise_bounds(
    call: Call, claims: Sequence[Claim], dims: Sequence[Dim]
) -> tuple[Bounds | None, Bounds | None]:
    """Bounds of an elementwise integer result: of its live elements, and of its tail.

    A place in the result's tail may be live in an operand that lacks some of the result's token dimensions.
    """
    tokens = {dim for dim in dims if dim is not UNIFORM and not is_constant(dim)}
    by_tensor = dict(zip(map(id, call.tensors), claims, strict=False))

    def live(value: Any) -> Bounds | None:
        return by_tensor[id(value)].live if isinstance(value, Tensor) else _of_number(value)

    def tail(value: Any) -> Bounds | None:
        if not isinstance(value, Tensor):
            return _of_number(value)
        claim = by_tensor[id(value)]
        return claim.tail if len(claim.dims) == len(dims) and claim.dims == tuple(dims) else claim.anywhere

    return _fitting(call, live), (_fitting(call, tail) if tokens else None)


def _of_number(value: Any) -> Bounds | None:
    is_whole = isinstance(value, (bool, int)) and not isinstance(value, torch.SymInt)
    return Bounds.of(int(value), int(value) + 1) if is_whole else None


def _fitting(call: Call, of: BoundsOf) -> Bounds | None:
    """The bounds of the result, where its type holds them."""
    dtype = call.results[0].dtype
    if dtype == torch.bool:
        return Bounds.of(0, 2)
    compute = _BOUNDS.get(call.name.removeprefix("aten::"))
    found = None if compute is None else compute(call, of)
    if found is None:
        return None
    kind = torch.iinfo(dtype)
    wide = kind.bits >= 32 and not found.stop.is_Integer
    fits = found.low >= kind.min and (wide or never_larger(found.stop, sympy.Integer(kind.max) + 1))
    return found if fits else None


def _copied(call: Call, of: BoundsOf) -> Bounds | None:
    source = call.arguments.get("src", call.arguments.get("self"))
    return of(source) if isinstance(source, Tensor) and is_integer(source) else None


def _sum(call: Call, of: BoundsOf) -> Bounds | None:
    x, y, factor = of(call.arguments["self"]), of(call.arguments["other"]), call.arguments.get("alpha", 1)
    if x is None or y is None or factor not in (1, -1):
        return None
    negate = (call.name == "aten::sub") != (factor == -1)
    if negate:
        if not y.stop.is_Integer:
            return None
        y = Bounds.of(1 - int(y.stop), 1 - y.low)
    return Bounds(x.low + y.low, x.stop + y.stop - 1)


def _product(call: Call, of: BoundsOf) -> Bounds | None:
    x, y = of(call.arguments["self"]), of(call.arguments["other"])
    zero = Bounds.of(0, 1)
    if zero in (x, y):  # integers have no NaN
        return zero
    if x is None or y is None or not (x.stop.is_Integer and y.stop.is_Integer):
        return None
    ends = [a * b for a in (x.low, int(x.stop) - 1) for b in (y.low, int(y.stop) - 1)]
    return Bounds.of(min(ends), max(ends) + 1)


def _smaller(x: Bounds | None, y: Bounds | None) -> Bounds | None:
    if x is None or y is None:
        return None
    stop = x.stop if never_larger(x.stop, y.stop) else y.stop
    return Bounds(min(x.low, y.low), stop)


def _greater(x: Bounds | None, y: Bounds | None) -> Bounds | None:
    both = hull([x, y])
    if both is None or x is None or y is None:
        return None
    return Bounds(max(x.low, y.low), both.stop)


def _clamp(call: Call, of: BoundsOf) -> Bounds | None:
    """Larger than `min` first, then smaller than `max`: known from both even if the source is not."""
    low, high = call.given("min"), call.given("max")
    source = of(call.arguments["self"])
    bounds = [None if end is None else of(end) for end in (low, high)]
    if source is None and None not in bounds:
        least, most = bounds
        assert least is not None and most is not None
        return Bounds(min(least.low, most.low), most.stop)
    if low is not None:
        source = _greater(source, bounds[0])
    return source if high is None else _smaller(source, bounds[1])


def _where(call: Call, of: BoundsOf) -> Bounds | None:
    return hull([of(call.arguments["self"]), of(call.given("other", "value"))])


def _remainder(call: Call, of: BoundsOf) -> Bounds | None:
    """The sign of a remainder is the divisor's."""
    divisor = of(call.arguments["other"])
    if divisor is None or divisor.low < 1:
        return None
    return Bounds(0, divisor.stop - 1)


def _quotient(call: Call, of: BoundsOf) -> Bounds | None:
    x, divisor = of(call.arguments["self"]), call.arguments["other"]
    floors = call.name == "aten::floor_divide" or call.given("rounding_mode") == "floor"
    if x is None or not floors or not isinstance(divisor, int) or isinstance(divisor, torch.SymInt):
        return None
    if divisor < 1:
        return None
    if x.stop.is_Integer:
        return Bounds.of(x.low // divisor, (int(x.stop) - 1) // divisor + 1)
    factor, _ = x.stop.as_coeff_Mul()
    return Bounds(x.low // divisor, x.stop / divisor) if factor % divisor == 0 else None


def _bits_and(call: Call, of: BoundsOf) -> Bounds | None:
    """No larger than an operand that is not negative."""
    known = [b for b in map(of, (call.arguments["self"], call.arguments["other"])) if b and b.low >= 0]
    return Bounds(0, min((b.stop for b in known), key=str)) if known else None


_BOUNDS: dict[str, Callable[[Call, BoundsOf], Bounds | None]] = {
    **dict.fromkeys(("clone", "alias", "detach", "_to_copy", "copy", "lift_fresh_copy"), _copied),
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "minimum": lambda call, of: _smaller(of(call.arguments["self"]), of(call.arguments["other"])),
    "maximum": lambda call, of: _greater(of(call.arguments["self"]), of(call.arguments["other"])),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "where": _where,
    "masked_fill": _where,
    "remainder": _remainder,
    "floor_divide": _quotient,
    "div": _quotient,
    "bitwise_and": _bits_and,
}
