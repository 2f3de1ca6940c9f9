"""Memory that kernels may read before the kernels in front of them are done.

Note [Early reads]
A kernel that is launched as a dependent (Note [Dependent launches] in dependent.py) starts while kernels in
front of it run, up to the first one of its graph. What they write it reads only after it has waited. What
none of them writes it may read at once, while the memory would idle. An op does not know what runs in front
of it. Who captures a graph does, and says so for the time of the capture; of what ops find in the forward
context, the context does. A replay begins after all work
before it on its stream, so what is written between two replays does not matter. Outside of a capture nothing
is read early.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_Span = tuple[int, int]  # addresses of a storage: its first byte, and the one behind its last

_unwritten: ContextVar[frozenset[_Span]] = ContextVar("unwritten", default=frozenset())


@contextmanager
def unwritten(tensors: Iterable[Tensor], *, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """Graphs that are captured within write no storage of `tensors` (Note [Early reads]).

    What was said outside of the block does not count in it.

    Args:
        but: what they do write. Storages that share memory with one of theirs are not read early.
    """
    with _knowing(_apart(_spans(tensors), but)):
        yield


@contextmanager
def written(tensors: Iterable[Tensor]) -> Iterator[None]:
    """What is captured within writes these, whatever was said of them."""
    with _knowing(_apart(_unwritten.get(), tensors)):
        yield


def may_read_early(tensors: Iterable[Tensor]) -> bool:
    """Whether a kernel that is launched now may read all of them before it waits."""
    known = _unwritten.get()
    read = known and all(_span(tensor) in known for tensor in tensors)
    return bool(read) and _is_capturing()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def _knowing(spans: frozenset[_Span]) -> Iterator[None]:
    token = _unwritten.set(spans)
    try:
        yield
    finally:
        _unwritten.reset(token)


def _apart(spans: frozenset[_Span], others: Iterable[Tensor]) -> frozenset[_Span]:
    taken = _spans(others) if spans else frozenset()  # nothing is known where nobody captures
    return frozenset(
        (begin, end) for begin, end in spans if not any(begin < last and first < end for first, last in taken)
    )


def _spans(tensors: Iterable[Tensor]) -> frozenset[_Span]:
    return frozenset(filter(None, map(_span, tensors)))


def _span(tensor: Tensor) -> _Span | None:
    """None for tensors without memory of their own, as those that wrap others, and for empty ones."""
    try:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return (begin, begin + storage.nbytes()) if begin else None
