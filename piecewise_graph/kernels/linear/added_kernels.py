"""A linear of a few rows, the residual it is added to, and what the norm of the sum is made of."""

import triton
import triton.language as tl

from piecewise_graph.kernels.dependent import wait
from piecewise_graph.kernels.linear.linear_kernels import begin, of_few_rows, of_one_row, tile_of


@triton.jit(do_not_specialize=["early", "tokens", "rows", "columns"])
def few_rows_added(
    x,
    weight,
    bias,
    residual,
    gain,
    hidden,
    scaled,
    squares,
    early,
    tokens,
    rows,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`hidden = residual + x weight^T + bias`, and what its norm is made of (Note [Deferred norm]).

    Args:
        x: `[tokens, columns]`; weight: `[rows, columns]`; bias, gain: `[rows]`; all contiguous.
        residual, hidden, scaled: `[tokens, rows]`; `scaled = hidden * gain`.
        squares: float32 `[blocks, tokens]`, a block's sum of squares of its columns of `hidden`.
        early, TOKENS, EVEN, ALIGNED: see `few_rows`.
    """
    if ALIGNED:
        columns = columns // 16 * 16
    block = tl.program_id(0)
    n, m = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, TOKENS)
    own = tl.minimum(n, rows - 1).to(tl.int64)
    row = weight + own * columns
    begin(row, 0, columns, early if TOKENS == 1 else 0, AHEAD, DEPENDENT)
    if TOKENS == 1:
        tile = tile_of(row, tl.arange(0, BLOCK_K), columns, EVEN)
        wait(DEPENDENT)
    place, inside = m[None, :] * rows + n[:, None], (m[None, :] < tokens) & (n[:, None] < rows)
    before = tl.load(residual + place, mask=inside, other=0.0)
    scale = tl.load(gain + own).to(tl.float32)[:, None]
    part = tl.cdiv(columns, PARTS * BLOCK_K) * PARTS * BLOCK_K
    if TOKENS == 1:
        total = of_one_row(x, row, tile, 0, part, columns, BLOCK_N, BLOCK_K, EVEN)
    else:
        total = of_few_rows(x, row, 0, part, tokens, columns, BLOCK_N, BLOCK_K, PARTS, TOKENS, EVEN)
    if HAS_BIAS:
        total += tl.load(bias + own).to(tl.float32)[:, None]
    kind = hidden.dtype.element_ty
    added = (total + before.to(tl.float32)).to(kind)
    wide = tl.where(inside, added.to(tl.float32), 0.0)
    tl.store(hidden + place, added, mask=inside)
    tl.store(scaled + place, (wide * scale).to(kind), mask=inside)
    tl.store(squares + block * tokens + m, tl.sum(wide * wide, 0), mask=m < tokens)
