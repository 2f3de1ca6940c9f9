"""Owned input buffers: what a caller passes is copied to where the captured graphs read it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.sizes import TensorSpec, overwrite, repeated_dims


def narrow(tensor: Tensor, spec: TensorSpec, program: Program, num_tokens: int) -> Tensor:
    """The first `num_tokens` of every token dimension of a padded tensor."""
    for dim in spec.token_dims(program.token):
        tensor = tensor.narrow(dim, 0, num_tokens)
    return tensor


def tails(tensor: Tensor, spec: TensorSpec, program: Program, num_tokens: int) -> list[Tensor]:
    """The padded parts of `tensor`: what lies past `num_tokens`, one view per token dimension.

    Every element of a view lies in a place of its own; where all tokens are one element, none is padded.
    """
    repeated = repeated_dims(tensor)
    for dim in repeated:
        if dim not in spec.token_dims(program.token):
            tensor = tensor.narrow(dim, 0, 1)
    return [
        tensor.narrow(dim, num_tokens, tensor.shape[dim] - num_tokens)
        for dim in spec.token_dims(program.token)
        if dim not in repeated and tensor.shape[dim] > num_tokens
    ]


class FlatBuffers:
    """Storage by the element, reused between values whose lifetimes do not overlap.

    A view of any layout is laid over it, so that one buffer serves every bucket contiguously: a
    `[B, T]` tensor narrowed in its second dimension would not be.
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []

    def restart(self) -> None:
        """Every buffer may be taken again (another bucket is being recorded)."""
        self._free = list(self._all)

    def take(self, spec: TensorSpec, shape: Sequence[int], stride: Sequence[int], numel: int) -> Tensor:
        """A tensor of this layout over the smallest free buffer that fits, zeroed when it is new."""
        fitting = [
            flat
            for flat in self._free
            if flat.dtype == spec.dtype and flat.device == spec.device and flat.numel() >= numel
        ]
        if fitting:
            flat = min(fitting, key=Tensor.numel)
            self._free = [other for other in self._free if other is not flat]
        else:
            with torch.inference_mode(False):  # else only inference-mode callers could write it
                flat = torch.zeros(max(numel, 1), dtype=spec.dtype, device=spec.device)
            self._all.append(flat)
        return flat.as_strided(tuple(shape), tuple(stride))

    def give_back(self, view: Tensor) -> None:
        self._free.extend(flat for flat in self._all if flat.data_ptr() == view.data_ptr())

    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._all)


@dataclass(frozen=True)
class InputCopies:
    """How one call's activations reach the buffers of a bucket, for one token count.

    Attributes:
        indices, destinations: arguments and where they go, in one launch.
        expanded: the same for arguments with a dimension of stride 0, one by one.
        padding: what lies past the live tokens.
    """

    indices: tuple[int, ...]
    destinations: list[Tensor]
    expanded: tuple[tuple[int, Tensor], ...]
    padding: list[Tensor]

    @cached_property
    def views(self) -> dict[int, Tensor]:
        """Where each copied argument goes, by its index."""
        return dict(zip(self.indices, self.destinations, strict=True)) | dict(self.expanded)

    @cached_property
    def bounds(self) -> list[int]:
        """Of every buffer the address of its first byte and the one behind its last, in ascending order.

        An address lies in a buffer where an odd number of these are at most as large.
        """
        storages = [view.untyped_storage() for view in self.views.values()]
        ranges = {(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.data_ptr()}
        return [address for bounds in sorted(ranges) for address in bounds]

    def is_apart(self, tensor: Tensor, destination: Tensor) -> bool:
        """`tensor` is `destination`, or lies in none of the buffers, which are written one by one.

        Each buffer is all of its storage, so that the address of the first element tells.
        """
        address = tensor.data_ptr()
        if bisect_right(self.bounds, address) % 2 == 0:
            return True
        return address == destination.data_ptr() and tensor.stride() == destination.stride()

    def fill(self, args: Sequence[Any]) -> None:
        """Copy in, then zero the tail: zeros are legal indices, and they keep NaN out of padded ops."""
        given = {
            index: args[index] if self.is_apart(args[index], view) else args[index].clone()
            for index, view in self.views.items()
        }
        if self.destinations:
            torch._foreach_copy_(self.destinations, [given[index] for index in self.indices])
        for index, destination in self.expanded:
            overwrite(destination, given[index])
        if self.padding:
            torch._foreach_zero_(self.padding)


class StaticInputs:
    """The buffers of one trace, large enough for its largest bucket; allocated when they are first used."""

    def __init__(self, program: Program, largest: int) -> None:
        self._program, self._largest = program, largest
        self._allocated: dict[int, Tensor] = {}

    @property
    def _flat(self) -> dict[int, Tensor]:
        """One buffer per activation."""
        if not self._allocated:
            made: dict[int, Tensor] = {}  # whole or not at all: an allocation may fail
            sizes = self._program.sizes_at(self._largest)
            for index, spec in self._program.split.activations:
                made[index] = FlatBuffers().take(spec, *_extent(spec.storage_numel(sizes)))
            self._allocated = made
        return self._allocated

    def view(self, index: int, bucket: int) -> Tensor:
        """Argument `index` as the graphs of `bucket` read it."""
        spec, sizes = self._spec(index), self._program.sizes_at(bucket)
        return self._flat[index].as_strided(spec.shape_at(sizes), spec.stride_at(sizes))

    def copies(self, bucket: int, num_tokens: int) -> InputCopies:
        plain: dict[int, Tensor] = {}
        expanded: list[tuple[int, Tensor]] = []
        padding: list[Tensor] = []
        for index in self._flat:
            view, spec = self.view(index, bucket), self._spec(index)
            live = narrow(view, spec, self._program, num_tokens)
            if 0 in view.stride():  # an expanded argument: copy_ and zero_ refuse to write one place twice
                expanded.append((index, live))
            else:
                plain[index] = live
            padding += tails(view, spec, self._program, num_tokens)
        return InputCopies(tuple(plain), list(plain.values()), tuple(expanded), padding)

    def storages(self) -> set[int]:
        """Ids of the buffers' storages."""
        return {_torch.storage_id(flat) for flat in self._allocated.values()}

    def bytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self._allocated.values())

    def _spec(self, index: int) -> TensorSpec:
        return self._program.split.spec(index)


def _extent(numel: int) -> tuple[tuple[int], tuple[int], int]:
    return (numel,), (1,), numel
