"""The kernel of copies.py."""

import triton
import triton.language as tl

_POINTERS = ["a", "a_to", "b", "b_to", "c", "c_to", "d", "d_to"]
_INTEGERS = ["a_size", "b_size", "c_size", "d_size"]


@triton.jit
def _copy(source, to, size, i):
    tl.store(to + i, tl.load(source + i, mask=i < size), mask=i < size)


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_POINTERS)
def copy_kernel(
    a, a_to, a_size, b, b_to, b_size, c, c_to, c_size, d, d_to, d_size, BLOCK: tl.constexpr
):  # fmt: skip
    """`to[:size] = source[:size]` for four pairs. Grid: (blocks of the largest, pairs)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.program_id(1)
    if pair == 0:
        _copy(a, a_to, a_size, i)
    elif pair == 1:
        _copy(b, b_to, b_size, i)
    elif pair == 2:
        _copy(c, c_to, c_size, i)
    else:
        _copy(d, d_to, d_size, i)
