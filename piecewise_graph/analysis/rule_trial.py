"""Checks a registered padding rule with real tensors: one op, exact and padded, on the device of its
arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.analysis.claims import UNIFORM, Claim, Dim, is_constant, keeps_places, refuse, require
from piecewise_graph.analysis.op_call import Call, State
from piecewise_graph.sizes import evaluate

_LIVE, _PADDED = 3, 8
_TAILS = (float("nan"), float("inf"), 0.0, 1e4)


def difference_in_trial(call: Call, changed: Sequence[Tensor], states: Sequence[State]) -> str | None:
    """How live rows of `changed` (written arguments, then results) depend on the tail; None: not at all.

    Raises:
        Unproved: the op cannot be tried.
    """
    for tensor in call.tensors:
        dims = call.layout(tensor).dims
        require(all(dim is UNIFORM or keeps_places(dim) for dim in dims), "its padding rule cannot be tried")
    with _torch.outside_of_modes():
        exact = _values(call, _LIVE)
        wanted = _run(call, exact, _LIVE, changed)
        for tail in _TAILS:
            padded = {key: _padded(call, key, value, tail) for key, value in exact.items()}
            found = _run(call, padded, _PADDED, changed)
            for place, (want, got, state) in enumerate(zip(wanted, found, states, strict=True)):
                if isinstance(state, Claim) and not _agree(want, _live_part(got, want, state.dims)):
                    kind = "argument" if place < len(call.written) else "result"
                    number = place if kind == "argument" else place - len(call.written)
                    return f"live rows of {kind} {number} differ"
    return None


def _values(call: Call, size: int) -> dict[int, Tensor]:
    """Random tensors for the arguments, by the id of the fake ones: small floats, zeros for integers."""
    return {id(fake): _random(fake, _shape(fake, size), seed) for seed, fake in enumerate(call.tensors)}


def _shape(fake: Tensor, size: int) -> list[int]:
    exprs = [_torch.expression(length) for length in fake.shape]
    return [evaluate(expr, dict.fromkeys(expr.free_symbols, size)) for expr in exprs]


def _random(fake: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    device = fake.device if fake.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
    if not fake.dtype.is_floating_point:
        return torch.zeros(shape, dtype=fake.dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(fake.dtype)


def _padded(call: Call, key: int, live: Tensor, tail: float) -> Tensor:
    """`live` at the padded size, the rest of it filled with `tail`."""
    fake = next(tensor for tensor in call.tensors if id(tensor) == key)
    number = tail if fake.dtype.is_floating_point else 0
    whole = torch.full(_shape(fake, _PADDED), number, device=live.device).to(live.dtype)
    part = whole
    for dim, size in enumerate(live.shape):
        part = part.narrow(dim, 0, size)
    part.copy_(live)
    return whole


def _run(call: Call, values: dict[int, Tensor], size: int, changed: Sequence[Tensor]) -> list[Tensor]:
    """What the op makes of `changed`, of copies of `values`."""
    copies = {key: value.clone() for key, value in values.items()}

    def real(value: Any) -> Any:
        if isinstance(value, Tensor):
            return copies[id(value)]
        if isinstance(value, (list, tuple)):
            return [real(item) for item in value]
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            expr = value.node.expr
            return evaluate(expr, dict.fromkeys(expr.free_symbols, size))
        return _torch.real_object(value) if _torch.is_opaque(value) else value

    args = [real(call.arguments[a.name]) for a in call.op._schema.arguments if not a.kwarg_only]
    kwargs = {a.name: real(call.arguments[a.name]) for a in call.op._schema.arguments if a.kwarg_only}
    try:
        result = call.op(*args, **kwargs)
    except Exception as problem:  # an op that looks up its layer, or a forward context, may raise anything
        refuse(f"its padding rule could not be tried: {problem}")
    returned = dict(zip(map(id, call.results), _tensors(result), strict=True))
    return [copies[id(t)] if id(t) in copies else returned[id(t)] for t in changed]


def _tensors(result: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _torch.flatten(result)[0] if isinstance(leaf, Tensor))


def _live_part(got: Tensor, want: Tensor, dims: Sequence[Dim]) -> Tensor:
    for dim, structure in enumerate(dims):
        if not is_constant(structure):
            got = got.narrow(dim, 0, want.shape[dim])
    return got


def _agree(want: Tensor, got: Tensor) -> bool:
    if want.shape != got.shape:
        return False
    if not want.dtype.is_floating_point:
        return torch.equal(want, got)
    tolerance = 1e-4 if want.dtype in (torch.float32, torch.float64) else 2e-2
    return torch.allclose(want.float(), got.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
