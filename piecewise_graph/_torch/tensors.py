"""Tensors, their storages, and containers of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor


def is_plain_tensor(tensor: Tensor) -> bool:
    """It has one storage and torch's own ops: no subclass that is made of other tensors.

    A subclass that changes functions alone (`__torch_function__`) is plain: Dynamo traces what it changes.
    """
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def traced_functions() -> AbstractContextManager[None]:
    """Surround the run of a trace: functions are torch's own, whatever subclass is among the arguments.

    Dynamo has traced what `__torch_function__` makes of them; asked again, it would do it twice. torch 2.13
    runs what a backend returns so, 2.11 does not.
    """
    surroundings: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return surroundings


def functions_while_tracing() -> AbstractContextManager[None]:
    """Surround work on a graph in the middle of a call (`traced_functions`): proxies are such subclasses."""
    surroundings: AbstractContextManager[None] = torch._C._EnableTorchFunction()
    return surroundings


@contextmanager
def as_while_tracing() -> Iterator[None]:
    """Surround work on a graph in the middle of a call, as `functions_while_tracing` does.

    Dynamo traces outside of inference mode, whatever the caller is in. Inside of it, ops that are made of
    others (dropout) are not taken apart, and none is known to have been a copy. It holds Dynamo's lock,
    because tracing sets switches of the whole process.
    """
    from torch._dynamo.convert_frame import compile_lock

    with compile_lock, functions_while_tracing(), torch.inference_mode(False), torch.no_grad():
        yield


def device_of(tensor: Tensor) -> torch.device:
    """Where it lies; the host is one device, whatever index it was asked for by."""
    return torch.device("cpu") if tensor.device.type == "cpu" else tensor.device


def is_wrapped(tensor: Tensor) -> bool:
    """Inside of a transform of functions (vmap): it has no storage, and cannot leave the transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_same_view(one: Tensor, other: Tensor) -> bool:
    """Both are the same elements of one storage, in the same order; for fake tensors of constant sizes."""
    if storage_id(one) != storage_id(other) or one.dtype != other.dtype or one.ndim != other.ndim:
        return False
    layouts = [(*tensor.shape, *tensor.stride(), tensor.storage_offset()) for tensor in (one, other)]
    constant = all(isinstance(size, int) for layout in layouts for size in layout)
    return constant and layouts[0] == layouts[1]


def storage_id(tensor: Tensor) -> int:
    """Identifies the storage that `tensor` views; works for fake tensors too."""
    return tensor.untyped_storage()._cdata


def share_storage(one: Any, other: Any) -> bool:
    """Both are tensors, and views of one storage. Inside of a transform of functions they have none."""
    if not all(isinstance(each, Tensor) and not is_wrapped(each) for each in (one, other)):
        return False
    return storage_id(one) == storage_id(other)


def storage_holders(tensor: Tensor) -> int:
    """How many tensors, and storage objects of Python, hold the storage of `tensor`, itself included.

    The look itself adds holders, and their number depends on the version; a new tensor shows how many.
    """
    return _references(tensor) - _references(torch.empty(1, device="cpu")) + 1


def _references(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def weak_alias(tensor: Tensor) -> Tensor:
    """A tensor over the same device memory that does not keep the memory alive.

    The pool of the captured graphs keeps the memory mapped. The next capture may reuse it, because the alias
    does not own it.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def flatten(structure: Any, whole: type | None = None) -> tuple[list[Any], Any]:
    """(leaves, structure) of nested containers, ModelOutput included; those of type `whole` are leaves."""
    is_leaf = None if whole is None else lambda value: isinstance(value, whole)
    return torch.utils._pytree.tree_flatten(structure, is_leaf=is_leaf)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return torch.utils._pytree.tree_unflatten(leaves, structure)
