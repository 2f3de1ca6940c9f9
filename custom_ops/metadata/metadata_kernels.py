# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of batches and drafts. Grids and constants are in `metadata_launches.py`.

One program serves one request (and one chunk of its tokens or pages). So the accesses to a request's data are
ordered within one program, by barriers at most. Loops have constant bounds or are `while`: with numpy 2.4,
Triton's interpreter cannot count to a tensor.
"""

import triton
import triton.language as tl


@triton.jit
def slot_of(table, request, token, wanted, row_pages, PAGE: tl.constexpr):
    """Slots of tokens of one request; 0, in the null page, where not wanted or past the row."""
    page = token // PAGE
    inside = wanted & (page >= 0) & (page < row_pages)
    entry = tl.load(table + request.to(tl.int64) * row_pages + page, mask=inside, other=0)
    return tl.where(inside, entry * PAGE + token % PAGE, 0)


@triton.jit(do_not_specialize=["row_pages", "lens_stride", "root_stride"])
def gather_requests_kernel(
    requests,
    table,
    state_lens,
    state_roots,
    seq_lens,
    root_tokens,
    block_table,
    row_pages,
    lens_stride,
    root_stride,
    BLOCK: tl.constexpr,
):
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = tl.load(requests + b).to(tl.int64)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    page = tl.load(table + request * row_pages + at, mask=at < row_pages)
    tl.store(block_table + b * row_pages + at, page, mask=at < row_pages)
    if chunk == 0:
        tl.store(seq_lens + b, tl.load(state_lens + request * lens_stride))
        tl.store(root_tokens + b, tl.load(state_roots + request * root_stride))


@triton.jit(do_not_specialize=["longest", "lens_stride", "root_stride"])
def scatter_accepted_kernel(
    requests,
    accept_length,
    out_tokens,
    bonus,
    new_seq_lens,
    result,
    state_lens,
    state_roots,
    longest,
    lens_stride,
    root_stride,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b).to(tl.int64)
    tl.store(state_lens + request * lens_stride, tl.load(new_seq_lens + b))
    tl.store(state_roots + request * root_stride, tl.load(bonus + b))
    c = tl.arange(0, BLOCK_S)
    token = tl.load(out_tokens + b * longest + c, mask=c < longest)
    value = tl.where(c < longest, token, tl.load(accept_length + b))
    tl.store(result + b * (longest + 1) + c, value, mask=c <= longest)


@triton.jit(do_not_specialize=["num_requests", "num_rows", "row_pages", "out_pages"])
def extend_batch_kernel(
    requests,
    seq_lens,
    table,
    query_lens,
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
    every = tl.arange(0, BLOCK_B)
    live = tl.load(requests + every, mask=every < num_requests, other=0) != 0
    queries = tl.load(query_lens + every, mask=live, other=0)
    start = tl.sum(tl.where(every < b, queries, 0), 0)
    row = start + at
    if chunk == 0:
        tl.store(qo_indptr + b, start)
    if b == num_requests:  # the extra program: rows of no request
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


@triton.jit(do_not_specialize=["num_requests", "row_pages"])
def draft_steps_kernel(
    requests,
    seq_lens,
    table,
    positions,
    slot_mapping,
    lengths,
    num_requests,
    row_pages,
    PAGE: tl.constexpr,
    LEVELS: tl.constexpr,
    TOPK: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b)
    live = request != 0
    length = tl.where(live, tl.load(seq_lens + b), 0)
    i = tl.arange(0, BLOCK_L)  # branch j of level s is i = s*k + j, and so is its token, after the prefix
    level, branch, wanted = i // TOPK, i % TOPK, i < LEVELS * TOPK
    row = (level * num_requests + b) * TOPK + branch
    tl.store(positions + row, tl.where(live, length + level, 0), mask=wanted)
    slots = slot_of(table, request, length + i, wanted & live, row_pages, PAGE)
    tl.store(slot_mapping + row, slots, mask=wanted)
    total = tl.where(live, length + (level + 1) * TOPK, 0)
    tl.store(lengths + level * num_requests + b, total, mask=wanted & (branch == 0))


@triton.jit(do_not_specialize=["level", "steps"])
def select_branches_kernel(
    requests,
    probs,
    child_tokens,
    scores,
    tokens,
    hidden_index,
    candidates,
    all_scores,
    all_tokens,
    all_parents,
    mask,
    level,
    steps,
    TOPK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr,
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

        # A branch sees what its parent sees, and itself.
        old = (branches + parent)[:, None]
        m = tl.arange(0, BLOCK_M)[None, :]
        width = (steps - 1) * TOPK
        seen = tl.load(mask + old.to(tl.int64) * width + m, mask=kept[:, None] & (m < level * TOPK), other=0)
        seen = (seen != 0) | (m == level * TOPK + j[:, None])

        tl.debug_barrier()  # branches are rewritten in place: all of the old ones are read by now
        at = branches + j
        tl.store(scores + at, new_score, mask=kept)
        tl.store(tokens + at, new_token, mask=kept)
        if FIRST:
            tl.store(hidden_index + at, parent + b, mask=kept)
        else:
            tl.store(hidden_index + at, branches + parent, mask=kept)
        tl.store(candidates + at, offset + best, mask=kept)
        row = at[:, None]
        tl.store(mask + row.to(tl.int64) * width + m, seen, mask=kept[:, None] & (m < width))
