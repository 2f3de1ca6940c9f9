"""Linear layers of a few rows: kernels that spend most of their time reading the weight.

Note [Splits are summed by the reader]
If a weight has too few rows to occupy the device, its columns are cut into `SPLITS` parts, each with its own
result in float32. The graph around the op sums them, and Inductor fuses the sum into the kernel that reads
the result.
"""

import triton
import triton.language as tl

from piecewise_graph.kernels.dependent import start_dependent


@triton.jit(do_not_specialize=["tokens", "rows"])
def one_row(
    x,
    weight,
    bias,
    out,
    tokens,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """`out[split, n] = sum over the split's k of x[k] * weight[n, k]`, the bias in the first split.

    Args:
        x: `[COLUMNS]`; weight: `[rows, COLUMNS]`; bias: `[rows]`; out: `[SPLITS, rows]`. All contiguous.
        tokens, BLOCK_M: 1 and unused; both kernels are launched alike.
        EVEN: blocks divide rows and columns.
    """
    PART: tl.constexpr = (COLUMNS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = weight + n.to(tl.int64)[:, None] * COLUMNS
    start_dependent(DEPENDENT, TRIGGER)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(0, PART, BLOCK_K):
        k = split * PART + step + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(row + k[None, :])
            v = tl.load(x + k)
        else:
            w = tl.load(row + k[None, :], mask=(n[:, None] < rows) & (k[None, :] < COLUMNS), other=0.0)
            v = tl.load(x + k, mask=k < COLUMNS, other=0.0)
        total += w.to(tl.float32) * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=(n < rows) & (split == 0), other=0.0).to(tl.float32)
    tl.store(out + split * rows + n, result.to(out.dtype.element_ty), mask=n < rows)


@triton.jit(do_not_specialize=["tokens", "rows"])
def few_rows(
    x,
    weight,
    bias,
    out,
    tokens,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    TRIGGER: tl.constexpr,
):
    """The same for `x [tokens, COLUMNS]` and `out [SPLITS, tokens, rows]`, at most BLOCK_M tokens.

    The weight is the left operand of the matrix product: its rows fill the longer side of a tensor core,
    tokens the shorter one.
    """
    PART: tl.constexpr = (COLUMNS + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    row = weight + n.to(tl.int64)[:, None] * COLUMNS
    start_dependent(DEPENDENT, TRIGGER)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(0, PART, BLOCK_K):
        k = split * PART + step + tl.arange(0, BLOCK_K)
        at = x + m[None, :] * COLUMNS + k[:, None]
        if EVEN:
            w = tl.load(row + k[None, :])
            v = tl.load(at, mask=m[None, :] < tokens, other=0.0)
        else:
            w = tl.load(row + k[None, :], mask=(n[:, None] < rows) & (k[None, :] < COLUMNS), other=0.0)
            v = tl.load(at, mask=(m[None, :] < tokens) & (k[:, None] < COLUMNS), other=0.0)
        total = tl.dot(w, v, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=(n < rows) & (split == 0), other=0.0).to(tl.float32)[:, None]
    place = out + (split * tokens + m[None, :]) * rows + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m[None, :] < tokens) & (n[:, None] < rows))
