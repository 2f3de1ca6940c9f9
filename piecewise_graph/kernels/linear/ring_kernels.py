"""Linear layers of 2 to 32 rows of x whose tiles come by rings: Note [Rings] in rings.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from piecewise_graph.kernels.linear.rings import begin, halves, products, stored_layout, summed


@gluon.jit
def _member(block, w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, BLOCK_N: gl.constexpr):
    """Note [Members] in linear_kernels.py: weight, bias, result, its rows, a block's first one."""
    weight, bias, out, rows = w0, b0, out0, rows0
    if block >= gl.cdiv(rows0, BLOCK_N):
        block -= gl.cdiv(rows0, BLOCK_N)
        weight, bias, out, rows = w1, b1, out1, rows1
        if block >= gl.cdiv(rows1, BLOCK_N):
            block -= gl.cdiv(rows1, BLOCK_N)
            weight, bias, out, rows = w2, b2, out2, rows2
    return weight, bias, out, rows, block * BLOCK_N


@gluon.jit
def _scale(
    squares,
    blocks,
    tokens,
    columns,
    epsilon,
    TOKENS: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Note [Deferred norm] in linear_kernels.py: what each token is scaled by. It comes while tiles do."""
    if BLOCKS == 0:
        return 1.0
    else:
        of_squares: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [gl.num_warps(), 1], [1, 0])
        share = gl.arange(0, BLOCKS, gl.SliceLayout(1, of_squares))[:, None]
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, of_squares))[None, :]
        inside = (share < blocks) & (token < tokens)
        shares = gl.load(squares + share * tokens + token, mask=inside, other=0.0)
        return gl.convert_layout(gl.rsqrt(gl.sum(shares, 0) / columns + epsilon), gl.SliceLayout(0, LAYOUT))


@gluon.jit
def _finished(total, scale, bias, n, rows, HAS_BIAS: gl.constexpr, BLOCKS: gl.constexpr):
    if BLOCKS > 0:
        total *= scale[None, :]
    if HAS_BIAS:
        total += gl.load(bias + n, mask=n < rows, other=0.0).to(gl.float32)[:, None]
    return total


_NUMBERS = ["early", "tokens", "rows0", "rows1", "rows2", "columns", "blocks", "epsilon"]


@gluon.jit(do_not_specialize=_NUMBERS)
def few_rows_by_ring(
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
    squares,
    early,
    tokens,
    rows0,
    rows1,
    rows2,
    columns,
    blocks,
    epsilon,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    TOKENS: gl.constexpr,
    EVEN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """`few_rows` of linear_kernels.py: one split, and columns that 16 divides.

    Args:
        EVEN: blocks divide the columns, of which there are STAGES steps at least.
    """
    columns = columns // 16 * 16  # which tells Triton that rows are as aligned as the first one
    if GATED:
        weights, bias, out, rows, first = (w0, w1), b0, out0, rows0, gl.program_id(0) * (BLOCK_N // 2)
    else:
        weight, bias, out, rows, first = _member(
            gl.program_id(0), w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, BLOCK_N
        )
        weights = (weight, weight)
    begun = begin(
        x, weights, first, rows, early, tokens, columns, BLOCK_N, BLOCK_K, PARTS, TOKENS, STAGES, EVEN, GATED
    )
    NUMBER: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of results
    stored: gl.constexpr = stored_layout(NUMBER, gl.num_warps())
    n = first + gl.arange(0, NUMBER, gl.SliceLayout(1, stored))
    m = gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    scale = _scale(squares, blocks, tokens, columns, epsilon, TOKENS, BLOCKS, stored)
    total = products(begun, columns, BLOCK_N, BLOCK_K, PARTS, TOKENS, STAGES, EVEN)
    if GATED:
        gate, up = halves(total, PARTS, NUMBER, TOKENS, stored)
        gate = _finished(gate, scale, b0, n, rows, HAS_BIAS, BLOCKS)
        value = gate / (1 + gl.exp(-gate)) * _finished(up, scale, b1, n, rows, HAS_BIAS, BLOCKS)
    else:
        value = _finished(summed(total, PARTS, stored), scale, bias, n, rows, HAS_BIAS, BLOCKS)
    place, inside = m[None, :] * rows + n[:, None], (m[None, :] < tokens) & (n[:, None] < rows)
    gl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["early", "tokens", "rows", "columns"])
def few_rows_added_by_ring(
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
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    TOKENS: gl.constexpr,
    EVEN: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """`few_rows_added` of added_kernels.py, where 16 divides the columns."""
    columns = columns // 16 * 16
    first = gl.program_id(0) * BLOCK_N
    begun = begin(
        x,
        (weight, weight),
        first,
        rows,
        early,
        tokens,
        columns,
        BLOCK_N,
        BLOCK_K,
        PARTS,
        TOKENS,
        STAGES,
        EVEN,
        False,
    )
    stored: gl.constexpr = stored_layout(BLOCK_N, gl.num_warps())
    n = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
    m = gl.arange(0, TOKENS, gl.SliceLayout(0, stored))
    own = gl.minimum(n, rows - 1)
    place, inside = m[None, :] * rows + n[:, None], (m[None, :] < tokens) & (n[:, None] < rows)
    before = gl.load(residual + place, mask=inside, other=0.0)  # these come while tiles do
    scale = gl.load(gain + own)
    total = summed(products(begun, columns, BLOCK_N, BLOCK_K, PARTS, TOKENS, STAGES, EVEN), PARTS, stored)
    if HAS_BIAS:
        total += gl.load(bias + own).to(gl.float32)[:, None]
    added = (total + before.to(gl.float32)).to(hidden.dtype.element_ty)
    wide = gl.where(inside, added.to(gl.float32), 0.0)
    gl.store(hidden + place, added, mask=inside)
    gl.store(scaled + place, (wide * scale.to(gl.float32)[:, None]).to(hidden.dtype.element_ty), mask=inside)
    gl.store(squares + gl.program_id(0) * tokens + m, gl.sum(wide * wide, 0), mask=m < tokens)
