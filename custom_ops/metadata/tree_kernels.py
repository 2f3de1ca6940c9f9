# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The Triton kernel that builds the inputs of a verify forward. One program per request."""

import triton
import triton.language as tl

from .metadata_kernels import slot_of


@triton.jit
def _best_candidates(scores, live, nodes, count, BLOCK_C: tl.constexpr):
    """Which candidates are the best `nodes - 1`, ties to the lower index, and the node that each becomes.

    Scores are not negative, so their bits order as they do: the bits of the last score that gets in are found
    one by one, which costs the same however many candidates there are.
    """
    i = tl.arange(0, BLOCK_C)
    known = i < count
    bits = tl.load(scores + i, mask=known & live, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where(known, bits, -1)
    wanted = nodes - 1
    least = tl.program_id(0) * 0
    for shift in range(31):
        trial = least | (1 << (30 - shift))
        least = tl.where(tl.sum((bits >= trial).to(tl.int32), 0) >= wanted, trial, least)
    room = wanted - tl.sum((bits > least).to(tl.int32), 0)
    tied = (bits == least).to(tl.int32)
    chosen = (bits > least) | ((tied != 0) & (tl.cumsum(tied, 0) <= room))
    return chosen, tl.cumsum(chosen.to(tl.int32), 0)


@triton.jit(do_not_specialize=["max_position", "num_requests", "nodes", "count", "row_pages"])
def build_tree_kernel(
    requests,
    seq_lens,
    table,
    root_tokens,
    draft_tokens,
    tokens,
    positions,
    mask,
    slot_mapping,
    lengths,
    qo_indptr,
    scores,
    parents,
    max_position,
    num_requests,
    nodes,
    count,
    row_pages,
    PAGE: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b)
    live = request != 0
    length = tl.where(live, tl.load(seq_lens + b), 0)
    n = tl.arange(0, BLOCK_N)
    m = n[None, :]
    inside = n < nodes
    draft = inside & (n > 0)
    row = b * nodes + n
    if CHAIN:
        candidate = n - 1
        depth = n
        related = m <= n[:, None]
    else:
        chosen, node = _best_candidates(scores + b * count, live, nodes, count, BLOCK_C)
        # `tokens` holds the candidates of the nodes until it gets its own values.
        tl.store(tokens + b * nodes + node, tl.arange(0, BLOCK_C), mask=chosen)
        tl.debug_barrier()
        candidate = tl.load(tokens + row, mask=draft, other=0)
        tl.debug_barrier()
        wanted = tl.load(parents + b * count + candidate, mask=draft & live, other=-1)
        same = (candidate[None, :] == wanted[:, None]) & (m > 0) & (m < n[:, None])
        parent = tl.sum(tl.where(same, m, 0), 1)  # the root, if none

        related = (m == n[:, None]) | (m == 0)
        above = parent
        while tl.max(above, 0) > 0:  # a parent's number is lower: this ends
            related = related | (m == above[:, None])
            above = tl.sum(tl.where(m == above[:, None], parent[None, :], 0), 1)
        depth = tl.sum((related & inside[:, None]).to(tl.int32), 1) - 1

    token = tl.load(draft_tokens + b * count + candidate, mask=draft & live, other=0).to(tl.int32)
    root = tl.load(root_tokens + b).to(tl.int32)
    tl.store(tokens + row, tl.where((n == 0) & live, root, token), mask=inside)
    tl.store(positions + row, tl.where(live, tl.minimum(length + depth, max_position), 0), mask=inside)
    slots = slot_of(table, request, length + n, inside & live, row_pages, PAGE)
    tl.store(slot_mapping + row, slots, mask=inside)
    tl.store(mask + row[:, None] * nodes + m, related, mask=inside[:, None] & (m < nodes))
    tl.store(lengths + b, tl.where(live, length + nodes, 0))
    tl.store(qo_indptr + b, b * nodes)
    if b == num_requests - 1:
        tl.store(qo_indptr + num_requests, num_requests * nodes)
