"""What choosing tokens needs in every round: the argmax of a row of logits, and random numbers.

torch's argmax of one row of 128,256 logits takes 30 us on an H200, and a round of a chain of 3 needs four of
them. A hash of plain tensor operations takes 45 launches of 1.5 us. Together that is more than a layer of an
8B model.

Note [Randomness without a generator]
A generator's state would depend on which requests share a batch, on how much is drafted, and on which graphs
were replayed. So a random number is a hash of three things: the request's seed, the length at which it is
used, and its use. The same request draws the same numbers in every batch and in every graph mode.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, Planned, kernels_serve

# The constants of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), as int64.
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_BLOCK, _BLOCK_NUMBERS = 2048, 128
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def argmax(logits: Tensor) -> Tensor:
    """int32 `[rows]`: the index of the largest of each row of `logits [rows, V]`, the first of equals.

    NaN counts as infinity. So a row of a broken model has a token too, the same one in every batch and on
    every device.
    """
    if not _has_kernel(logits):
        return first_largest(logits).int()
    out, launches = _argmax_launches(logits)
    for each in launches:
        each.bind()()
    return out


def compile_argmax_ahead(logits: Tensor) -> None:
    """Have the kernels compiled in other threads that `argmax` launches for rows like those of `logits`."""
    if _has_kernel(logits):
        for each in _argmax_launches(logits)[1]:
            each.compile_ahead()


def _has_kernel(logits: Tensor) -> bool:
    served = kernels_serve(logits) and logits.dtype in _FLOATS
    return served and logits.stride(1) == 1 and logits.shape[1] > 0


def _argmax_launches(logits: Tensor) -> tuple[Tensor, tuple[Planned, Planned]]:
    """What will hold the result, and the two launches that write it."""
    from triton import next_power_of_2

    rows, columns = logits.shape
    parts = -(-columns // _BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    indices = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    of_parts, of_row, _ = _launchers()
    constants = columns, logits.stride(0), _BLOCK
    return out, (
        Planned(of_parts, (rows, parts, 1), (logits, values, indices), constants),
        Planned(of_row, (rows, 1, 1), (values, indices, out), (parts, next_power_of_2(parts))),
    )


def first_largest(logits: Tensor) -> Tensor:
    """int64 `[...]`: the rule of `argmax` in torch, of `logits [..., V]`."""
    return torch.where(logits.isnan(), torch.inf, logits).argmax(-1)


def uniforms(seed: Tensor, length: Tensor, use: Tensor) -> Tensor:
    """float32 in [0, 1): a function of three integers. See Note [Randomness without a generator].

    Args:
        seed: int64; length, use: integers; shapes that broadcast.
    """
    numbers = torch.broadcast_tensors(seed, length, use)
    if not (kernels_serve(seed) and numbers[0].dim() in (1, 2)):
        return _uniforms(*numbers)
    out = torch.empty(numbers[0].shape, dtype=torch.float32, device=seed.device)
    columns = out.shape[1] if out.dim() == 2 else 1
    strides = [stride for each in numbers for stride in (*each.stride(), 0)[:2]]
    grid = (-(-out.numel() // _BLOCK_NUMBERS), 1, 1)
    _launchers()[2](grid, (*numbers, out, out.numel(), columns, *strides), _BLOCK_NUMBERS)
    return out


def _uniforms(seed: Tensor, length: Tensor, use: Tensor) -> Tensor:
    mixed = _mix(_mix(_mix(seed.long()) + length.long()) + use.long())
    return _shift(mixed, 40).to(torch.float32) * 2**-24


def _mix(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ _shift(value, 30)) * _FIRST
    value = (value ^ _shift(value, 27)) * _SECOND
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@cache
def _launchers() -> tuple[Launcher, Launcher, Launcher]:
    from . import token_choice_kernels as kernels

    return (
        Launcher(kernels.argmax_of_parts_kernel, num_warps=4),
        Launcher(kernels.argmax_of_row_kernel, num_warps=1),
        Launcher(kernels.uniforms_kernel, num_warps=1),
    )
