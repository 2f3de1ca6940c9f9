"""Between which bounds the elements of an integer result lie, so that indices stay inside their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    larger,
    never_larger,
    require,
)
from piecewise_graph.analysis.op_call import Call

BoundsOf = Callable[[Any], Bounds | None]
_READ = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # aminmax knows these
_FEW = 2**20  # elements that are read to find their bounds
_MANY = 2**24  # no run has so many tokens


def bounds_by_index(values: Sequence[Any]) -> dict[int, Bounds]:
    """Bounds of the elements that small integer tensors among `values` have now."""
    found = {}
    for index, value in enumerate(values):
        if (
            isinstance(value, Tensor)
            and value.dtype in _READ
            and 0 < value.numel() <= _FEW
            and not value.is_meta
        ):
            low, high = value.aminmax() if value.dtype != torch.bool else (0, 1)
            found[index] = replace(Bounds.of(int(low), int(high) + 1), stored=True)
    return found


def whole_range(size: Any) -> Bounds:
    """Every place of a dimension of `size` elements."""
    return Bounds.of(0, _torch.expression(size))


def running_bounds(claim: Claim, size: Any) -> Bounds | None:
    """Of running sums of `size` numbers that are not negative."""
    each = claim.anywhere
    if each is None or not each.low.is_nonnegative or not each.stop.is_Integer:
        return None
    return Bounds(each.low, (each.stop - 1) * _torch.expression(size) + 1, each.stored)


def require_inside(claim: Claim, size: Any, padding: Padding, *, from_end: bool) -> None:
    """No element of an index's tail leads out of a dimension of `size` elements; live ones are trusted.

    Args:
        from_end: negative indices count from the end; else they are outside.
    """
    if not claim.has_tail:
        return
    require(claim.tail is not None, "index may leave the table")
    assert claim.tail is not None
    low = padding.at_most(-claim.tail.low, size if from_end else 0)
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
    """The bounds of the result, where its type holds them, and the op's own type the operands'.

    torch casts a number to the type of the tensor beside it, and wraps it: as uint8, -1 is 255.
    """
    dtype = call.results[0].dtype
    compute = _BOUNDS.get(call.name.removeprefix("aten::"))
    kind = dtype
    if compute is _less:  # whose result is bool
        kind = torch.result_type(call.arguments["self"], call.arguments["other"])

    def cast(value: Any) -> Bounds | None:
        bounds = of(value)
        return None if bounds is None else held(bounds, kind, call.padding.largest)

    found = None if compute is None else compute(call, cast)
    stored = any(bounds is not None and bounds.stored for bounds in map(of, call.tensors))
    if dtype == torch.bool:  # what is stored decides no comparison
        return Bounds.of(0, 2) if found is None or stored else held(found, dtype, call.padding.largest)
    return None if found is None else held(replace(found, stored=stored), dtype, call.padding.largest)


def held(found: Bounds | None, dtype: torch.dtype, largest: int | None) -> Bounds | None:
    """The bounds of a result, computed as if no number were too large, where its type holds them.

    Args:
        largest: no run has more tokens; None where that is not known.
    """
    if dtype == torch.bool:  # true and true is true, not 2
        kept = found is not None and found.low.is_nonnegative and never_larger(found.stop, sympy.Integer(2))
        return found if kept else Bounds.of(0, 2)
    if found is None or dtype.is_floating_point or dtype.is_complex:
        return None
    kind = torch.iinfo(dtype)
    tokens = largest or _MANY
    fits = -_most(-found.low, tokens) >= kind.min and _most(found.stop, tokens) <= kind.max + 1
    return found if fits else None


def _most(value: sympy.Expr, tokens: int) -> sympy.Expr:
    """No smaller than `value`, a sum of numbers and of multiples of token counts, up to so many `tokens`."""
    most = sympy.Integer(0)
    for term, factor in value.as_coefficients_dict().items():
        counted = term.subs(dict.fromkeys(term.free_symbols, tokens))
        most += factor * counted if term == 1 or factor > 0 else 0
    return most


def _copied(call: Call, of: BoundsOf) -> Bounds | None:
    source = call.arguments.get("src", call.arguments.get("self"))
    known = isinstance(source, Tensor) and is_integer(source)
    keeps = known and (call.results[0].dtype != torch.bool or source.dtype == torch.bool)
    return of(source) if keeps else None


def _sum(call: Call, of: BoundsOf) -> Bounds | None:
    x, y, factor = of(call.arguments["self"]), of(call.arguments["other"]), call.arguments.get("alpha", 1)
    if x is None or y is None or factor not in (1, -1):
        return None
    if call.name == "aten::rsub":
        x, y = y, x
    y = y.negated if (call.name != "aten::add") != (factor == -1) else y
    return Bounds(x.low + y.low, x.stop + y.stop - 1)


def _negated(call: Call, of: BoundsOf) -> Bounds | None:
    x = of(call.arguments["self"])
    return None if x is None else x.negated


def _absolute(call: Call, of: BoundsOf) -> Bounds | None:
    """Of known bounds only: the least integer has no positive counterpart."""
    x = of(call.arguments["self"])
    stop = None if x is None else larger(x.stop, x.negated.stop)
    return None if stop is None else Bounds.of(0, stop)


def _product(call: Call, of: BoundsOf) -> Bounds | None:
    x, y = of(call.arguments["self"]), of(call.arguments["other"])
    zero = Bounds.of(0, 1)
    if zero in (x, y):  # integers have no NaN
        return zero
    if x is None or y is None:
        return None
    if not all(e.is_Integer for b in (x, y) for e in (b.low, b.stop)):
        return _masked(x, y) or _masked(y, x)
    ends = [a * b for a in (x.low, x.stop - 1) for b in (y.low, y.stop - 1)]
    return Bounds.of(min(ends), max(ends) + 1)


def _masked(count: Bounds, mask: Bounds) -> Bounds | None:
    """Of a number that is not negative times 0 or 1."""
    known = count.low.is_nonnegative and mask.low.is_nonnegative and never_larger(mask.stop, sympy.Integer(2))
    return Bounds.of(0, count.stop) if known else None


def _smaller(x: Bounds | None, y: Bounds | None) -> Bounds | None:
    """Of `min(x, y)`."""
    if x is None or y is None:
        return None
    low, stop = larger(-x.low, -y.low), x.stop if never_larger(x.stop, y.stop) else y.stop
    return None if low is None else Bounds(-low, stop)


def _greater(x: Bounds | None, y: Bounds | None) -> Bounds | None:
    """Of `max(x, y)`."""
    least = None if x is None or y is None else _smaller(x.negated, y.negated)
    return None if least is None else least.negated


def _clamp(call: Call, of: BoundsOf) -> Bounds | None:
    """Larger than `min` first, then smaller than `max`: known from both even if the source is not."""
    low, high = call.given("min"), call.given("max")
    source = of(call.arguments["self"])
    bounds = [None if end is None else of(end) for end in (low, high)]
    if source is None and None not in bounds:
        return _smaller(hull(bounds), bounds[1])  # never below `min`, but where `max` is
    if low is not None:
        source = _greater(source, bounds[0])
    return source if high is None else _smaller(source, bounds[1])


def _where(call: Call, of: BoundsOf) -> Bounds | None:
    return hull([of(call.arguments["self"]), of(call.given("other", "value"))])


def _remainder(call: Call, of: BoundsOf) -> Bounds | None:
    """The sign of a remainder is the divisor's."""
    divisor = of(call.arguments["other"])
    known = divisor is not None and never_larger(sympy.Integer(1), divisor.low)
    return Bounds.of(0, divisor.stop - 1) if known and divisor is not None else None


def _quotient(call: Call, of: BoundsOf) -> Bounds | None:
    x, divisor = of(call.arguments["self"]), call.arguments["other"]
    floors = call.name == "aten::floor_divide" or call.given("rounding_mode") == "floor"
    if x is None or not floors or not isinstance(divisor, int) or isinstance(divisor, torch.SymInt):
        return None
    if divisor < 1 or of(divisor) is None or not x.low.is_Integer:
        return None
    if x.stop.is_Integer:
        return Bounds(x.low // divisor, (x.stop - 1) // divisor + 1)
    factor, _ = x.stop.as_coeff_Mul()
    return Bounds(x.low // divisor, x.stop / divisor) if factor % divisor == 0 else None


def _bits_and(call: Call, of: BoundsOf) -> Bounds | None:
    """No larger than an operand that is not negative."""
    both = map(of, (call.arguments["self"], call.arguments["other"]))
    known = [b.stop for b in both if b is not None and never_larger(sympy.Integer(0), b.low)]
    return Bounds.of(0, known[0]) if known else None


def _less(call: Call, of: BoundsOf) -> Bounds | None:
    """`x < y`, and the other comparisons by it, where the bounds decide."""
    x, y = of(call.arguments["self"]), of(call.arguments["other"])
    if x is None or y is None:
        return None
    x, y = (y, x) if call.name in ("aten::gt", "aten::le") else (x, y)
    negated = call.name in ("aten::ge", "aten::le")  # x >= y: not x < y
    if never_larger(x.stop, y.low):
        return Bounds.of(0, 1) if negated else Bounds.of(1, 2)
    if never_larger(y.stop - 1, x.low):
        return Bounds.of(1, 2) if negated else Bounds.of(0, 1)
    return None


_BOUNDS: dict[str, Callable[[Call, BoundsOf], Bounds | None]] = {
    **dict.fromkeys(("clone", "alias", "detach", "_to_copy", "copy", "lift_fresh_copy"), _copied),
    "add": _sum,
    "sub": _sum,
    "rsub": _sum,
    "neg": _negated,
    "abs": _absolute,
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
    **dict.fromkeys(("lt", "gt", "le", "ge"), _less),
}
