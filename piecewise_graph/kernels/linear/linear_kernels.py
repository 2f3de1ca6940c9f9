"""Linear layers of a few rows: kernels that spend most of their time reading the weight.

Note [Splits are summed by the reader]
If a weight has too few rows to occupy the device, its columns are cut into `SPLITS` parts, each with its own
result in float32. The graph around the op sums them, and Inductor fuses the sum into the kernel that reads
the result.

Note [Members]
Linears of one input (q/k/v, gate/up) are computed by one launch: up to three weights, biases and results, and
as many programs as all of them have blocks. Nothing is moved; a program finds out whose block it has.

Note [Weight first]
A weight does not depend on the kernel before. Each program asks for the first lines of its rows, then waits.
Weights are read once per step, so loads mark them as what leaves the caches first.
"""

import triton
import triton.language as tl

from piecewise_graph.kernels.dependent import prefetch, start_dependent

LINE = tl.constexpr(64)  # elements of 16 bits in a line of the cache
AHEAD = tl.constexpr(4)  # lines of each row that are asked for before the wait


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _member(w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, BLOCK_N: tl.constexpr):
    """Note [Members]: weight, bias, result and rows of this program's member, and which block of it."""
    block = tl.program_id(0)
    weight, bias, out, rows = w0, b0, out0, rows0
    if block >= tl.cdiv(rows0, BLOCK_N):
        block -= tl.cdiv(rows0, BLOCK_N)
        weight, bias, out, rows = w1, b1, out1, rows1
        if block >= tl.cdiv(rows1, BLOCK_N):
            block -= tl.cdiv(rows1, BLOCK_N)
            weight, bias, out, rows = w2, b2, out2, rows2
    return weight, bias, out, rows, block


@triton.jit
def _prefetch_and_wait(weight, n, first, rows, columns, DEPENDENT: tl.constexpr):
    """Note [Weight first]: rows `n` of a program whose part begins at column `first`."""
    if DEPENDENT:
        k = tl.minimum(first + tl.arange(0, AHEAD) * LINE, columns - 1)
        prefetch(weight + tl.minimum(n, rows - 1).to(tl.int64)[:, None] * columns + k[None, :])
    start_dependent(DEPENDENT)


@triton.jit(do_not_specialize=["tokens", "rows0", "rows1", "rows2", "columns"])
def one_row(
    x,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    out0,
    out1,
    out2,
    tokens,
    rows0,
    rows1,
    rows2,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out[split, n] = sum over the split's k of x[k] * weight[n, k]`, the bias in the first split.

    Args:
        x: `[columns]`; weights: `[rows, columns]`; biases: `[rows]`; results: `[SPLITS, rows]`. All are
            contiguous. The grid has programs for one, two or three of the members.
        tokens, TOKENS: 1 and unused; both kernels are launched alike.
        EVEN: blocks divide all rows and the columns.
    """
    if EVEN:
        columns = columns // 16 * 16  # which tells Triton that rows are as aligned as the first one
    part = tl.cdiv(columns, SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    weight, bias, out, rows, block = _member(
        w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, BLOCK_N
    )
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = weight + n.to(tl.int64)[:, None] * columns
    _prefetch_and_wait(weight, n, split * part, rows, columns, DEPENDENT)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for step in range(0, part, BLOCK_K):
        k = split * part + step + tl.arange(0, BLOCK_K)
        w = _load(row + k[None, :], (n[:, None] < rows) & (k[None, :] < columns), EVEN).to(tl.float32)
        v = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < columns, other=0.0)
        total += w * v.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=(n < rows) & (split == 0), other=0.0).to(tl.float32)
    tl.store(out + split * rows + n, result.to(out.dtype.element_ty), mask=n < rows)


@triton.jit(do_not_specialize=["tokens", "rows0", "rows1", "rows2", "columns"])
def few_rows(
    x,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    out0,
    out1,
    out2,
    tokens,
    rows0,
    rows1,
    rows2,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same for `x [tokens, columns]` and results `[SPLITS, tokens, rows]`, at most TOKENS tokens.

    The weight is the left operand of the matrix product: its rows fill the longer side of a tensor core,
    tokens the shorter one.
    """
    if EVEN:
        columns = columns // 16 * 16  # which tells Triton that rows are as aligned as the first one
    part = tl.cdiv(columns, SPLITS * BLOCK_K) * BLOCK_K
    split = tl.program_id(1)
    weight, bias, out, rows, block = _member(
        w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, BLOCK_N
    )
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, TOKENS)
    row = weight + n.to(tl.int64)[:, None] * columns
    _prefetch_and_wait(weight, n, split * part, rows, columns, DEPENDENT)
    total = tl.zeros((BLOCK_N, TOKENS), tl.float32)
    for step in range(0, part, BLOCK_K):
        k = split * part + step + tl.arange(0, BLOCK_K)
        w = _load(row + k[None, :], (n[:, None] < rows) & (k[None, :] < columns), EVEN)
        inside = m[None, :] < tokens
        if not EVEN:
            inside = inside & (k[:, None] < columns)
        v = tl.load(x + m[None, :] * columns + k[:, None], mask=inside, other=0.0)
        total = tl.dot(w, v, total)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=(n < rows) & (split == 0), other=0.0).to(tl.float32)[:, None]
    place = out + (split * tokens + m[None, :]) * rows + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m[None, :] < tokens) & (n[:, None] < rows))
