"""Linear layers of a few rows: kernels that spend most of their time reading the weight.

Note [Splits are summed by the reader]
If a weight has too few rows to occupy the device, its columns are cut into `SPLITS` parts, each with its own
result in float32. The graph around the op sums them, and Inductor fuses the sum into the kernel that reads
the result.

Note [Members]
Linears of one input (q/k/v, gate/up) are computed by one launch: up to three weights, biases and results, and
as many programs as all of them have blocks. Nothing is moved; a program finds out whose block it has. If the
input is GATED, the first two weights are those of a SwiGLU: a block is half of rows of the one and half of
the same rows of the other, and the program stores the gated product.

Note [Deferred norm]
An RMS norm scales rows, and the linear that reads it is linear in them: it may scale its result instead. So
the linear before the norm adds the residual and stores `hidden`, `hidden * gain`, and for each block the sum
of its squares. The linears after it read `hidden * gain`, add up the squares, always in the same order, and
scale their results. No kernel stands between them. `hidden * gain` is rounded once where a norm rounds twice,
and may be larger than the norm: a dtype with the exponents of float32 holds it.

Note [Weight first]
While a kernel waits for the one before, the memory idles. Where nothing writes the weight (Note [Early
reads] in early_reads.py), a program for one row of x reads its first tile into registers, and then waits:
so the time in between is used. Else it asks for the first lines of its rows before it waits. They come as
far as the L2 cache, which sees what others write. So do the programs here for several rows: Triton loads
their tiles of weight and x into shared memory side by side, and x has to wait. On Hopper, kernels in Gluon
serve 2 to 32 rows, and load tiles of the weight before they wait (Note [Rings] in rings.py).
Weights are read once per step, so loads here mark them as what leaves the caches first.
"""

import triton
import triton.language as tl

from piecewise_graph.kernels.dependent import let_dependents_start, prefetch, start_dependent, wait

LINE = tl.constexpr(64)  # elements of 16 bits in a line of the cache
WIDE = tl.constexpr(8)  # of those that a thread loads at once


@triton.jit
def _load(pointers, mask, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _block(
    block,
    w0,
    w1,
    w2,
    b0,
    b1,
    b2,
    out0,
    out1,
    out2,
    rows0,
    rows1,
    rows2,
    columns,
    BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
):
    """Note [Members]: pointers to a block's rows of weight and bias; where its result begins, and ends.

    Rows past the last one of a weight are the last one again. Their results are not stored.
    """
    local = tl.arange(0, BLOCK_N)
    if GATED:
        first = block * (BLOCK_N // 2)
        n = tl.minimum(first + local % (BLOCK_N // 2), rows0 - 1).to(tl.int64)
        is_gate = local < BLOCK_N // 2
        return tl.where(is_gate, w0, w1) + n * columns, tl.where(is_gate, b0, b1) + n, out0, rows0, first
    weight, bias, out, rows = w0, b0, out0, rows0
    if block >= tl.cdiv(rows0, BLOCK_N):
        block -= tl.cdiv(rows0, BLOCK_N)
        weight, bias, out, rows = w1, b1, out1, rows1
        if block >= tl.cdiv(rows1, BLOCK_N):
            block -= tl.cdiv(rows1, BLOCK_N)
            weight, bias, out, rows = w2, b2, out2, rows2
    n = tl.minimum(block * BLOCK_N + local, rows - 1).to(tl.int64)
    return weight + n * columns, bias + n, out, rows, block * BLOCK_N


@triton.jit
def begin(row, first, columns, early, AHEAD: tl.constexpr, DEPENDENT: tl.constexpr):
    """Note [Weight first]: of rows `row`, from column `first` on; with `early`, the caller has to wait."""
    let_dependents_start(DEPENDENT)
    if DEPENDENT:  # noqa: SIM102 - a constant, unlike the next
        if early == 0:
            k = tl.minimum(first + tl.arange(0, AHEAD) * LINE, columns - 1)
            prefetch(row[:, None] + k[None, :])
            wait(DEPENDENT)


@triton.jit
def tile_of(row, k, columns, EVEN: tl.constexpr):
    """Columns `k` of rows `row`."""
    return _load(row[:, None] + k[None, :], k[None, :] < columns, EVEN)


@triton.jit
def _folded(x, tile, k, columns, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr):
    """Products of a tile and `x[k]`, where those of one load are summed: `[BLOCK_N, BLOCK_K / WIDE]`.

    Sums of single columns would take more registers than the tile itself.
    """
    v = tl.load(x + k) if EVEN else tl.load(x + k, mask=k < columns, other=0.0)
    products = tile.to(tl.float32) * v.to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, (BLOCK_N, BLOCK_K // WIDE, WIDE)), 2)


@triton.jit
def of_one_row(
    x,
    row,
    tile,
    first,
    part,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Products `[BLOCK_N, 1]` of `part` columns from `first` on with one row of x; `tile`: the first ones."""
    k = first + tl.arange(0, BLOCK_K)
    total = _folded(x, tile, k, columns, BLOCK_N, BLOCK_K, EVEN)
    for _ in range(BLOCK_K, part, BLOCK_K):
        k += BLOCK_K
        total += _folded(x, tile_of(row, k, columns, EVEN), k, columns, BLOCK_N, BLOCK_K, EVEN)
    return tl.sum(total, 1)[:, None]


@triton.jit
def of_few_rows(
    x,
    row,
    first,
    part,
    tokens,
    columns,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The same with several rows of x: `[BLOCK_N, TOKENS]`.

    The weight is the left operand of the matrix product: its rows fill the longer side of a tensor core,
    tokens the shorter one. A block of few rows has several PARTS of columns in a step. Each has warps of its
    own, so that all warps have work and enough bytes are in flight.
    """
    m = tl.arange(0, TOKENS)
    if PARTS == 1:
        total = tl.zeros((BLOCK_N, TOKENS), tl.float32)
        for step in range(0, part, BLOCK_K):
            k = first + step + tl.arange(0, BLOCK_K)
            w = _load(row[:, None] + k[None, :], k[None, :] < columns, EVEN)
            inside = (m[None, :] < tokens) if EVEN else (m[None, :] < tokens) & (k[:, None] < columns)
            v = tl.load(x + m[None, :] * columns + k[:, None], mask=inside, other=0.0)
            total = tl.dot(w, v, total)
        return total
    totals = tl.zeros((PARTS, BLOCK_N, TOKENS), tl.float32)
    own = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    for step in range(0, part, PARTS * BLOCK_K):
        k = first + step + own
        w = _load(row[None, :, None] + k[:, None, :], k[:, None, :] < columns, EVEN)
        inside = m[None, None, :] < tokens
        inside = inside if EVEN else inside & (k[:, :, None] < columns)
        v = tl.load(x + m[None, None, :] * columns + k[:, :, None], mask=inside, other=0.0)
        totals = tl.dot(w, v, totals)
    return tl.sum(totals, 0)


@triton.jit
def _squares_of(squares, blocks, tokens, TOKENS: tl.constexpr, BLOCKS: tl.constexpr):
    """Note [Deferred norm]: `squares [blocks, tokens]` as `[BLOCKS, TOKENS]`, zeros where there are none."""
    block, m = tl.arange(0, BLOCKS)[:, None], tl.arange(0, TOKENS)[None, :]
    return tl.load(squares + block * tokens + m, mask=(block < blocks) & (m < tokens), other=0.0)


@triton.jit
def _store(
    total,
    bias,
    out,
    rows,
    first,
    tokens,
    split,
    BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
):
    """`total [BLOCK_N, TOKENS]` and the bias, or what is gated of it, in the result's dtype."""
    if HAS_BIAS:
        total += tl.load(bias, mask=split == 0, other=0.0).to(tl.float32)[:, None]
    n, m = first + tl.arange(0, BLOCK_N // 2 if GATED else BLOCK_N), tl.arange(0, TOKENS)
    if GATED:
        pair = tl.reshape(total, (2, BLOCK_N // 2, TOKENS))
        is_gate = tl.arange(0, 2)[:, None, None] == 0
        gate, up = tl.sum(tl.where(is_gate, pair, 0.0), 0), tl.sum(tl.where(is_gate, 0.0, pair), 0)
        total = gate * tl.sigmoid(gate) * up
    place = out + m[None, :] * rows + n[:, None]
    tl.store(place, total.to(out.dtype.element_ty), mask=(m[None, :] < tokens) & (n[:, None] < rows))


_NUMBERS = ["early", "tokens", "rows0", "rows1", "rows2", "columns", "blocks", "epsilon"]


@triton.jit(do_not_specialize=_NUMBERS)
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
    squares,
    early,
    tokens,
    rows0,
    rows1,
    rows2,
    columns,
    blocks,
    epsilon,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    EVEN: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    TILED: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`out[split, m, n] = sum over the split's k of x[m, k] * weight[n, k]`, the bias in the first split.

    Args:
        x: `[tokens, columns]`; weights: `[rows, columns]`; biases: `[rows]`; results:
            `[SPLITS, tokens, rows]`. All are contiguous. The grid has programs for one, two or three of the
            members.
        squares: float32 `[blocks, tokens]`; with `epsilon` they scale rows of x (Note [Deferred norm]).
        early: not 0 = the weights may be read before the wait (Note [Weight first]).
        TOKENS: at least `tokens`, unless TILED; 1, or 16 and more.
        EVEN: blocks divide the columns.
        ALIGNED: 16 does. Otherwise each element is a load of its own.
        GATED: one result, `silu(w0 x + b0) * (w1 x + b1)`; one split.
        TILED: a program computes TOKENS rows of x, and each block has programs for all.
        BLOCKS: a power of two, at least `blocks`; 0 = x is not scaled. Not with TILED or several splits.
    """
    if ALIGNED:
        columns = columns // 16 * 16  # which tells Triton that rows are as aligned as the first one
    part = tl.cdiv(columns, SPLITS * PARTS * BLOCK_K) * PARTS * BLOCK_K
    block, split = tl.program_id(0), tl.program_id(1)
    row_of_result = split * tokens
    if TILED:  # programs that read the same rows of the weight run side by side
        tiles = tl.cdiv(tokens, TOKENS)
        first_token = block % tiles * TOKENS
        block //= tiles
        x += first_token * tl.cast(columns, tl.int64)
        row_of_result += first_token
        tokens = tl.minimum(tokens - first_token, TOKENS)
    row, bias, out, rows, start = _block(
        block, w0, w1, w2, b0, b1, b2, out0, out1, out2, rows0, rows1, rows2, columns, BLOCK_N, GATED
    )
    out += row_of_result * tl.cast(rows, tl.int64)
    first = split * part
    begin(row, first, columns, early if TOKENS == 1 else 0, AHEAD, DEPENDENT)
    if TOKENS == 1:
        tile = tile_of(row, first + tl.arange(0, BLOCK_K), columns, EVEN)
        wait(DEPENDENT)
        if BLOCKS > 0:  # they come while the weight does; of more rows they are too many
            parts = _squares_of(squares, blocks, tokens, TOKENS, BLOCKS)
        total = of_one_row(x, row, tile, first, part, columns, BLOCK_N, BLOCK_K, EVEN)
    else:
        total = of_few_rows(x, row, first, part, tokens, columns, BLOCK_N, BLOCK_K, PARTS, TOKENS, EVEN)
        if BLOCKS > 0:
            parts = _squares_of(squares, blocks, tokens, TOKENS, BLOCKS)
    if BLOCKS > 0:
        total *= tl.rsqrt(tl.sum(parts, 0) / columns + epsilon)[None, :]
    _store(total, bias, out, rows, start, tokens, split, BLOCK_N, TOKENS, HAS_BIAS, GATED)


@triton.jit(do_not_specialize=["count"])
def silu_times(gate, up, out, count, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """`out[i] = silu(gate[i]) * up[i]` for `count` elements, in float32."""
    start_dependent(DEPENDENT)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    if first + BLOCK <= count:  # without a mask 16 bytes are read and written at a time
        tl.store(out + at, _gated(tl.load(gate + at), tl.load(up + at)))
    else:
        inside = at < count
        tl.store(out + at, _gated(tl.load(gate + at, inside), tl.load(up + at, inside)), inside)


@triton.jit
def _gated(gate, up):
    wide = gate.to(tl.float32)
    return (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(gate.dtype)
