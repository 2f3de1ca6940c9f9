"""Memory that kernels may read before the kernels in front of them are done.

Note [Early reads]
A kernel that is launched as a dependent (Note [Dependent launches] in dependent.py) starts while kernels in
front of it run, up to the first one of its graph. What they write it reads only after it has waited. What
none of them writes it may read at once, while the memory would idle. An op does not know what runs in front
of it. Who captures a graph does, and says so for the time of the capture. A replay begins after all work
before it, so what is written between two replays does not matter. Outside of a capture nothing is read
early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_unwritten: ContextVar[frozenset[int]] = ContextVar("unwritten", default=frozenset())


@contextmanager
def unwritten(tensors: Iterable[Tensor], *, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """Graphs that are captured within write no storage of `tensors` (Note [Early reads]).

    Args:
        but: what they do write, whatever was said of it before.
    """
    token = _unwritten.set((_unwritten.get() | _storages(tensors)) - _storages(but))
    try:
        yield
    finally:
        _unwritten.reset(token)


def may_read_early(tensors: Iterable[Tensor]) -> bool:
    """Whether a kernel that is launched now may read all of them before it waits."""
    known = _unwritten.get()
    read = known and all(_storage(tensor) in known for tensor in tensors)
    return bool(read) and torch.cuda.is_current_stream_capturing()


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    return frozenset(filter(None, map(_storage, tensors)))


def _storage(tensor: Tensor) -> int | None:
    """Its address; None for tensors without memory of their own, as those that wrap others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
