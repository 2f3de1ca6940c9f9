"""Every rule of the padding proof, each with the reason why it is sound.

A rule is given one op whose arguments have claims (claims.py): each live element of the padded argument
equals the exact one. It returns the claims of the results, or raises Unproved. To check a rule, ask of each
live element of the result: which elements of the arguments does the op read for it? They must be live, and
found in the same way at every size. "The rows of a dimension are independent" below means: the op reads, for
an element of the result, only elements of its arguments with the same place in that dimension.

Equal means equal up to the rounding by which kernels for different sizes differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.analysis.bounds import (
    elementwise_bounds,
    held,
    require_inside,
    running_bounds,
    whole_range,
)
from piecewise_graph.analysis.claims import (
    UNIFORM,
    Bounds,
    Claim,
    Dim,
    Mark,
    Role,
    Sorted,
    broadcast,
    hull,
    is_constant,
    is_integer,
    is_symbolic,
    join,
    keeps_places,
    leading_tokens,
    merged,
    regroup,
    require,
)
from piecewise_graph.analysis.op_call import Call, State, replaced, without

Rule = Callable[[Call], "State | Sequence[State]"]
RULES: dict[str, Rule] = {}

# Elementwise, though torch does not tag them.
POINTWISE = {
    *("floor_divide", "polar", "complex", "_conj", "_neg_view", "_prelu_kernel", "masked_fill"),
    *("_to_copy", "clone", "lift_fresh_copy", "hardswish"),
}
_orders = itertools.count()


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function for ops of aten, or of the namespace that a name carries."""

    def register(function: Rule) -> Rule:
        RULES.update({n if "::" in n else f"aten::{n}": function for n in names.split()})
        return function

    return register


def find(call: Call) -> Rule | None:
    """The rule for an op of torch."""
    found = RULES.get(call.name)
    if found is not None:
        return found
    return pointwise if call.is_pointwise() or call.name.removeprefix("aten::") in POINTWISE else None


# --- elementwise ----------------------------------------------------------------------------------


def pointwise(call: Call) -> Sequence[State]:
    """An element of the result is computed from the elements of the same place, and from numbers.

    A place is live in the result where it is live in all operands. NaN in a tail stays in the tail.
    """
    call.numbers_are_constant()
    claims = [call.claim(tensor) for tensor in call.tensors]
    dims, result = broadcast(claims), call.results[0]
    points, role = None, None
    if len(claims) == 1 and is_integer(call.tensors[0]):
        points, role = _kept_places(call, claims[0]), _kept_role(call, claims[0])
    live, tail = elementwise_bounds(call, claims, dims) if is_integer(result) else (None, None)
    if role is Role.SORTED_KEYS:  # they may be cast to floats to be counted
        live, tail = claims[0].live, claims[0].tail
    return [Claim(dims, live, tail, points, role)] * len(call.results)


def _kept_places(call: Call, claim: Claim) -> Dim | None:
    """A copy points where the original does; the place of (token, k) divided by k is that of the token."""
    copies = call.name in ("aten::clone", "aten::_to_copy")
    copies |= call.name in ("aten::add", "aten::sub") and call.given("other") == 0
    if copies and call.results[0].dtype in (torch.int64, torch.int32):
        return claim.points_into
    floors = call.name == "aten::floor_divide" or call.given("rounding_mode") == "floor"
    into = claim.points_into
    if floors and into is not None and into is not UNIFORM and len(into) > 1:
        return tuple(into[:-1]) if into[-1] == call.given("other") else None
    return None


def _kept_role(call: Call, claim: Claim) -> Role | None:
    """Copies keep a role; small keys keep theirs as floats that are exact."""
    if call.name not in ("aten::clone", "aten::_to_copy"):
        return None
    exact = (torch.int64, torch.int32, torch.float32, torch.float64)
    same = call.results[0].dtype == call.tensors[0].dtype
    casts = claim.role is Role.SORTED_KEYS and call.results[0].dtype in exact
    return claim.role if same or casts else None


@rule("_c10d_functional::all_reduce _c10d_functional::wait_tensor piecewise::all_reduce")
def across_ranks(call: Call) -> Sequence[State]:
    """An element of the result is made of the elements of the same place on every rank.

    Collectives of ranks with different sizes are illegal, so all ranks pad alike.
    """
    call.numbers_are_constant()
    return [Claim(call.claim(call.tensors[0]).dims)]


@rule("piecewise::all_gather")
def parts_of_ranks(call: Call) -> Sequence[State]:
    """Parts of a dimension without tokens, one after another; the rows of others are independent."""
    call.numbers_are_constant()
    source, dim = call.tensors[0], call.dim_of(call.tensors[0])
    claim = call.claim(source)
    require(is_constant(claim.dims[dim]), "gathers tokens")
    return [Claim(replaced(claim.dims, dim, call.fresh(call.results[0])[dim]))]


@rule("native_dropout")
def dropout(call: Call) -> Sequence[State]:
    """Outside of training it copies."""
    require(call.given("train") is False, "random")
    dims = call.claim(call.tensors[0]).dims
    return [Claim(dims), Claim(dims, Bounds.of(0, 2), Bounds.of(0, 2))]


@rule("bucketize")
def bucketize(call: Call) -> State:
    """Each element is looked up in the same boundaries: constants, not rows."""
    call.numbers_are_constant()
    boundaries = call.claim(call.arguments["boundaries"])
    require(all(map(is_constant, boundaries.dims)), "boundaries are rows")
    dims = call.claim(call.arguments["self"]).dims if isinstance(call.arguments["self"], Tensor) else ()
    found = whole_range(call.arguments["boundaries"].shape[0] + 1)
    return Claim(dims, found, found)


@rule("glu")
def glu(call: Call) -> State:
    """Halves of one constant dimension are multiplied; the rows of the others are independent."""
    claim, dim = call.claim(call.tensors[0]), call.dim_of(call.tensors[0])
    require(is_constant(claim.dims[dim]), "over tokens")
    return Claim(replaced(claim.dims, dim, call.padding.dim(call.results[0].shape[dim])))


# --- views ----------------------------------------------------------------------------------------


@rule("view _unsafe_view reshape view_copy _reshape_copy")
def view(call: Call) -> State:
    """The elements keep their row-major order; `regroup` finds the atoms of each new dimension."""
    source, result = call.arguments["self"], call.results[0]
    claim = call.layout(source)
    if call.arguments.get("dtype") is not None:  # other bits; places along the last dimension may merge
        require(not claim.dims or is_constant(claim.dims[-1]), "view across rows")
        return Claim((*claim.dims[:-1], *(call.padding.dim(n) for n in result.shape[-1:])))
    return regroup(claim, source.shape, result.shape, call.padding)


@rule("alias detach")
def same(call: Call) -> State:
    """The same elements in the same places, with all that is known of them."""
    return call.state_of(call.tensors[0])


@rule("view_as_complex view_as_real")
def complex_view(call: Call) -> State:
    """A pair of floats is one complex number: the last dimension, of size 2, comes or goes."""
    dims = call.layout(call.tensors[0]).dims
    return Claim(dims[:-1] if call.name.endswith("complex") else (*dims, (2,)))


@rule("permute transpose t numpy_T")
def permute(call: Call) -> State:
    """Dimensions change places."""
    claim, rank = call.layout(call.tensors[0]), call.tensors[0].ndim
    order = list(range(rank))
    if "dims" in call.arguments:
        order = call.dims_of(call.arguments["dims"], rank)
    elif rank > 1:
        first, second = (int(call.arguments.get(n, i)) % rank for i, n in enumerate(("dim0", "dim1")))
        order[first], order[second] = second, first
    return claim.with_dims([claim.dims[dim] for dim in order])


@rule("unsqueeze")
def unsqueeze(call: Call) -> State:
    """A dimension of size 1 comes in."""
    claim, at = call.layout(call.tensors[0]), call.dim_of(call.results[0])
    return claim.with_dims((*claim.dims[:at], (), *claim.dims[at:]))


@rule("squeeze")
def squeeze(call: Call) -> State:
    """Dimensions of size 1 go."""
    return regroup(call.layout(call.tensors[0]), call.tensors[0].shape, call.results[0].shape, call.padding)


@rule("expand expand_copy")
def expand(call: Call) -> State:
    """Dimensions of size 1 are repeated: all elements along them are equal. The others stay."""
    source, result = call.tensors[0], call.results[0]
    claim, new = call.layout(source), result.ndim - source.ndim
    dims: list[Dim] = [call.padding.uniform(size) for size in result.shape[:new]]
    for dim, old, size in zip(claim.dims, source.shape, result.shape[new:], strict=True):
        dims.append(call.padding.uniform(size) if dim == () and not is_symbolic(old) else dim)
    return claim.with_dims(dims)


@rule("repeat")
def repeat(call: Call) -> State:
    """Copies of the whole dimension follow one another: the copy is the first atom."""
    source, result = call.tensors[0], call.results[0]
    claim, dims = call.claim(source), []
    old: tuple[Dim, ...] = ((),) * (result.ndim - source.ndim) + claim.dims
    for dim, times, size in zip(old, call.arguments["repeats"], result.shape, strict=True):
        if dim is UNIFORM or dim == ():
            dims.append(call.padding.uniform(size))
        else:
            dims.append(dim if times == 1 else merged([*call.padding.dim(times), *dim]))
    if any(map(is_symbolic, call.arguments["repeats"])):  # copies past the tokens, of live elements too
        claim = replace(claim, tail=claim.anywhere)
    return claim.with_dims(dims)


def _require_fixed(source: Tensor, at: int, place: Any) -> None:
    """Of equal elements any may be read, but the view may be written: its place is counted from the front.

    Repeated memory (stride 0) is one place.
    """
    fixed = not is_symbolic(place) and place >= 0
    require(fixed or _torch.expression(source.stride(at)) == 0, "counts from the end")


@rule("slice")
def slice_(call: Call) -> State:
    """A part of a dimension that is found from its front, with live elements only where it says so.

    A part that is counted from the end, or by a size, is another part at another size.
    """
    source, result, start = call.arguments["self"], call.results[0], call.arguments["start"] or 0
    claim, at = call.layout(source), call.dim_of(call.results[0])
    dim, size, step = claim.dims[at], result.shape[at], call.arguments["step"]
    if _torch.expression(size) == _torch.expression(source.shape[at]) and step == 1:
        return claim
    if dim is UNIFORM:
        _require_fixed(source, at, start)
        return claim.with_dims(replaced(claim.dims, at, call.padding.uniform(size)))
    require(not is_symbolic(start) and not is_symbolic(step), "slice by a size")
    tokens, new = leading_tokens(dim), None
    if tokens is not None:
        require(start >= 0 and step == 1, "slice from the end")
        if is_symbolic(size):
            new = call.padding.prefix(size, tokens.symbol, tokens.live - start)
            kept = leading_tokens(new)
            if kept is None or kept.live < tokens.live - start:  # live elements lie in a padded run's tail
                claim = replace(claim, tail=claim.anywhere)
        else:  # every size has its first row; whether it has more, the trace may not have asked
            require(start + size <= 1 + tokens.live and (call.given("end") or 0) >= 0, "slice of tokens")
    else:
        require(is_constant(dim), "slice of tokens")
        counted = is_symbolic(size) or is_symbolic(call.arguments["end"])
        require(not counted or (start >= 0 and step == 1), "slice by a size")
        new = call.padding.counted(size) if is_symbolic(size) else None
        require(new is None or leading_tokens(new) is not None, "derived size")
        claim = replace(claim, tail=claim.anywhere)  # the longer prefix of a padded run
    return claim.with_dims(replaced(claim.dims, at, call.padding.dim(size) if new is None else new))


@rule("select")
def select(call: Call) -> State:
    """A constant dimension is indexed by a number. Of tokens the first is live at every size, no other."""
    claim, at, index = call.layout(call.tensors[0]), call.dim_of(call.tensors[0]), call.arguments["index"]
    dim, tokens = claim.dims[at], leading_tokens(claim.dims[at])
    first = tokens is not None and index == 0 and tokens.live >= 0
    if dim is UNIFORM:
        _require_fixed(call.tensors[0], at, index)
    else:
        require(not is_symbolic(index) and (is_constant(dim) or first), "selects a token")
    return claim.with_dims(without(claim.dims, at))


@rule("split split_with_sizes unbind split_copy split_with_sizes_copy unsafe_split chunk")
def split(call: Call) -> Sequence[State]:
    """Parts of a constant dimension."""
    claim, at = call.layout(call.tensors[0]), call.dim_of(call.tensors[0])
    require(is_constant(claim.dims[at]), "splits tokens")
    if call.name == "aten::unbind":
        return [claim.with_dims(without(claim.dims, at))] * len(call.results)
    return [
        claim.with_dims(replaced(claim.dims, at, call.padding.dim(part.shape[at]))) for part in call.results
    ]


@rule("unfold")
def unfold(call: Call) -> State:
    """Windows over a constant dimension; their elements become the last one."""
    source, result = call.tensors[0], call.results[0]
    claim, at = call.layout(source), int(call.arguments["dimension"]) % source.ndim
    require(is_constant(claim.dims[at]), "windows of tokens")
    sizes = [call.padding.dim(result.shape[dim]) for dim in (at, -1)]
    return claim.with_dims((*replaced(claim.dims, at, sizes[0]), sizes[1]))


# --- several values into one ----------------------------------------------------------------------


@rule("cat")
def cat(call: Call) -> State:
    """Constant parts, then at most one of tokens: every live row keeps its place.

    Rows after tokens would lie in other places at other sizes. An empty vector is left out, as torch does.
    """
    rank = call.results[0].ndim
    parts = [t for t in call.tensors if t.ndim == rank]
    require(all(t.shape == (0,) for t in call.tensors if t.ndim != rank), "cat")
    claims, at = [call.claim(part) for part in parts], call.dim_of(call.results[0])
    *front, last = [claim.dims[at] for claim in claims]
    tokens = leading_tokens(last)
    require(all(map(is_constant, front)) and (is_constant(last) or tokens is not None), "cat of tokens")
    if tokens is None:
        new: Dim = call.padding.dim(call.results[0].shape[at])
    else:
        before = sum(int(part.shape[at]) for part in parts[:-1])
        new = call.padding.prefix(call.results[0].shape[at], tokens.symbol, tokens.live + before)
    others = [join(*column) for column in zip(*(without(claim.dims, at) for claim in claims), strict=True)]
    return _hulled(call, claims, (*others[:at], new, *others[at:]))


@rule("stack")
def stack(call: Call) -> State:
    """Equal shapes side by side in a new constant dimension."""
    claims, at = [call.claim(tensor) for tensor in call.tensors], call.dim_of(call.results[0])
    dims = broadcast(claims)
    return _hulled(call, claims, (*dims[:at], call.padding.dim(len(claims)), *dims[at:]))


def _hulled(call: Call, claims: Sequence[Claim], dims: Sequence[Dim]) -> Claim:
    """An element of the result is one of these claims': a live one where it is live."""
    if not is_integer(call.results[0]):
        return Claim(tuple(dims))
    return Claim(tuple(dims), hull([c.live for c in claims]), hull([c.anywhere for c in claims]))


@rule("copy")
def copy(call: Call) -> State:
    """The destination becomes the source, repeated along dimensions of size 1."""
    source, result = call.arguments["src"], call.results[0]
    claim, new = call.claim(source), result.ndim - source.ndim
    old = zip(((),) * new + claim.dims, (1,) * new + tuple(source.shape), result.shape, strict=True)
    dims = tuple(call.padding.uniform(n) if d == () and not is_symbolic(o) else d for d, o, n in old)
    read = [claim] * len(call.tensors)  # what the destination held is not
    live, tail = elementwise_bounds(call, read, dims) if is_integer(result) else (None, None)
    return Claim(dims, live, tail)


@rule("constant_pad_nd")
def constant_pad(call: Call) -> State:
    """Rows of one number before and after. Tokens move by what comes before; what comes after is not live.

    After the tokens the exact run has the number where the padded run has its tail.
    """
    call.numbers_are_constant()
    claim, pad, result = call.claim(call.arguments["self"]), call.arguments["pad"], call.results[0]
    dims = list(claim.dims)
    for number in range(len(pad) // 2):
        at, (before, after) = len(dims) - 1 - number, pad[2 * number : 2 * number + 2]
        tokens = leading_tokens(dims[at])
        if tokens is not None:
            dims[at] = call.padding.prefix(result.shape[at], tokens.symbol, tokens.live + before)
        elif before or after:
            require(is_constant(dims[at]), "pads tokens")
            dims[at] = call.padding.dim(result.shape[at])
    return Claim(tuple(dims))


_NEUTRAL = {**dict.fromkeys(("sum", "any", "count_nonzero"), Bounds.of(0, 1)), "all": Bounds.of(1, 2)}
_PLACES, _EXTREMES = ("aten::argmax", "aten::argmin"), ("aten::amax", "aten::amin", "aten::aminmax")


# --- reductions and rows --------------------------------------------------------------------------


@rule(
    "sum mean amax amin prod any all max min argmax argmin var var_mean std std_mean logsumexp aminmax nansum"
    " linalg_vector_norm norm count_nonzero median nanmedian"
)
def reduce(call: Call) -> Sequence[State]:
    """The reduced dimensions are constant: all that is read for an element of the result is live with it.

    Tokens may be reduced where the tail is known to be neutral: zeros in a sum, true in `all`. Which element
    is the largest of a constant dimension is an index below that dimension's size.
    """
    call.numbers_are_constant()
    source = call.tensors[0]
    require(len(call.tensors) == 1, "reduces two tensors")
    claim, rank = call.claim(source), source.ndim
    reduced = set(call.dims_of(call.arguments.get("dim"), rank)) if rank else set()
    neutral = _NEUTRAL.get(call.name.removeprefix("aten::")) if is_integer(source) else None
    for dim in reduced:
        known = claim.dims[dim] is not UNIFORM and neutral is not None and claim.tail == neutral
        require(is_constant(claim.dims[dim]) or known, "over tokens")
    keep = bool(call.arguments.get("keepdim"))
    dims = tuple(() if d in reduced else dim for d, dim in enumerate(claim.dims) if keep or d not in reduced)
    results: list[State] = []
    for number, result in enumerate(call.results):
        places = call.name in _PLACES or (number == 1 and call.name not in _EXTREMES)
        found = None
        if places and is_integer(result):
            found = whole_range(source.numel() if len(reduced) != 1 else source.shape[min(reduced)])
        elif result.dtype == torch.bool:
            found = whole_range(2)
        elif is_integer(result) and call.name in (*_EXTREMES, "aten::max", "aten::min"):
            results.append(Claim(dims, claim.live, claim.tail))
            continue
        results.append(Claim(dims, found, found))
    return results


@rule("_softmax _log_softmax _safe_softmax flip roll cumprod cummax cummin topk sort kthvalue mode")
def along_constant(call: Call) -> Sequence[State]:
    """The op reads along named dimensions, all constant; the rows of the others are independent.

    Without named dimensions (roll) it would read across all. A second result counts that dimension.
    """
    call.numbers_are_constant()
    source = call.tensors[0]
    claim = call.claim(source)
    named = call.arguments.get("dim", call.arguments.get("dims"))
    require(named is not None and named != [] and source.ndim > 0, "all dimensions at once")
    along = call.dims_of(named, source.ndim)
    if call.name == "aten::sort" and not is_constant(claim.dims[along[0]]):
        return _sort_of_tokens(call, claim)
    require(all(is_constant(claim.dims[dim]) for dim in along), "over tokens")
    keeps = call.name in ("aten::flip", "aten::roll", "aten::sort", "aten::topk")
    results: list[State] = []
    for number, result in enumerate(call.results):
        if result.ndim == source.ndim:
            sizes = enumerate(claim.dims)
            dims = tuple(call.padding.dim(result.shape[i]) if i in along else dim for i, dim in sizes)
        else:
            dims = without(claim.dims, along[0])
        found = whole_range(source.shape[along[0]]) if number else None
        old = (claim.live, claim.tail) if keeps and is_integer(result) else (None, None)
        results.append(Claim(dims, found, found) if number else Claim(dims, *old))
    return results


@rule("cumsum logcumsumexp")
def running(call: Call) -> State:
    """Element i reads elements up to i. Along tokens those before a live one are live."""
    mark = call.mark(call.tensors[0], "counts")
    if mark is not None and call.tensors[0].ndim == 1:  # sizes of groups to their ends
        return Mark("offsets", mark.order)
    call.numbers_are_constant()
    source = call.tensors[0]
    claim = call.claim(source)
    if not claim.dims:
        return Claim(())
    at = call.dim_of(source)
    along, size = claim.dims[at], source.shape[at]
    require(along is UNIFORM or keeps_places(along), "over tokens")
    bounds = running_bounds(claim, size) if call.name == "aten::cumsum" and is_integer(source) else None
    dims = replaced(claim.dims, at, call.padding.counted(size)) if along is UNIFORM else claim.dims
    result = call.results[0]
    bounds = held(bounds, result.dtype, call.padding.largest) if is_integer(result) else None
    return Claim(dims, bounds, bounds)


@rule("native_layer_norm _fused_rms_norm")
def norm(call: Call) -> Sequence[State]:
    """The last dimensions, constant ones, are normalised; the rows of the others are independent."""
    claim, count = call.claim(call.tensors[0]), len(call.arguments["normalized_shape"])
    for tensor in call.tensors[1:]:
        require(all(map(is_constant, call.claim(tensor).dims)), "weights are rows")
    require(all(map(is_constant, claim.dims[-count:])), "norm over tokens")
    statistics = Claim((*claim.dims[:-count], *((),) * count))
    return [Claim(claim.dims), statistics, statistics][: len(call.results)]


@rule("native_group_norm native_batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm")
def stored_norm(call: Call) -> Sequence[State]:
    """Groups: of one sample, whose dimensions are constant. Batch norm: by stored statistics, per channel."""
    require(not call.given("training"), "statistics of all tokens")
    claim = call.claim(call.arguments["input"])
    for tensor in call.tensors[1:]:
        require(all(map(is_constant, call.claim(tensor).dims)), "weights are rows")
    grouped = call.name == "aten::native_group_norm"
    require(all(map(is_constant, claim.dims[1:] if grouped else claim.dims[1:2])), "norm over tokens")
    if grouped:
        return [Claim(claim.dims), *[Claim((claim.dims[0], call.padding.dim(call.arguments["group"])))] * 2]
    return [Claim(claim.dims), *(Claim(call.fresh(result)) for result in call.results[1:])]


@rule("tril triu")
def triangle(call: Call) -> State:
    """What stays is chosen by places, which live elements keep where no atom stands before the tokens."""
    call.numbers_are_constant()
    claim = call.claim(call.tensors[0])
    known = [
        call.padding.counted(size) if dim is UNIFORM else dim
        for dim, size in zip(claim.dims[-2:], call.tensors[0].shape[-2:], strict=True)
    ]
    require(all(map(keeps_places, known)), "triangle of reordered rows")
    tail = claim.with_dims(known).tail  # equal rows become live ones and tail
    return Claim((*claim.dims[:-2], *known), hull([claim.live, whole_range(1)]), hull([tail, whole_range(1)]))


# --- products -------------------------------------------------------------------------------------


def _product(call: Call, left: Sequence[Dim], right: Sequence[Dim], bias: Tensor | None = None) -> Claim:
    """Rows of `left` times columns of `right` (batch, rows, inner) x (batch, inner, columns).

    The inner dimension is constant, so a sum reads the elements of one row and one column alone: `0 * NaN` of
    a tail is never added.
    """
    call.numbers_are_constant()
    require(is_constant(left[-1]) and is_constant(right[-2]), "contracts tokens")
    batch = [join(*pair) for pair in zip(left[:-2], right[:-2], strict=True)]
    dims: tuple[Dim, ...] = (*batch, left[-2], right[-1])
    added = call.claim(bias).dims if bias is not None else ()
    return Claim(tuple(map(join, dims, ((),) * (len(dims) - len(added)) + added)))


@rule("mm bmm addmm baddbmm _int_mm")
def matrices(call: Call) -> State:
    """A product of matrices, or of a batch of them, and what is added."""
    left, right = call.given("mat1", "batch1", "self"), call.given("mat2", "batch2")
    bias = call.arguments["self"] if left is not call.arguments["self"] else None
    return _product(call, call.claim(left).dims, call.claim(right).dims, bias)


@rule("mv addmv dot")
def vectors(call: Call) -> State:
    """A product whose second factor is one column (and whose first, for dot, is one row)."""
    left, right = call.given("mat", "self"), call.given("vec", "tensor")
    bias = call.arguments["self"] if left is not call.arguments["self"] else None
    row = call.claim(left).dims
    found = _product(call, ((),) * (2 - len(row)) + row, (*call.claim(right).dims, ()))
    return Claim(
        broadcast(
            [Claim(found.dims[:1] if len(row) > 1 else ())] + ([call.claim(bias)] if bias is not None else [])
        )
    )


@rule("linear")
def linear(call: Call) -> State:
    """Rows times a transposed weight."""
    rows, weight = call.claim(call.arguments["input"]).dims, call.claim(call.arguments["weight"]).dims
    require(is_constant(rows[-1]) and is_constant(weight[-1]), "contracts tokens")
    call.numbers_are_constant()
    bias = call.arguments.get("bias")
    dims: tuple[Dim, ...] = (*rows[:-1], *weight[:-1])
    return Claim(broadcast([Claim(dims)] + ([call.claim(bias)] if bias is not None else [])))


@rule("_scaled_mm")
def scaled_product(call: Call) -> State:
    """A product of float8 matrices; a scale is one number, one per column, or one per row beside its row."""
    left, right = call.claim(call.arguments["self"]).dims, call.claim(call.arguments["mat2"]).dims
    scale, others = call.arguments["scale_a"], [call.given(n) for n in ("scale_b", "bias", "scale_result")]
    by_row = call.claim(scale).dims
    require(
        all(map(is_constant, by_row[1:])) and (not by_row or by_row[0] in ((), left[0])), "scale over tokens"
    )
    for tensor in others:
        require(tensor is None or all(map(is_constant, call.claim(tensor).dims)), "scale over tokens")
    return _product(call, left, right)


@rule("_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm")
def packed_product(call: Call) -> State:
    """Rows times a weight that is stored packed, with its scales."""
    call.numbers_are_constant()
    rows, *weight = [call.claim(tensor).dims for tensor in call.tensors]
    require(all(map(is_constant, (rows[1], *itertools.chain(*weight)))), "contracts tokens")
    return Claim((rows[0], call.padding.dim(call.results[0].shape[1])))


@rule("convolution")
def convolution(call: Call) -> State:
    """Samples are independent. A window over constant places reads live elements only.

    Along tokens output i reads inputs `i - padding` to `i - padding + reach`: it is live while the last of
    them is, or lies before the first. Zeros after the tokens are where a padded run has its tail.
    """
    call.numbers_are_constant()
    claim, weight = call.claim(call.arguments["input"]), call.arguments["weight"]
    for tensor in call.tensors[1:]:
        require(all(map(is_constant, call.claim(tensor).dims)), "weights are rows")
    require(is_constant(claim.dims[1]), "channels of tokens")
    dims: list[Dim] = [claim.dims[0], call.padding.dim(call.results[0].shape[1])]
    for number, dim in enumerate(claim.dims[2:]):
        size, tokens = call.results[0].shape[number + 2], leading_tokens(dim)
        if tokens is None:
            require(is_constant(dim), "windows of tokens")
            dims.append(call.padding.dim(size))
            continue
        stride, padding, dilation = (
            call.arguments[n][number % len(call.arguments[n])] for n in ("stride", "padding", "dilation")
        )
        require(stride == 1 and not call.arguments["transposed"], "windows of tokens")
        reach = dilation * (int(weight.shape[number + 2]) - 1)
        dims.append(call.padding.prefix(size, tokens.symbol, tokens.live + padding - reach))
    return Claim(tuple(dims))


@rule(
    "avg_pool2d max_pool2d_with_indices _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest1d"
    " upsample_nearest2d _upsample_nearest_exact1d _upsample_nearest_exact2d upsample_linear1d"
    " upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    " reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"
)
def images(call: Call) -> Sequence[State]:
    """Each image of a batch is read for itself; its places are constant."""
    call.numbers_are_constant()
    claim, places = call.claim(call.tensors[0]), 1 if call.name.endswith("1d") else 2
    require(all(map(is_constant, claim.dims[-places:])), "over tokens")
    area = whole_range(call.tensors[0].shape[-1] * call.tensors[0].shape[-2]) if places == 2 else None
    results: list[State] = []
    for number, result in enumerate(call.results):
        found = area if number else None
        dims = (*claim.dims[:-places], *(call.padding.dim(n) for n in result.shape[-places:]))
        results.append(Claim(dims, found, found))
    return results


@rule("pixel_shuffle pixel_unshuffle im2col col2im")
def patches(call: Call) -> State:
    """Elements change places, or are summed, within one image of a batch."""
    call.numbers_are_constant()
    claim, image = call.claim(call.tensors[0]), 2 if call.name == "aten::col2im" else 3
    batch = call.tensors[0].ndim - image
    require(all(map(is_constant, claim.dims[batch:])), "over tokens")
    return Claim((*claim.dims[:batch], *map(call.padding.dim, call.results[0].shape[batch:])))


@rule("grid_sampler_2d")
def sampled(call: Call) -> State:
    """Each image is read at the points of its own grid; a point outside of it reads no other image."""
    image, grid = (call.claim(tensor).dims for tensor in call.tensors)
    require(image[0] == grid[0] and all(map(is_constant, (*image[1:], *grid[1:]))), "over tokens")
    return Claim((image[0], *map(call.padding.dim, call.results[0].shape[1:])))


# --- new values -----------------------------------------------------------------------------------


@rule("arange")
def arange(call: Call) -> State:
    """Element i is `start + i * step`, at every size."""
    start, step, result = call.arguments.get("start", 0), call.arguments.get("step", 1), call.results[0]
    require(not is_symbolic(start) and not is_symbolic(step), "size as a number")
    dim = call.padding.counted(result.shape[0])
    if not is_integer(result) or step <= 0 or int(start) != start or int(step) != step:
        return Claim((dim,))
    stop = int(start) + int(step) * (_torch.expression(result.shape[0]) - 1) + 1
    bounds = held(Bounds.of(int(start), stop), result.dtype, call.padding.largest)
    if (start, step) != (0, 1):
        return Claim((dim,), bounds, bounds)
    return Claim((dim,), bounds, bounds, dim, Role.COUNTING)


@rule("full zeros ones new_full new_zeros new_ones zeros_like ones_like full_like fill zero scalar_tensor")
def constant(call: Call) -> State:
    """One number everywhere; what it replaces is not read."""
    result, named = call.results[0], call.given("fill_value", "value", "s")
    require(not is_symbolic(named), "size as a number")
    ones = call.name.removesuffix("_like").endswith("ones")
    number = named if named is not None else int(ones)
    found = None
    if isinstance(number, Tensor):
        found = call.claim(number).live
    elif isinstance(number, int) or (isinstance(number, float) and number.is_integer()):
        found = Bounds.of(int(number), int(number) + 1)
    found = held(found, result.dtype, call.padding.largest)
    return Claim(tuple(map(call.padding.uniform, result.shape)), found, found)


@rule("empty empty_like new_empty empty_strided new_empty_strided")
def allocation(call: Call) -> State:
    """Nothing may read it before it is written; a splitting op may fill it."""
    return Claim(tuple(map(call.padding.uniform, call.results[0].shape)), role=Role.UNWRITTEN)


@rule("lift_fresh")
def literal(call: Call) -> State:
    """A tensor written in the program: the same at every size."""
    state = call.state_of(call.tensors[0])
    return Claim(call.fresh(call.results[0])) if state is None else state


# --- indices --------------------------------------------------------------------------------------


def _require_index(call: Call, dim: Dim, size: Any, index: Tensor) -> Claim:
    """A live index finds the same element at every size, and a tail stays in the table.

    In a constant dimension all elements are live, along a uniform one all are equal. In a dimension of tokens
    the index must be known to count live elements from the front: -1 is another row at another size.
    """
    require(index.dtype not in (torch.bool, torch.uint8), "index of unknown number")
    claim = call.claim(index)
    known = dim is UNIFORM or is_constant(dim) or claim.points_into == dim
    require(known, "index of tokens")
    wraps = call.name in ("aten::index", "aten::_unsafe_index")
    require_inside(claim, size, call.padding, from_end=wraps)
    return claim


@rule("embedding index_select index _unsafe_index")
def index(call: Call) -> State:
    """Rows of a table that live indices find (`_require_index`)."""
    table = call.given("weight", "self")
    claim, named = call.claim(table), call.given("indices", "index")
    at_dim = int(call.arguments.get("dim", 0)) % max(table.ndim, 1)
    given = list(named) if isinstance(named, (list, tuple)) else [None] * at_dim + [named]
    at = [dim for dim, tensor in enumerate(given) if tensor is not None]
    inverse = call.mark(given[at[0]], "inverse")
    if inverse is not None and at == [0]:
        return _order_before(claim, inverse)
    indices = [_require_index(call, claim.dims[dim], table.shape[dim], given[dim]) for dim in at]
    others = [dim for number, dim in enumerate(claim.dims) if number not in at]
    first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    dims = (*others[:first], *broadcast(indices), *others[first:])
    return Claim(dims, claim.live, claim.anywhere, claim.points_into)


@rule("gather scatter scatter_add scatter_reduce")
def gather(call: Call) -> State:
    """Along one constant dimension; the rows of the others, equal in all tensors, are independent."""
    call.numbers_are_constant()
    source, index = call.arguments["self"], call.arguments["index"]
    at, gathers = call.dim_of(source), call.name == "aten::gather"
    sizes = [[_torch.expression(n) for i, n in enumerate(t.shape) if i != at] for t in call.tensors]
    require(all(one == sizes[0] for one in sizes) and source.ndim > 0, "gather of other rows")
    claims = [call.claim(tensor) for tensor in call.tensors]
    alone = claims[:1] if gathers else claims
    require(all(is_constant(claim.dims[at]) for claim in alone), "along tokens")
    _require_index(call, claims[0].dims[at], source.shape[at], index)
    dims = [join(*column) for column in zip(*(without(claim.dims, at) for claim in claims), strict=True)]
    new = claims[1 if gathers else 0].dims[at]
    return _hulled(call, claims[:1] if gathers else [], (*dims[:at], new, *dims[at:]))


@rule("index_put _index_put_impl")
def index_put(call: Call) -> State:
    """Two writes are known: one number where a mask is true, and the inverse of a sort's order."""
    target, indices, values = (call.arguments[n] for n in ("self", "indices", "values"))
    require(len(indices) == 1 and not call.arguments["accumulate"], "scatter")
    if indices[0].dtype == torch.bool:
        claim, mask, number = call.claim(target), call.claim(indices[0]), call.claim(values)
        require(all(dim == () for dim in number.dims), "scatter")
        marked = Claim(mask.dims + ((),) * (len(claim.dims) - len(mask.dims)))
        live = hull([claim.live, number.live])
        return Claim(broadcast([claim, marked]), live, hull([claim.anywhere, number.live]))
    return _inverse(call, call.claim(indices[0]), call.claim(values))


# --- mixtures of experts --------------------------------------------------------------------------
#
# Tokens are sorted by expert, multiplied group by group, and put back. A row in the order of a sort is live
# where the row that it came from is; it may lie anywhere among the rows of the tail.


def _sort_of_tokens(call: Call, claim: Claim) -> Sequence[State]:
    """The sorted keys, and the place before the sort of each: the row of a place goes with it.

    The order is a permutation of all rows, so every place is in bounds, and each row is there once.
    """
    (before,) = claim.dims if len(claim.dims) == 1 else (UNIFORM,)
    require(before is not UNIFORM and keeps_places(before), "over tokens")
    assert before is not UNIFORM
    atoms = tuple(atom for atom in before if not isinstance(atom, Sorted))
    dims = (Sorted(next(_orders), atoms),)
    ascending = call.arguments.get("descending") is False and is_integer(call.results[0])
    places = whole_range(call.tensors[0].shape[0])
    return [
        Claim((dims,), claim.live, claim.tail, None, Role.SORTED_KEYS if ascending else None),
        Claim((dims,), places, places, before, Role.PERMUTATION),
    ]


@rule("histc")
def group_sizes(call: Call) -> State:
    """How many rows, of the tail too, have each key: meaningful as groups of those same rows.

    All keys, of the tail too, are counted: they lie in [0, bins), and each bin is one key.
    """
    claim, bins = call.claim(call.arguments["self"]), call.arguments["bins"]
    require(claim.role is Role.SORTED_KEYS, "counts tokens")
    require((call.arguments["min"], call.arguments["max"]) == (0, bins - 1) and bins > 1, "counts tokens")
    found = claim.anywhere or whole_range(0)
    known = claim.anywhere is not None and found.low.is_nonnegative
    require(bool(known) and call.padding.at_most(found.stop, bins), "counts tokens")
    return Mark("counts", claim.dims[0])


@rule("_grouped_mm transformers::grouped_mm_fallback")
def grouped_product(call: Call) -> State:
    """Row p is multiplied with the weight of the group that p lies in.

    The groups are those of the keys by which the rows were sorted, so that is the weight of the row's key.
    """
    rows, weight = call.claim(call.given("self", "input")), call.claim(call.given("mat2", "weight"))
    ends = call.mark(call.given("offs"), "offsets")
    require(call.given("bias") is None and ends is not None, "groups of other rows")
    assert ends is not None
    require(len(rows.dims) == 2 and rows.dims[0] == ends.order, "groups of other rows")
    require(len(weight.dims) == 3 and all(map(is_constant, (*weight.dims, rows.dims[1]))), "contracts tokens")
    return Claim((rows.dims[0], weight.dims[2]))


def _inverse(call: Call, order: Claim, values: Claim) -> State:
    """`inverse[order] = arange(len(order))`: where a row lies in the order. All elements are written."""
    require(order.role is Role.PERMUTATION and values.role is Role.COUNTING, "scatter")
    sizes = [call.arguments["self"], call.arguments["indices"][0], call.arguments["values"]]
    require(
        len({_torch.expression(t.shape[0]) for t in sizes}) == 1 and call.arguments["self"].ndim == 1,
        "scatter",
    )
    return Mark("inverse", order.dims[0])


def _order_before(claim: Claim, inverse: Mark) -> Claim:
    """`rows[inverse]`: the rows in the order before the sort. Each is found where its sort put it."""
    order = inverse.order
    require(order is not UNIFORM and claim.dims[0] == order, "another order")
    assert order is not UNIFORM and isinstance(order[0], Sorted)
    return Claim((order[0].before, *claim.dims[1:]), claim.live, claim.tail)
