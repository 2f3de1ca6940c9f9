"""The kernels of token_choice.py."""

import triton
import triton.language as tl


@triton.jit
def argmax_of_parts_kernel(
    logits, values, indices, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest of every BLOCK columns and its index; the first of equals. Grid: (rows, parts)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * STRIDE + column, mask=column < COLUMNS, other=-float("inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))  # NaN counts as infinity
    value, index = tl.max(x, 0, return_indices=True)
    at = row * tl.num_programs(1) + part
    tl.store(values + at, value)
    tl.store(indices + at, part * BLOCK + index)


@triton.jit
def argmax_of_row_kernel(values, indices, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The index of the largest of a row's parts. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=-float("inf"))
    _, best = tl.max(value, 0, return_indices=True)
    tl.store(out + row, tl.load(indices + row * PARTS + best))


@triton.jit
def _mix(value):
    value += -7046029254386353131
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _number(tensor, row, column, row_stride, column_stride, mask):
    return tl.load(tensor + row * row_stride + column * column_stride, mask=mask, other=0).to(tl.int64)


@triton.jit(
    do_not_specialize=["size", "columns", "seed_row", "seed_column", "length_row", "length_column", "use_row",
                       "use_column"]
)  # fmt: skip
def uniforms_kernel(
    seed, length, use, out, size, columns, seed_row, seed_column, length_row, length_column, use_row,
    use_column, BLOCK: tl.constexpr,
):  # fmt: skip
    """token_choice.uniforms of `size` numbers in rows of `columns`, with all strides. Grid: (blocks,)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    row, column = i // columns, i % columns
    mixed = _mix(_number(seed, row, column, seed_row, seed_column, mask))
    mixed = _mix(mixed + _number(length, row, column, length_row, length_column, mask))
    mixed = _mix(mixed + _number(use, row, column, use_row, use_column, mask))
    tl.store(out + i, ((mixed >> 40) & 0xFFFFFF).to(tl.float32) * (1 / 16777216), mask=mask)
