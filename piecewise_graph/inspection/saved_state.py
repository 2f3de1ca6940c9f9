"""Whatever a forward may write, kept and put back."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program
from piecewise_graph.splitter.split_graph import Ref


class SavedState:
    """Copies of tensors, and the state of the random generators, at one moment.

    A tensor that finds no room for its copy on its device is kept on the host.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        found = {
            (_torch.storage_id(t), t.data_ptr(), t.shape, t.stride()): t for t in tensors if not t.is_meta
        }
        self._saved = [(tensor, _copy(tensor)) for tensor in found.values()]
        devices = {tensor.device for tensor, _ in self._saved if tensor.is_cuda}
        self._random = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        self._host_random = torch.get_rng_state()

    def restore(self) -> None:
        torch.set_rng_state(self._host_random)
        for device, state in self._random:
            torch.cuda.set_rng_state(state, device)
        for tensor, kept in self._saved:
            if not _is_same(tensor, kept):  # a write would count as a change of the tensor
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(kept)

    @contextmanager
    def around(self) -> Iterator[None]:
        """The block begins and ends in the saved state."""
        self.restore()
        try:
            yield
        finally:
            self.restore()


def writable(program: Program, args: Sequence[Any]) -> list[Tensor]:
    """Of a call's arguments those that its steps may write: all but parameters that no step declares."""
    split = program.split
    named = {
        item.slot
        for step in split.segments
        for index in program.compiled[step.index].facts.written
        if isinstance(item := step.inputs[index], Ref)
    }
    storages = {split.storages[slot] for slot in named}
    return [
        value
        for index, value in enumerate(args)
        if isinstance(value, Tensor)
        and (not isinstance(value, torch.nn.Parameter) or split.storages[index] in storages)
    ]


def copied(value: Any) -> Any:
    """An argument for one more call: an object that is no tensor (a cache) is copied, if it can be."""
    if isinstance(value, Tensor) or not hasattr(value, "__dict__"):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # whatever its class raises: the call gets the object itself
        return value


def _copy(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        try:
            return tensor.detach().clone()
        except torch.OutOfMemoryError:
            return tensor.detach().cpu()


def _is_same(tensor: Tensor, kept: Tensor) -> bool:
    there = kept.to(tensor.device)
    return bool(((tensor == there) | ((tensor != tensor) & (there != there))).all())
