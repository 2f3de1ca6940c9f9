"""Several small tensors copied in one launch that costs the host little.

`torch._foreach_copy_` inspects its arguments on every call: 11 us of host time on an H200. A bound launch
(launch.py) of a kernel that only copies takes a third of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, address, kernels_serve

SLOTS = 4
_BLOCK = 512
_DTYPES = frozenset({torch.int64, torch.int32, torch.float32, torch.float16, torch.bfloat16})

Copy = Callable[[Sequence[Tensor]], bool]


def bind_copy(destinations: Sequence[Tensor]) -> Copy | None:
    """A function that copies tensors into `destinations`, each of the same dtype and shape as its own.

    Args:
        destinations: at most 4, contiguous, on one GPU.

    Returns:
        the function, or None where the kernel cannot serve. It enqueues one kernel on the current stream and
        returns True. For tensors that are not contiguous, or while another device is current, it does nothing
        and returns False.
    """
    if not 0 < len(destinations) <= SLOTS or not all(map(_serves, destinations)):
        return None
    if len({tensor.device for tensor in destinations}) > 1:
        return None
    if find_spec("triton") is None:
        return None
    unused = SLOTS - len(destinations)
    targets = [(tensor, tensor.numel()) for tensor in destinations] + [(destinations[0], 0)] * unused
    interleaved = [part for to, size in targets for part in (to, to, size)]
    device = destinations[0].device
    index = device.index if device.type == "cuda" else None
    with torch.cuda.device(index) if index is not None else nullcontext():
        enqueue = _launcher().variant(interleaved, _BLOCK)
    grid = (-(-max(size for _, size in targets) // _BLOCK), len(destinations), 1)
    fixed = [(address(to), size) for to, size in targets]
    rest = tuple(part for to, size in fixed[len(destinations) :] for part in (to, to, size))

    def copy(sources: Sequence[Tensor]) -> bool:
        if index is not None and torch.cuda.current_device() != index:
            return False  # a launch would go to the other device
        arguments: list[Any] = []
        for source, (to, size) in zip(sources, fixed, strict=False):
            if not source.is_contiguous():
                return False
            arguments += (address(source), to, size)
        enqueue(grid, (*arguments, *rest, _BLOCK))
        return True

    return copy


def _serves(tensor: Tensor) -> bool:
    return (
        kernels_serve(tensor)
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and 0 < tensor.numel() < 2**31
    )


@cache
def _launcher() -> Launcher:
    from piecewise_graph.kernels.copy_kernel import copy_kernel

    return Launcher(copy_kernel, num_warps=4)
