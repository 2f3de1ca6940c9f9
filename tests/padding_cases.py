"""Functions of rows, judged by the padding proof and run at two sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from piecewise_graph import _torch
from piecewise_graph.analysis import SegmentProof, analyse, live_claim, stored_claim

TRACED = 13  # tokens while tracing: no constant of a test is 13


def judge(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    token_dims: Sequence[int | tuple[int, ...] | None],
    largest: int | None = None,
) -> SegmentProof:
    """The proof of `function(*inputs)` where these dimensions of the inputs count tokens.

    The function is one node of the segment, which says whether it is proved, not what is to be cut out.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    symbol: Any = None
    fakes: list[Tensor] = []
    for tensor, dims in zip(inputs, map(as_tuple, token_dims), strict=True):
        kinds = [DimDynamic.DUCK if d in dims else DimDynamic.STATIC for d in range(tensor.ndim)]
        fake = mode.from_tensor(
            grown(tensor, dims, TRACED), symbolic_context=StatelessSymbolicContext(kinds), source=None
        )
        fakes.append(fake)
        symbol = _torch.expression(fake.shape[dims[0]]) if dims else symbol
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{number}") for number in range(len(fakes))]
    for node, fake in zip(nodes, fakes, strict=True):
        node.meta["example_value"] = fake
    called = graph.call_function(_as_tuple_of_tensors(function), tuple(nodes))
    graph.output(called)
    gm = fx.GraphModule(nn.Module(), graph)
    claims = [
        live_claim(fake, [symbol]) if dims != () else stored_claim(fake)
        for fake, dims in zip(fakes, map(as_tuple, token_dims), strict=True)
    ]
    return analyse(gm, fakes, claims, [symbol], largest)


def is_proved(proof: SegmentProof) -> bool:
    """No findings, and outputs that can be narrowed."""
    return not proof.findings and all(c is not None and c.is_plain for c in proof.outputs)


def why(proof: SegmentProof) -> str:
    """For messages of tests."""
    if proof.findings:
        return "; ".join(f"{finding.op}: {finding.why}" for finding in proof.findings)
    return str(proof.outputs)


def as_tuple(dims: int | tuple[int, ...] | None) -> tuple[int, ...]:
    return () if dims is None else (dims,) if isinstance(dims, int) else dims


def grown(tensor: Tensor, dims: Sequence[int], size: int) -> Tensor:
    """`tensor` with `size` rows in each of `dims`, its own repeated."""
    for dim in dims:
        rows = torch.arange(size) % tensor.shape[dim]
        tensor = tensor.index_select(dim, rows)
    return tensor


def _as_tuple_of_tensors(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in _torch.flatten(function(*inputs))[0] if isinstance(leaf, Tensor))

    return call


# --- the same by numbers --------------------------------------------------------------------------

Tail = Callable[[Tensor], Tensor]
FLOAT_TAILS: tuple[Tail, ...] = (
    lambda rows: rows.fill_(float("nan")),
    lambda rows: rows.fill_(float("inf")),
    lambda rows: rows.zero_(),
    lambda rows: rows.fill_(3e30),
    lambda rows: rows.mul_(-3).add_(1),
)
SIZES = ((5, 8), (1, 4), (7, 8), (2, 16))


def disagreement(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    token_dims: Sequence[int | tuple[int, ...] | None],
    proof: SegmentProof,
    sizes: Sequence[tuple[int, int]] = SIZES,
) -> str | None:
    """Where live rows of a padded run differ from the exact run; None where they never do.

    Integers are padded with zeros, as the proof was told, floats with anything.
    """
    all_dims = [as_tuple(dims) for dims in token_dims]
    call = _as_tuple_of_tensors(function)
    for size, bucket in sizes:
        exact = [grown(t, dims, size).clone() for t, dims in zip(inputs, all_dims, strict=True)]
        for number, tail in enumerate(FLOAT_TAILS):
            given = [t.clone() for t in exact]
            padded = [with_tail(t, dims, bucket, tail) for t, dims in zip(exact, all_dims, strict=True)]
            wanted, found = call(*given), call(*padded)
            for place, (want, got, claim) in enumerate(zip(wanted, found, proof.outputs, strict=True)):
                assert claim is not None
                dims = [d for d, dim in enumerate(claim.dims) if has_tokens(dim)]
                if not same(want, narrowed(got, dims, want.shape)):
                    return f"output {place} at {size} padded to {bucket}, tail {number}"
            for place, (want, got, dims) in enumerate(zip(given, padded, all_dims, strict=True)):
                if not same(want, narrowed(got, dims, want.shape)):
                    return f"input {place} at {size} padded to {bucket}, tail {number}"
    return None


def has_tokens(dim: Any) -> bool:
    return isinstance(dim, tuple) and any(not isinstance(atom, int) for atom in dim)


def with_tail(tensor: Tensor, dims: Sequence[int], size: int, tail: Tail) -> Tensor:
    """`tensor` padded to `size` rows in each of `dims`."""
    for dim in dims:
        live, extra = tensor.shape[dim], size - tensor.shape[dim]
        rows = tensor.index_select(dim, torch.arange(extra) % live)
        rows = tail(rows) if rows.is_floating_point() or rows.is_complex() else torch.zeros_like(rows)
        tensor = torch.cat([tensor, rows], dim)
    return tensor.clone()


def narrowed(tensor: Tensor, dims: Sequence[int], shape: Sequence[int]) -> Tensor:
    for dim in dims:
        tensor = tensor.narrow(dim, 0, shape[dim])
    return tensor


def same(want: Tensor, got: Tensor) -> bool:
    """Equal up to the rounding of kernels for other sizes."""
    if want.shape != got.shape:
        return False
    if not want.is_floating_point() and not want.is_complex():
        return torch.equal(want, got)
    return torch.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True)
