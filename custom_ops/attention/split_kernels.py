"""The parts of the attention kernel that split work over programs and bring the results together.

Note [Work items]
A program serves one work item and one KV head. A request's rows are packed with its group of query heads, so
that a tile of BLOCK_M packed rows shares every K and V that it loads. A work item is one such tile and one
split of the request's tokens.
The number of items follows from the lengths, which only the device knows. Every program reads all lengths, as
one vector, and finds its item by a prefix sum. The host launches as many programs as any lengths within the
batch's bounds could need; a program without an item does nothing. So a graph captured for long contexts stays
fast on short ones, and a long request beside short ones gets its share of the programs.

Note [Last arriver]
The splits of a tile leave partial results (sum, maximum, weighted V) in the workspace. Each then increments a
counter. The last one combines all results and sets the counter back to 0 for the next launch. The barrier
orders the stores of all threads before the atomic increment. The increment releases them and, in the last
program, acquires those of all others. Partial results are read past the first-level cache.
"""

import triton
import triton.language as tl


@triton.jit
def schedule(
    seq_lens, qo_indptr, requests, target, min_tiles, window, mask_width, item,
    REQUESTS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Which request, which of its items, and into how many tiles per split its tokens are cut.

    Returns:
        request (`requests` = no item), item of the request, tiles per split, splits.
    """
    each = tl.arange(0, REQUESTS)
    there = each < requests
    start = tl.load(qo_indptr + each, mask=there, other=0)
    rows = tl.load(qo_indptr + each + 1, mask=there, other=0) - start
    items = tl.cdiv(rows, BLOCK_Q)
    per_split = tl.full([REQUESTS], 1 << 30, tl.int32)
    splits = tl.full([REQUESTS], 1, tl.int32)
    if SPLIT:
        length = tl.load(seq_lens + each, mask=there, other=0)
        begin = first_token(length, rows, window, mask_width, BLOCK_N, TREE, WINDOW)
        tiles = tl.cdiv(length - begin, BLOCK_N)
        share = tl.maximum(tl.cdiv(tl.sum(items * tiles), target), min_tiles)
        # More parts than are combined in one step have to be worth it.
        splits = tl.maximum(tl.minimum(tl.cdiv(tiles, share), PARTS + tiles // 16), 1)
        per_split = tl.maximum(tl.cdiv(tiles, splits), 1)
        splits = tl.maximum(tl.cdiv(tiles, per_split), 1)
        items = items * splits
    ends = tl.cumsum(items, 0)
    before = ends <= item
    request = tl.sum(before.to(tl.int32))
    local = item - tl.max(tl.where(before, ends, 0))
    mine = each == request
    return request, local, tl.sum(tl.where(mine, per_split, 0)), tl.sum(tl.where(mine, splits, 0))


@triton.jit
def first_token(
    length, rows, window, mask_width, BLOCK_N: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr
):
    """The first token that a request's rows may see, rounded down to a tile."""
    if WINDOW:
        position = length - (mask_width if TREE else rows)
        return tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    return length * 0


@triton.jit
def tokens_of(
    length, rows, first_row, live_rows, split, per_split, window, mask_width,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The tokens [lo, hi) of a work item: those of its split that one of its rows may see."""
    begin = first_token(length, rows, window, mask_width, BLOCK_N, TREE, WINDOW)
    position = tl.maximum(length - rows, 0) + first_row
    lo = begin
    hi = length
    if not TREE:
        hi = tl.minimum(position + live_rows, length)
        if WINDOW:
            lo = tl.maximum(begin, tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N)
    if SPLIT:
        part = begin + split * per_split * BLOCK_N
        lo = tl.maximum(part, lo)
        hi = tl.minimum(part + per_split * BLOCK_N, hi)
    return lo, hi


@triton.jit
def combine(
    out_base, out_row, out_head, partials, statistics, first, count, splits, stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add up `splits` partial results of `count` packed rows, ROWS rows and PARTS splits at a time.

    Rows come first in the shapes, which gives each warp rows of its own and each thread all parts of what it
    holds: nothing has to be exchanged between threads.
    """
    d = tl.arange(0, DIM)
    part = tl.arange(0, PARTS)
    for base in range(0, count, ROWS):
        m = base + tl.arange(0, ROWS)
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        for low in range(0, splits, PARTS):
            # Counted in rows of partial results.
            at = ((first + (low + part) * stride) * BLOCK_M)[None, :] + m[:, None]
            there = (low + part < splits)[None, :] & (m < count)[:, None]
            top = tl.load(statistics + at * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(statistics + at * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
            values = tl.load(
                partials + at[:, :, None] * DIM + d[None, None, :],
                mask=there[:, :, None] & (d < HEAD_DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            best_now = tl.maximum(best, tl.max(top, 1))
            reference = tl.where(best_now == float("-inf"), 0.0, best_now)
            share = tl.exp2(top - reference[:, None])
            shrink = tl.exp2(best - reference)
            total = total * shrink + tl.sum(share * sums, 1)
            acc = acc * shrink[:, None] + tl.sum(values * share[:, :, None], 1)
            best = best_now
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        to = out_base + (m // GROUP).to(tl.int64) * out_row + (m % GROUP) * out_head
        here = (m < count)[:, None] & (d < HEAD_DIM)[None, :]
        tl.store(to[:, None] + d[None, :], result.to(out_base.dtype.element_ty), mask=here)
