"""Streams, graph pools and profiler of the device."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import torch


def capturing() -> bool:
    """The current stream is capturing a graph; what torch.cuda's function of that name asks."""
    return torch._C._cuda_isCurrentStreamCapturing()


def stream_address(device: torch.device) -> int:
    """Tells the caller's stream from others (0 is CUDA's legacy default stream).

    It is ten times cheaper than comparing stream objects.
    """
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def stream_setter(stream: torch.cuda.Stream) -> Callable[[], None]:
    """Makes it the current stream, and its device the current one, faster than torch.cuda.set_stream does."""
    stream_id, index, kind = stream.stream_id, stream.device_index, stream.device_type
    return partial(torch._C._cuda_setStream, stream_id=stream_id, device_index=index, device_type=kind)


def current_device() -> int:
    """Index of the current GPU, where CUDA is up."""
    return torch._C._cuda_getDevice()


def clear_cublas_workspaces() -> None:
    """See Note [cuBLAS workspaces] in recorder.py."""
    torch._C._cuda_clearCublasWorkspaces()


def pool_bytes(pool_id: tuple[int, int]) -> int:
    """Bytes of device memory that a graph pool holds.

    Asked twice per captured bucket: a snapshot of all memory would list every weight of the model.

    torch (2.11 to 2.13) drops a reference that it does not own to each number that it is given here. Without
    another one to drop, a number would be freed while its tuple holds it, and the process crash later.
    """
    asked = (*pool_id, False)
    for number in asked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        segments = torch.cuda.memory_snapshot(asked[:2], include_traces=asked[2])
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool_id))


_FORGOTTEN: list[torch.cuda.CUDAGraph] = []


def forget_capture(graph: torch.cuda.CUDAGraph, memory: torch.cuda.MemPool) -> None:
    """Put right what a capture leaves that could not be ended, on the current stream.

    torch 2.11 goes on allocating from `memory`, and holds it; later versions end that themselves (pytorch PR
    180395), and complain here. Allocation of pinned memory goes on, asking the graph for its stream, so that
    the graph has to live, and no capture into this memory can begin. All versions leave the random generators
    in capture state, where the next random op anywhere raises; an empty capture takes them out of it.
    """
    _FORGOTTEN.append(graph)
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory.id)
        torch._C._cuda_releasePool(torch.cuda.current_device(), memory.id)
    empty = torch.cuda.CUDAGraph()
    empty.capture_begin(capture_error_mode="thread_local")
    empty.capture_end()


def named_range(name: str) -> AbstractContextManager[Any]:
    """Mark a block in the trace of a profiler; free of cost where none records this thread."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(name)
