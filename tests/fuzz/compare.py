"""Is an answer right? Beside eager, and where it differs in any bit, beside float64.

An answer's distance to the float64 result may be a multiple of eager's own distance plus rounding. Some
programs are discontinuous (`round`, `argmax`, a mask of values): there, rounding of an intermediate decides.
What eager itself does when its inputs and weights are shaken by a few roundings is allowed too, element by
element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MULTIPLE = 8  # of eager's own distance
ROUNDINGS = 64  # of the largest value
SHAKES = 12
SHAKE = 8  # roundings by which inputs and weights are moved


def snapshot(tree: Any) -> Any:
    """A copy of all tensors, dense."""
    return pytree.tree_map_only(Tensor, _copied, tree)


def _copied(t: Tensor) -> Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    return t.clone() if t.layout == torch.strided else t.to_dense()


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaNs included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == torch.complex32:  # has no comparison
        one, other = one.to(torch.complex64), other.to(torch.complex64)
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


def difference(
    got: Any, eager: Any, exact: Callable[[], Any], shaken: Callable[[], Sequence[Any]]
) -> str | None:
    """What is wrong with `got`, or None.

    Args:
        eager: the answer of the model itself.
        exact: computes the answer in float64; only called where an element differs from eager's.
        shaken: computes eager's answers for inputs and weights that are off by roundings; called last.
    """
    found, spec = pytree.tree_flatten(got)
    wanted, expected = pytree.tree_flatten(eager)
    if spec != expected:
        return f"structure {spec}, eager's is {expected}"
    for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return f"leaf {index} is {type(one).__name__}, eager's is {type(other).__name__}"
        if not isinstance(other, Tensor):
            if type(one) is not type(other) or one != other:
                return f"leaf {index} is {one!r}, eager's is {other!r}"
        elif (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"leaf {index} has {_kind(one)}, eager's has {_kind(other)}"
    suspects = [
        i
        for i, (one, other) in enumerate(zip(found, wanted, strict=True))
        if isinstance(other, Tensor) and not same(one, other)
    ]
    if suspects:
        references = pytree.tree_leaves(exact())
        suspects = [i for i in suspects if not within(found[i], wanted[i], references[i])]
    if suspects:
        others = [pytree.tree_leaves(tree) for tree in shaken()]
        for i in suspects:
            told = _beyond(found[i], wanted[i], references[i], [leaves[i] for leaves in others])
            if told is not None:
                return f"leaf {i}: {told}"
    return None


def _kind(t: Tensor) -> str:
    return f"{str(t.dtype)[6:]}{list(t.shape)}"


def _wide(t: Tensor) -> Tensor:
    return t.detach().cpu().to(torch.complex128 if t.is_complex() else torch.float64)


def _finite(t: Tensor) -> Tensor:
    return t.abs().isfinite()


def _bound(eager: Tensor, reference: Tensor) -> Tensor:
    """The distance to `reference` that is rounding: one number for all elements."""
    eps = torch.finfo(eager.dtype).eps if eager.is_floating_point() or eager.is_complex() else 0.0
    live = _finite(_wide(eager)) & _finite(reference)
    apart = (_wide(eager) - reference).abs()[live]
    size = reference.abs()[live]
    return (MULTIPLE * apart.max() + ROUNDINGS * eps * size.max()) if live.any() else torch.zeros(())


def _close(got: Tensor, eager: Tensor, reference: Tensor, bound: Tensor) -> Tensor:
    """Per element: near the reference, or as infinite or undefined as eager's."""
    one, other = _wide(got), _wide(eager)
    alike = (one == other) | ((one != one) & (other != other))
    return alike | ((one - reference).abs() <= bound)


def within(got: Tensor, eager: Tensor, reference: Tensor) -> bool:
    """Every element lies within rounding of the float64 result."""
    reference = _wide(reference)
    if got.dtype == torch.bool or not (got.is_floating_point() or got.is_complex()):
        return bool(_close(got, eager, reference, torch.zeros(())).all())
    return bool(_close(got, eager, reference, _bound(eager, reference)).all())


def _beyond(got: Tensor, eager: Tensor, reference: Tensor, others: Sequence[Tensor]) -> str | None:
    """What lies beyond rounding and beyond what eager does when it is shaken."""
    reference = _wide(reference)
    if any(other.shape != got.shape for other in others):
        return None  # the shape itself depends on roundings
    spread, undefined = torch.zeros(got.shape, dtype=torch.float64), torch.zeros(got.shape, dtype=torch.bool)
    for other in map(_wide, others):
        spread = spread.maximum(torch.nan_to_num((other - _wide(eager)).abs(), 0.0, float("inf")))
        undefined |= ~_finite(other)
    bound = _bound(eager, reference) + 4 * spread
    bad = ~(_close(got, eager, reference, bound) | undefined | ((_wide(got) - _wide(eager)).abs() <= bound))
    if not bad.any():
        return None
    apart, own = (_wide(got) - reference).abs(), (_wide(eager) - reference).abs()
    at = tuple(bad.nonzero()[0].tolist())
    return (
        f"{int(bad.sum())} of {bad.numel()} elements of {_kind(got)} are off, first {at}: {got[at].item()}, "
        f"eager {eager[at].item()}, float64 {reference[at].item()} "
        f"(off by {apart[at].item():.2g}, eager by {own[at].item():.2g})"
    )


def shake(t: Tensor, generator: torch.Generator) -> Tensor:
    """The tensor with every element moved by some roundings; zeros and integers stay."""
    if not (t.is_floating_point() or t.is_complex()):
        return t.clone()
    eps = torch.finfo(t.dtype).eps
    noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device)
    return (t * (1 + SHAKE * eps * noise)).to(t.dtype)
