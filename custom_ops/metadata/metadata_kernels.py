# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of batches and drafts.

Arguments are as in the reference; grids and constants stand in `metadata_launches.py`.

One program serves one request (and one chunk of its tokens or pages), so that what belongs to a request is
ordered by one program and needs barriers at most. Loops have constant bounds or are `while`: with
numpy 2.4, Triton's interpreter cannot count to a tensor.
"""

import triton
import triton.language as tl


@triton.jit
def slot_of(table, request, token, wanted, row_pages, PAGE: tl.constexpr):
    """Slots of tokens of one request; 0, the sink, where not wanted or past the row."""
    page = token // PAGE
    inside = wanted & (page >= 0) & (page < row_pages)
    entry = tl.load(table + request.to(tl.int64) * row_pages + page, mask=inside, other=0)
    return tl.where(inside, entry * PAGE + token % PAGE, 0)


@triton.jit
def live_lens_of_all(requests, lens, num_requests, BLOCK_B: tl.constexpr):
    """Every request's number, whether it is live, and its length, 0 if it is padded."""
    every = tl.arange(0, BLOCK_B)
    inside = every < num_requests
    live = tl.load(requests + every, mask=inside, other=0) != 0
    return every, live, tl.load(lens + every, mask=live, other=0)


@triton.jit(do_not_specialize=["num_requests", "num_rows", "row_pages", "out_pages"])
def extend_batch_kernel(
    requests,
    seq_lens,
    query_lens,
    table,
    qo_indptr,
    slot_mapping,
    positions,
    block_table,
    num_requests,
    num_rows,
    row_pages,
    out_pages,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    every, _, queries = live_lens_of_all(requests, query_lens, num_requests, BLOCK_B)
    start = tl.sum(tl.where(every < b, queries, 0), 0)
    row = start + at
    if chunk == 0:
        tl.store(qo_indptr + b, start)
    if b == num_requests:  # the extra program: rows of nobody
        tl.store(slot_mapping + row, tl.zeros([BLOCK], tl.int32), mask=row < num_rows)
        tl.store(positions + row, tl.zeros([BLOCK], tl.int32), mask=row < num_rows)
    else:
        request = tl.load(requests + b)
        length = tl.where(request != 0, tl.load(seq_lens + b), 0)
        query = tl.sum(tl.where(every == b, queries, 0), 0)
        token = length - query + at
        mine = (at < query) & (row < num_rows)
        tl.store(positions + row, token, mask=mine)
        tl.store(slot_mapping + row, slot_of(table, request, token, mine, row_pages, PAGE), mask=mine)
        used = (at < (length + PAGE - 1) // PAGE) & (at < out_pages)
        page = tl.load(table + request.to(tl.int64) * row_pages + at, mask=used, other=0)
        tl.store(block_table + b.to(tl.int64) * out_pages + at, page, mask=used)


@triton.jit(do_not_specialize=["num_requests", "row_pages", "capacity"])
def kv_indices_kernel(
    requests,
    seq_lens,
    table,
    kv_indptr,
    kv_indices,
    last_page_len,
    num_requests,
    row_pages,
    capacity,
    PAGE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, chunk = tl.program_id(0), tl.program_id(1)
    every, _, lens = live_lens_of_all(requests, seq_lens, num_requests, BLOCK_B)
    pages = tl.minimum((lens + PAGE - 1) // PAGE, row_pages)
    start = tl.sum(tl.where(every < b, pages, 0), 0)
    count = tl.sum(tl.where(every == b, pages, 0), 0)
    if chunk == 0:
        length = tl.sum(tl.where(every == b, lens, 0), 0)
        tl.store(kv_indptr + b, start)
        tl.store(last_page_len + b, tl.where(length > 0, (length - 1) % PAGE + 1, 0))
        if b == num_requests - 1:
            tl.store(kv_indptr + num_requests, start + count)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    request = tl.load(requests + b).to(tl.int64)
    mine = (at < count) & (start + at < capacity)
    tl.store(
        kv_indices + start + at, tl.load(table + request * row_pages + at, mask=mine, other=0), mask=mine
    )


@triton.jit(do_not_specialize=["num_requests", "row_pages"])
def advance_kernel(
    requests,
    seq_lens,
    table,
    positions,
    slot_mapping,
    num_requests,
    row_pages,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = b < num_requests
    request = tl.load(requests + b, mask=inside, other=0)
    live = request != 0
    length = tl.load(seq_lens + b, mask=live, other=0)
    tl.debug_barrier()  # seq_lens is written in place
    tl.store(positions + b, length, mask=inside)
    tl.store(slot_mapping + b, slot_of(table, request, length, live, row_pages, PAGE), mask=inside)
    tl.store(seq_lens + b, tl.where(live, length + 1, 0), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "row_pages", "capacity"])
def draft_steps_kernel(
    requests,
    seq_lens,
    table,
    positions,
    slot_mapping,
    lengths,
    kv_indptr,
    kv_indices,
    num_requests,
    row_pages,
    capacity,
    PAGE: tl.constexpr,
    LEVELS: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_KV: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b, chunk = tl.program_id(0), tl.program_id(1)
    request = tl.load(requests + b)
    live = request != 0
    length = tl.where(live, tl.load(seq_lens + b), 0)
    i = tl.arange(0, BLOCK_L)  # branch j of level s is i = s*k + j, and so is its token, after the prefix
    level, branch, wanted = i // TOPK, i % TOPK, i < LEVELS * TOPK
    if chunk == 0:
        row = (level * num_requests + b) * TOPK + branch
        tl.store(positions + row, tl.where(live, length + level, 0), mask=wanted)
        slots = slot_of(table, request, length + i, wanted & live, row_pages, PAGE)
        tl.store(slot_mapping + row, slots, mask=wanted)
        total = tl.where(live, length + (level + 1) * TOPK, 0)
        tl.store(lengths + level * num_requests + b, total, mask=wanted & (branch == 0))
    if HAS_KV:
        every, live_all, lens = live_lens_of_all(requests, seq_lens, num_requests, BLOCK_B)
        earlier = every < b
        tokens_before = tl.sum(tl.where(earlier, lens, 0), 0)
        live_before = tl.sum((earlier & live_all).to(tl.int32), 0)
        if chunk == 0:
            attended = tl.where(live, length + level + 1, 0)
            base = TOPK * (tokens_before + (level + 1) * live_before)
            place = kv_indptr + level * (num_requests * TOPK + 1) + b * TOPK + branch
            tl.store(place, base + branch * attended, mask=wanted)
            last = wanted & (branch == TOPK - 1) & (b == num_requests - 1)
            tl.store(place + 1, base + TOPK * attended, mask=last)
            if TOPK == 1:  # a chain's extension; select_branches writes a tree's
                d = tl.arange(0, BLOCK_L)[None, :]
                at = base[:, None] + length + d
                mine = wanted[:, None] & (d <= level[:, None]) & live & (at < capacity)
                own = slot_of(table, request, length + d, (d < LEVELS) & live, row_pages, PAGE)
                own = tl.broadcast_to(own, [BLOCK_L, BLOCK_L])
                tl.store(kv_indices + level[:, None].to(tl.int64) * capacity + at, own, mask=mine)
        if chunk * BLOCK < length:
            token = chunk * BLOCK + tl.arange(0, BLOCK)
            mine = (token < length) & (token < row_pages * PAGE)
            prefix = slot_of(table, request, token, mine, row_pages, PAGE)
            for s in range(LEVELS):
                start = TOPK * (tokens_before + (s + 1) * live_before)
                row_of_level = kv_indices + tl.cast(s, tl.int64) * capacity
                for j in range(TOPK):
                    at = start + j * (length + s + 1) + token
                    tl.store(row_of_level + at, prefix, mask=mine & (at < capacity))


@triton.jit(do_not_specialize=["level", "steps", "num_requests", "row_pages", "capacity"])
def select_branches_kernel(
    requests,
    seq_lens,
    table,
    probs,
    child_tokens,
    scores,
    tokens,
    parents,
    hidden_index,
    candidates,
    all_scores,
    all_tokens,
    all_parents,
    ancestors,
    mask,
    kv_indptr,
    kv_indices,
    level,
    steps,
    num_requests,
    row_pages,
    capacity,
    PAGE: tl.constexpr,
    TOPK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    HAS_KV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b)
    live = request != 0
    WIDTH: tl.constexpr = TOPK if FIRST else TOPK * TOPK
    offset = 0 if FIRST else TOPK + (level - 1) * TOPK * TOPK
    children, branches = b * WIDTH, b * TOPK

    # Append the children to the candidates.
    i = tl.arange(0, BLOCK_C)
    known = i < WIDTH
    score = tl.load(probs + children + i, mask=known & live, other=0.0)
    if FIRST:
        above = tl.full([BLOCK_C], -1, tl.int32)
    else:
        score = tl.load(scores + branches + i // TOPK, mask=known & live, other=0.0) * score
        above = tl.load(candidates + branches + i // TOPK, mask=known, other=0)
    place = b * (TOPK + (steps - 1) * TOPK * TOPK) + offset + i
    tl.store(all_scores + place, score, mask=known)
    token = tl.load(child_tokens + children + i, mask=known & live, other=0).to(tl.int32)
    tl.store(all_tokens + place, token, mask=known)
    tl.store(all_parents + place, above, mask=known)

    if not LAST:
        j = tl.arange(0, BLOCK_K)
        kept = j < TOPK
        if FIRST:
            best = tl.where(kept, j, 0)
            parent = best * 0
        else:
            # Rank: how many children are better, or as good and earlier.
            rank = tl.zeros([BLOCK_C], tl.int32)
            for start in range(0, WIDTH, CHUNK):
                o = start + tl.arange(0, CHUNK)
                real = (o < WIDTH) & live
                other = tl.load(scores + branches + o // TOPK, mask=real, other=0.0)
                other = other * tl.load(probs + children + o, mask=real, other=0.0)
                better = (other[None, :] > score[:, None]) | (
                    (other[None, :] == score[:, None]) & (o[None, :] < i[:, None])
                )
                rank += tl.sum((better & (o < WIDTH)[None, :]).to(tl.int32), 1)
            chosen = known[None, :] & (rank[None, :] == j[:, None])
            best = tl.sum(tl.where(chosen, i[None, :], 0), 1)
            parent = best // TOPK
        new_score = tl.load(probs + children + best, mask=kept & live, other=0.0)
        if not FIRST:
            new_score = tl.load(scores + branches + parent, mask=kept & live, other=0.0) * new_score
        new_token = tl.load(child_tokens + children + best, mask=kept & live, other=0).to(tl.int32)

        # The path of a branch is its parent's and itself.
        length = tl.where(live, tl.load(seq_lens + b), 0)
        own = slot_of(table, request, length + level * TOPK + j, kept & live, row_pages, PAGE)
        d = tl.arange(0, BLOCK_S)[None, :]
        old = (branches + parent)[:, None]
        path = tl.load(ancestors + old * steps + d, mask=kept[:, None] & (d < level), other=0)
        path = tl.where(d == level, own[:, None], path)
        m = tl.arange(0, BLOCK_M)[None, :]
        width = (steps - 1) * TOPK
        seen = tl.load(mask + old.to(tl.int64) * width + m, mask=kept[:, None] & (m < level * TOPK), other=0)
        seen = (seen != 0) | (m == level * TOPK + j[:, None])

        tl.debug_barrier()  # branches are rewritten in place: all of the old ones are read by now
        at = branches + j
        tl.store(scores + at, new_score, mask=kept)
        tl.store(tokens + at, new_token, mask=kept)
        tl.store(parents + at, parent, mask=kept)
        if FIRST:
            tl.store(hidden_index + at, parent + b, mask=kept)
        else:
            tl.store(hidden_index + at, branches + parent, mask=kept)
        tl.store(candidates + at, offset + best, mask=kept)
        row = at[:, None]
        tl.store(ancestors + row * steps + d, path, mask=kept[:, None] & (d < steps))
        tl.store(mask + row.to(tl.int64) * width + m, seen, mask=kept[:, None] & (m < width))
        if HAS_KV:
            begin = tl.load(kv_indptr + level * (num_requests * TOPK + 1) + at, mask=kept, other=0)
            slot_at = begin[:, None] + length + d
            mine = kept[:, None] & (d <= level) & live & (slot_at < capacity)
            tl.store(kv_indices + level.to(tl.int64) * capacity + slot_at, path, mask=mine)
