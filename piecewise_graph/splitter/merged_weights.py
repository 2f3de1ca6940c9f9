"""Parameters side by side: several weights as one tensor, each of them a view of its rows.

Note [Who may be moved]
A merge gives a parameter new memory. Another holder of the old memory (a kept state_dict, a tied weight,
graphs of another compiled model) would no longer see its updates. So a parameter is moved only if it has no
other holder: its storage is as large as the parameter, and nothing else holds it.

The holders of a storage that was merged before are known: the parameters that lie in it, and the tensors over
it that captured graphs hold (`_over`). Parameters that do not overlap are harmless. Graphs that captured this
same layout may be broken by the move: the user has just replaced one of its weights and expects it. Graphs
that captured a different layout (weights shared by two models) must not be, so the weight stays. An address
without a holder cannot be seen, for example in a CUDA graph that other code captured.

The module keeps no merged tensor. In every call that is no replay, merged tensors are found again from the
addresses of the parameters; only parameters and captured graphs hold their memory. So a weight that was
written in place is seen, a replaced one is noticed, and a model that is deleted or moved takes its memory
along.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.errors import MergedWeightsError


@dataclass(frozen=True)
class Layout:
    """Arguments of a trace that lie in one merged tensor, in the order of its rows.

    Attributes:
        members: their indices.
        names, shapes: of each member.
    """

    members: tuple[int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Merge:
    """What became of the parallel linears of a trace.

    Attributes:
        layouts: one per merged tensor; the tensors follow the trace's own arguments in this order.
        merged: the linears of a group as people read them, `q_proj+k_proj+v_proj` -> groups.
        linears: members of all these groups.
        apart: reason -> groups that were not merged.
    """

    layouts: tuple[Layout, ...] = ()
    merged: Mapping[str, int] = field(default_factory=dict)
    linears: int = 0
    apart: Mapping[str, int] = field(default_factory=dict)


class Stays(NamedTuple):
    """The member of a layout that must stay where it is, and the reason, which is counted."""

    member: int
    reason: str


# Parameters that lie in merged storages, by id; and the tensor over all rows of one, while it is in use.
_placed: dict[int, weakref.ref[Tensor]] = {}
_over: weakref.WeakValueDictionary[tuple[Any, ...], Tensor] = weakref.WeakValueDictionary()


def with_merged(args: Sequence[Any], layouts: Sequence[Layout]) -> Sequence[Any]:
    """A call's arguments, followed by the merged tensors that its weights make up.

    Weights that were replaced since the last call are laid side by side again.

    Raises:
        MergedWeightsError: that cannot be, or a weight is of another kind than the trace was compiled for.
    """
    return [*args, *(_merged(args, layout) for layout in layouts)] if layouts else args


def _merged(args: Sequence[Any], layout: Layout) -> Tensor:
    members = [args[index] for index in layout.members]
    for member, name, shape in zip(members, layout.names, layout.shapes, strict=True):
        found, expected = (tuple(member.shape), member.dtype), (shape, layout.dtype)
        if found != expected or member.device != members[0].device:
            raise MergedWeightsError.changed(name, (*found, member.device), (*expected, members[0].device))
    merged = joined(members)
    if isinstance(merged, Stays):
        raise MergedWeightsError.stays(layout.names[merged.member], merged.reason)
    return merged


def joined(members: Sequence[Tensor]) -> Tensor | Stays:
    """The tensor whose rows are those of `members`, in their order; they are moved there if need be.

    Where one of them must stay, or memory does not suffice, nothing changes.
    """
    merged = side_by_side(members)
    if merged is not None:
        return merged
    for index, member in enumerate(members):
        reason = _reason_to_stay(member, members[:index], members)
        if reason is not None:
            return Stays(index, reason)
    with torch.inference_mode(False), torch.no_grad():
        return _lay(members)


def side_by_side(members: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose rows are those of `members`, in their order; None where they lie apart."""
    first = members[0]
    storage, address = _torch.storage_id(first), first.data_ptr()
    for member in members:
        known = member.data_ptr() == address and member.is_contiguous() and member.dtype == first.dtype
        if not known or _torch.storage_id(member) != storage:
            return None
        address += member.nbytes
    shape = _shape(members)
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    key = (storage, first.data_ptr(), shape, first.dtype)
    merged = _over.get(key)
    if merged is None:
        with torch.inference_mode(False), torch.no_grad():
            empty = _allocate((0,), first)  # set_, because the holders of a view could not be counted
            merged = empty.set_(first.untyped_storage(), first.storage_offset(), shape, stride)
        _know(members, merged)
    return merged


def _lay(members: Sequence[Tensor]) -> Tensor | Stays:
    """Copy `members` into one new tensor and let each be a view of it."""
    try:
        merged = _allocate(_shape(members), members[0])
    except (RuntimeError, MemoryError):  # the CPU's allocator has no error of its own
        return Stays(0, "no_room")
    rows = merged.split([len(member) for member in members])
    for member, part in zip(members, rows, strict=True):
        part.copy_(member)
    if merged.is_cuda:  # other streams may still read the old memory, and will read the new
        torch.cuda.synchronize(merged.device)
    for member, part in zip(members, rows, strict=True):
        member.data = part
    _know(members, merged)
    return merged


def _allocate(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _shape(members: Sequence[Tensor]) -> tuple[int, ...]:
    return (sum(map(len, members)), *members[0].shape[1:])


def _know(members: Sequence[Tensor], merged: Tensor) -> None:
    _over[_torch.storage_id(merged), merged.data_ptr(), tuple(merged.shape), merged.dtype] = merged
    for member in members:
        _placed[id(member)] = weakref.ref(member, partial(_forget, id(member)))


def _forget(number: int, _: weakref.ref[Tensor]) -> None:
    _placed.pop(number, None)


def _reason_to_stay(member: Tensor, before: Sequence[Tensor], members: Sequence[Tensor]) -> str | None:
    """The reason why a parameter must stay where it is (Note [Who may be moved]).

    Args:
        before: the members whose rows come first in the layout.
    """
    if member.is_inference():
        return "inference_tensor"
    if member.is_cuda and _torch.capturing():
        return "captured_by_caller"
    if not member.is_cuda and member.is_shared():
        return "shared_storage"
    holders, storage = _torch.storage_holders(member), _torch.storage_id(member)
    if holders == 1 and member.untyped_storage().nbytes() == member.nbytes:
        return None
    placed = [parameter for ref in list(_placed.values()) if (parameter := ref()) is not None]
    parameters = [parameter for parameter in placed if _torch.storage_id(parameter) == storage]
    merged = [tensor for tensor in list(_over.values()) if _torch.storage_id(tensor) == storage]
    known = any(other is member for other in parameters) and holders == len(parameters) + len(merged)
    overlap = any(other is not member and _overlap(other, member) for other in parameters)
    start = member.data_ptr() - sum(other.nbytes for other in before)
    ours = all((over.shape, over.data_ptr()) == (_shape(members), start) for over in merged)
    foreign = merged and any(all(other is not one for one in members) for other in parameters)
    return "shared_storage" if not known or overlap or not ours or foreign else None


def _overlap(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes
