"""The Triton kernel of paged attention: decode, verify, draft-extend and prefill, one launch each.

See split_kernels.py for how the work is divided.

Note [New tokens]
The batch's own tokens are read from `k` and `v`, never from the cache, which holds the tokens before them. So
the launch that reads the cache may also write it. Of the programs that serve the same rows and KV head, the
one with the last split writes. A request's new tokens may not be another's old ones in the same batch.

Note [Metadata first]
The batch's metadata alone says what a program computes and where its first tokens lie. In a graph that does
not write it (Note [Early reads] in early_reads.py) a program reads it while the kernels before still run. All
else (q, k, v, the cache, a tree) is read after the wait, and nothing is stored before.
"""

import triton
import triton.language as tl

from piecewise_graph.kernels.dependent import let_dependents_start, wait

from .split_kernels import combine, schedule, tokens_of

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _zero_tail(
    out, qo_indptr, requests, num_tokens, out_row, out_head, head, item,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, GROUP_POW2: tl.constexpr,
):  # fmt: skip
    """Rows that belong to no request become zeros, spread over the programs."""
    d = tl.arange(0, DIM)
    g = tl.arange(0, GROUP_POW2)
    for row in range(tl.load(qo_indptr + requests) + item, num_tokens, tl.num_programs(1)):
        start = out + (tl.full([], 0, tl.int64) + row) * out_row
        at = start + (head * GROUP + g)[:, None] * out_head + d[None, :]
        zeros = tl.zeros([GROUP_POW2, DIM], out.dtype.element_ty)
        tl.store(at, zeros, mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _pages(table, start, last_old, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the tokens of a tile, where the cache has them: before `last_old`."""
    token = start + tl.arange(0, BLOCK_N)
    return tl.load(table + token // PAGE, mask=token < last_old, other=0)


@triton.jit
def _slots(slot_mapping, rows, writes, PAGE: tl.constexpr, PITCH: tl.constexpr, SLOT: tl.constexpr):
    """Where in the cache the new tokens of rows go, in elements, and which of the rows write."""
    slot = tl.load(slot_mapping + rows, mask=writes, other=0)
    if slot_mapping.dtype.element_ty == tl.int64:  # see AttentionBatch
        writes &= slot >= 0
    slot = slot.to(tl.int64)
    if PITCH != PAGE:
        slot += slot // PAGE * (PITCH - PAGE)
    return slot * SLOT, writes


@triton.jit
def _attend_tiles(
    acc, best, total, q, lo, hi, next_page,
    k_head, v_head, k_new, v_new, k_row, v_row, table, old,
    position, row_there, column_zero, mask_rows, mask_column, mask_width, scale, softcap, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PITCH: tl.constexpr, SLOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, TREE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Tokens [lo, hi) in tiles, as the online softmax has it; `lo` is the first token of a tile.

    `next_page` holds the pages of the first tile. Without MASKED every row sees all tokens and hi - lo is a
    multiple of BLOCK_N.
    """
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, DIM)
    last_old = tl.minimum(old, hi)
    for start in tl.range(lo, hi, BLOCK_N, num_stages=STAGES):
        token = start + n
        is_new = token >= old
        page = next_page
        # A tile ahead, so that loads of K and V do not wait for it.
        next_page = _pages(table, start + BLOCK_N, last_old, PAGE, BLOCK_N)
        slot = page.to(tl.int64) * PITCH + token % PAGE
        fresh = (token - old).to(tl.int64)
        k_at = tl.where(is_new, k_new + fresh * k_row, k_head + slot * SLOT)
        v_at = tl.where(is_new, v_new + fresh * v_row, v_head + slot * SLOT)
        if MASKED:
            here = (token < hi)[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_at[:, None] + d[None, :], mask=here, other=0.0)
            v = tl.load(v_at[:, None] + d[None, :], mask=here, other=0.0)
        elif HEAD_DIM != DIM:
            here = (n >= 0)[:, None] & (d < HEAD_DIM)[None, :]
            k = tl.load(k_at[:, None] + d[None, :], mask=here, other=0.0)
            v = tl.load(v_at[:, None] + d[None, :], mask=here, other=0.0)
        else:
            k = tl.load(k_at[:, None] + d[None, :])
            v = tl.load(v_at[:, None] + d[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1); the division by softcap is in `scale`.
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
        if MASKED:
            if TREE:
                column = token - column_zero
                inside = (column >= 0) & (column < mask_width)
                drawn = tl.load(
                    mask_rows[:, None] + column[None, :] * mask_column,
                    mask=row_there[:, None] & inside[None, :],
                    other=0,
                )
                seen = (drawn != 0) | (column < 0)[None, :]
                if WINDOW:
                    seen &= (token[None, :] > position[:, None] - window) | (column >= 0)[None, :]
            else:
                seen = token[None, :] <= position[:, None]
                if WINDOW:
                    seen &= token[None, :] > position[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        best_now = tl.maximum(best, tl.max(scores, 1))
        reference = tl.where(best_now == float("-inf"), 0.0, best_now)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(best - reference)
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        best = best_now
    return acc, best, total


# What may lie anywhere, so that a variant serves every batch: no alignment is assumed of it.
_LOOSE = ["block_table", "seq_lens", "qo_indptr", "slot_mapping", "tree_mask"]
_INTEGERS = [
    "early", "requests", "num_tokens", "table_stride", "mask_request", "mask_row", "mask_column",
    "mask_width", "target", "min_tiles",
    "q_row", "q_head", "k_row", "k_step", "v_row", "v_step", "out_row", "out_head", "window",
]  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS, do_not_specialize_on_alignment=_LOOSE)
def attend_kernel(
    early, block_table, seq_lens, qo_indptr, slot_mapping, tree_mask, partials, counters,
    requests, num_tokens, table_stride, mask_request, mask_row, mask_column, mask_width, target, min_tiles,
    k_cache, v_cache,
    q, k, v, out, q_row, q_head, k_row, k_step, v_row, v_step, out_row, out_head, scale, softcap, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr, PAGE: tl.constexpr, PITCH: tl.constexpr, REQUESTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SPLIT: tl.constexpr, UNMASKED: tl.constexpr, TAIL: tl.constexpr, TREE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    UNIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of a batch, and K and V of its tokens into the cache; see AttentionBatch and AttentionCall.

    Args:
        early: the metadata may be read before the wait (Note [Metadata first]).
        partials: float32, `[items, KV_HEADS, BLOCK_M, DIM]` of partial results, then their
            `[items, KV_HEADS, BLOCK_M, 2]` maxima and sums. counters: int32 `[items, KV_HEADS]`, zeros.
        target: work items aimed at. min_tiles: fewest tiles of BLOCK_N tokens in a split.
        q_row, q_head (k_step and v_step of k and v): strides in units of UNIT elements; unlike other integers
            they tell how far a pointer stays aligned.
        scale: of the scores; times log2(e), or divided by softcap.
        softcap: times log2(e).
        PITCH: slots from one page to the next.
        UNMASKED: tiles that all rows see have a loop of their own.
        DEPENDENT: launched as a dependent of the kernel before (Note [Dependent launches] in dependent.py).
    Grid: (KV_HEADS, work items).
    """
    let_dependents_start(DEPENDENT)
    if early == 0:
        wait(DEPENDENT)
    head = tl.program_id(0)
    item = tl.program_id(1)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    q_row, q_head, out_row, out_head = q_row * UNIT, q_head * UNIT, out_row * UNIT, out_head * UNIT
    k_row, k_step, v_row, v_step = k_row * UNIT, k_step * UNIT, v_row * UNIT, v_step * UNIT
    request, local, per_split, splits = schedule(
        seq_lens, qo_indptr, requests, target, min_tiles, window, mask_width, item,
        REQUESTS, BLOCK_Q, BLOCK_N, PARTS, SPLIT, TREE, WINDOW,
    )  # fmt: skip
    has_item = request < requests  # a program without one has no rows and no tokens: it loads nothing below
    row_zero = tl.load(qo_indptr + request, mask=has_item, other=0)
    rows = tl.load(qo_indptr + request + 1, mask=has_item, other=0) - row_zero
    length = tl.load(seq_lens + request, mask=has_item, other=0)
    old = tl.maximum(length - rows, 0)
    splits = tl.maximum(splits, 1)
    block = local // splits
    split = local % splits
    if not SPLIT:
        block = tl.cdiv(rows, BLOCK_Q) - 1 - block  # the last rows see most: they start first
    first_row = block * BLOCK_Q
    live_rows = tl.minimum(rows - first_row, BLOCK_Q)

    lo, hi = tokens_of(
        length, rows, first_row, live_rows, split, per_split, window, mask_width,
        BLOCK_N, SPLIT, TREE, WINDOW,
    )  # fmt: skip
    table = block_table + request.to(tl.int64) * table_stride
    last_old = tl.minimum(old, hi)
    pages = _pages(table, lo, last_old, PAGE, BLOCK_N)
    i = tl.arange(0, triton.next_power_of_2(BLOCK_Q))
    SLOT: tl.constexpr = KV_HEADS * HEAD_DIM
    writes = (i < live_rows) & (split == splits - 1) & has_item
    new_row = (row_zero + first_row + i).to(tl.int64)
    if BLOCK_M <= 32:
        slot, writes = _slots(slot_mapping, new_row, writes, PAGE, PITCH, SLOT)

    wait(DEPENDENT)
    if TAIL:
        _zero_tail(
            out, qo_indptr, requests, num_tokens, out_row, out_head, head, item,
            HEAD_DIM, DIM, GROUP, GROUP_POW2,
        )  # fmt: skip
    if request >= requests:
        return
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, DIM)
    row = first_row + m // GROUP
    row_there = m < live_rows * GROUP
    here = row_there[:, None] & (d < HEAD_DIM)[None, :]
    q_at = q + (row_zero + row).to(tl.int64) * q_row + (head * GROUP + m % GROUP) * q_head
    q_tile = tl.load(q_at[:, None] + d[None, :], mask=here, other=0.0)

    # Note [New tokens]: loaded here and stored at the end, to hide the latency.
    write = writes[:, None] & (d < HEAD_DIM)[None, :]
    k_from = k + head * k_step
    v_from = v + head * v_step
    k_head = k_cache + head * HEAD_DIM
    v_head = v_cache + head * HEAD_DIM
    if BLOCK_M <= 32:
        k_write = tl.load(k_from + (new_row * k_row)[:, None] + d[None, :], mask=write)
        v_write = tl.load(v_from + (new_row * v_row)[:, None] + d[None, :], mask=write)

    position = old + row
    seen_by_all = old + first_row + 1
    column_zero = length - mask_width
    mask_rows = tree_mask
    if TREE:
        seen_by_all = column_zero
        mask_rows = tree_mask + request.to(tl.int64) * mask_request + row * mask_row
        if WINDOW:
            position = column_zero - 1 + m * 0
            n = tl.arange(0, BLOCK_N)
            for low in range(0, mask_width, BLOCK_N):
                there = row_there[:, None] & (low + n < mask_width)[None, :]
                drawn = mask_rows[:, None] + (low + n)[None, :] * mask_column
                position += tl.sum(tl.load(drawn, mask=there, other=0).to(tl.int32), 1)

    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_new = k_from + row_zero.to(tl.int64) * k_row
    v_new = v_from + row_zero.to(tl.int64) * v_row
    if UNMASKED:
        bound = lo + tl.maximum(tl.minimum(seen_by_all, hi) - lo, 0) // BLOCK_N * BLOCK_N
        acc, best, total = _attend_tiles(
            acc, best, total, q_tile, lo, bound, pages,
            k_head, v_head, k_new, v_new, k_row, v_row, table, old,
            position, row_there, column_zero, mask_rows, mask_column, mask_width, scale, softcap, window,
            HEAD_DIM, DIM, PAGE, PITCH, SLOT, BLOCK_M, BLOCK_N, PRECISION, STAGES, False,
            TREE, WINDOW, SOFTCAP,
        )  # fmt: skip
        lo = bound
        pages = _pages(table, lo, last_old, PAGE, BLOCK_N)
    acc, best, total = _attend_tiles(
        acc, best, total, q_tile, lo, hi, pages,
        k_head, v_head, k_new, v_new, k_row, v_row, table, old,
        position, row_there, column_zero, mask_rows, mask_column, mask_width, scale, softcap, window,
        HEAD_DIM, DIM, PAGE, PITCH, SLOT, BLOCK_M, BLOCK_N, PRECISION, STAGES, True, TREE, WINDOW, SOFTCAP,
    )  # fmt: skip

    if BLOCK_M > 32:
        slot, writes = _slots(slot_mapping, new_row, writes, PAGE, PITCH, SLOT)
        write = writes[:, None] & (d < HEAD_DIM)[None, :]
        k_write = tl.load(k_from + (new_row * k_row)[:, None] + d[None, :], mask=write)
        v_write = tl.load(v_from + (new_row * v_row)[:, None] + d[None, :], mask=write)
    tl.store((k_head + slot)[:, None] + d[None, :], k_write, mask=write)
    tl.store((v_head + slot)[:, None] + d[None, :], v_write, mask=write)

    out_base = out + (row_zero + first_row).to(tl.int64) * out_row + head * GROUP * out_head
    if SPLIT:  # noqa: SIM102 - a constant, unlike the next: what is inside is not compiled without it
        if splits > 1:
            mine = item * KV_HEADS + head
            statistics = partials + tl.num_programs(1).to(tl.int64) * (KV_HEADS * BLOCK_M * DIM)
            tl.store(partials + (mine * BLOCK_M + m)[:, None] * DIM + d[None, :], acc, mask=here)
            tl.store(statistics + (mine * BLOCK_M + m) * 2, best, mask=row_there)
            tl.store(statistics + (mine * BLOCK_M + m) * 2 + 1, total, mask=row_there)
            first = mine - split * KV_HEADS
            tl.debug_barrier()
            arrived = tl.atomic_add(counters + first, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                tl.debug_barrier()
                combine(
                    out_base, out_row, out_head, partials, statistics, first, live_rows * GROUP, splits,
                    KV_HEADS, HEAD_DIM, DIM, GROUP, BLOCK_M, ROWS, PARTS,
                )  # fmt: skip
                tl.store(counters + first, 0)
            return
    to = out_base + (m // GROUP).to(tl.int64) * out_row + (m % GROUP) * out_head
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(to[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=here)
