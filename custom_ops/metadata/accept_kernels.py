# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Triton kernels of acceptance: walk the tree, draw the bonus, commit. One program per request.

Following links from node to node through memory would be a chain of dependent loads, hundreds of cycles each.
A program holds the whole tree instead: every node takes its test at once. A node is accepted when it passed,
all of its ancestors (its row of the mask) passed, and no elder sibling of any of them did.
"""

import triton
import triton.language as tl

from .metadata_kernels import slot_of

_NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _load_tree(mask, b, n, nodes):
    """int32 [n, m] ancestors and itself, [n, m] elder siblings, parent of each node (-1: none)."""
    m = n[None, :]
    inside = (n[:, None] < nodes) & (m < nodes)
    tree = tl.load(mask + (b * nodes + n[:, None]) * nodes + m, mask=inside, other=0).to(tl.int32)
    parent = tl.max(tl.where((tree != 0) & (m < n[:, None]), m, -1), 1)
    elder = (parent[None, :] == parent[:, None]) & (m > 0) & (m < n[:, None])
    return tree, elder, parent


@triton.jit
def _chain_path(passed, n, nodes):
    """int32: nodes before the first that failed. `passed` int32 is ignored for the root."""
    failed = (passed == 0) & (n > 0)
    return ((tl.cumsum(failed.to(tl.int32), 0) == 0) & (n < nodes)).to(tl.int32)


@triton.jit
def _tree_path(passed, tree, elder, n, nodes, longest):
    """int32: the accepted path; and the depth of every node."""
    beaten = tl.max(tl.where(elder, passed[None, :], 0), 1)
    good = ((passed != 0) & (beaten == 0)) | (n == 0)
    bad = tl.sum(tree * (good == 0).to(tl.int32)[None, :], 1)
    depth = tl.sum(tree, 1) - 1
    return ((bad == 0) & (n < nodes) & (depth < longest)).to(tl.int32), depth


@triton.jit
def _commit(
    b,
    request,
    length,
    path,
    depth,
    token,
    bonus,
    table,
    accept_length,
    out_tokens,
    last_token,
    new_seq_lens,
    select_index,
    input_ids,
    hidden_index,
    positions,
    slot_mapping,
    nodes,
    longest,
    row_pages,
    PAGE: tl.constexpr,
    PERMUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    live = request != 0
    n = tl.arange(0, BLOCK_N)
    inside = n < nodes
    count = tl.sum(path, 0)
    slots = slot_of(table, request, length + n, inside & live, row_pages, PAGE)
    tl.debug_barrier()  # all is read: the table and seq_lens may change now
    if PERMUTE:
        owned = tl.sum((inside & (slots != 0)).to(tl.int32), 0)
        fits = live & (owned == nodes)  # entries without a page stay behind those that have one
        after = count + n - tl.cumsum(path, 0)  # the rest follows the path, in its order
        to = tl.where(fits, tl.where(path != 0, depth, after), n)
        entry = table + request.to(tl.int64) * row_pages + length + to
        tl.store(entry, slots, mask=inside & fits)  # a page of one token: entries are slots
        tl.store(slot_mapping + b * nodes + to, slots, mask=inside)
    else:
        tl.store(slot_mapping + b * nodes + n, slots, mask=inside)

    c = tl.arange(0, BLOCK_S)
    rest = (c >= count) & (c < longest)
    tl.store(out_tokens + b * longest + c, tl.full([BLOCK_S], -1, tl.int32), mask=rest)
    row = b * nodes + n
    accepted = inside & (path != 0)
    tl.store(hidden_index + b * nodes + depth, row, mask=accepted)
    tl.store(hidden_index + row, row, mask=inside & (n >= count))
    drafted = accepted & (n > 0)
    tl.store(out_tokens + b * longest + depth - 1, token, mask=drafted)
    tl.store(input_ids + b * nodes + depth - 1, token, mask=drafted)
    tl.store(input_ids + row, tl.zeros([BLOCK_N], tl.int32), mask=inside & (n >= count))
    if live:
        tl.store(out_tokens + b * longest + count - 1, bonus)
        tl.store(input_ids + b * nodes + count - 1, bonus)
    tl.store(positions + row, tl.where(live, length + n, 0), mask=inside)
    tl.store(accept_length + b, count)
    tl.store(last_token + b, tl.where(live, bonus, 0))
    tl.store(new_seq_lens + b, tl.where(live, length + count, 0))
    tl.store(select_index + b, b * nodes + tl.maximum(count - 1, 0))


@triton.jit(do_not_specialize=["nodes", "longest", "row_pages"])
def accept_greedy_kernel(
    requests,
    seq_lens,
    table,
    tokens,
    target_ids,
    accept_length,
    out_tokens,
    last_token,
    new_seq_lens,
    select_index,
    input_ids,
    hidden_index,
    positions,
    slot_mapping,
    mask,
    nodes,
    longest,
    row_pages,
    PAGE: tl.constexpr,
    CHAIN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b)
    live = request != 0
    length = tl.where(live, tl.load(seq_lens + b), 0)
    n = tl.arange(0, BLOCK_N)
    draft = (n > 0) & (n < nodes)
    token = tl.load(tokens + b * nodes + n, mask=draft, other=0)
    if CHAIN:
        target = tl.load(target_ids + b * nodes + n - 1, mask=draft, other=0).to(tl.int32)
        depth = n
        path = _chain_path((token == target).to(tl.int32), n, nodes)
    else:
        tree, elder, parent = _load_tree(mask, b, n, nodes)
        target = tl.load(target_ids + b * nodes + parent, mask=draft & (parent >= 0), other=0).to(tl.int32)
        path, depth = _tree_path((token == target).to(tl.int32), tree, elder, n, nodes, longest)
    path = tl.where(live, path, 0)
    tip = tl.max(tl.where(path != 0, n, 0), 0)
    bonus = tl.load(target_ids + b * nodes + tip).to(tl.int32)
    _commit(
        b, request, length, path, depth, token, bonus, table,
        accept_length, out_tokens, last_token, new_seq_lens, select_index,
        input_ids, hidden_index, positions, slot_mapping,
        nodes, longest, row_pages, PAGE, not CHAIN, BLOCK_N, BLOCK_S,
    )  # fmt: skip


@triton.jit
def _weights(
    target, proposed, cut, subtract, v0, vocab, with_removal, WITH_Q: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Weights of one block of the vocabulary: the target's, less what was proposed and refused.

    cut: tokens to remove, -1 for none. subtract: whether there is a proposal to subtract. with_removal: 0
    leaves the target's probabilities as they are.
    """
    v = v0 + tl.arange(0, BLOCK_V)
    weight = tl.load(target + v, mask=v < vocab, other=0.0)
    if WITH_Q:
        q = tl.load(proposed + v, mask=(v < vocab) & (subtract != 0) & (with_removal != 0), other=0.0)
        weight = tl.maximum(weight - q, 0.0)
    else:
        end = tl.where(with_removal != 0, v0 + BLOCK_V, v0)
        token = tl.min(tl.where((cut >= v0) & (cut < end), cut, _NONE), 0)
        while token < _NONE:  # mostly not once
            weight = tl.where(v == token, 0.0, weight)
            token = tl.min(tl.where((cut > token) & (cut < end), cut, _NONE), 0)
    return weight, v


@triton.jit
def _block_masses(
    target, proposed, cut, subtract, vocab, with_removal,
    WITH_Q: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, BLOCK_T)
    mass = tl.zeros([BLOCK_T], tl.float32)
    for block in range(BLOCKS):
        weight, _ = _weights(
            target, proposed, cut, subtract, block * BLOCK_V, vocab, with_removal, WITH_Q, BLOCK_V
        )
        mass = tl.where(t == block, tl.sum(weight, 0), mass)
    return mass


@triton.jit
def _draw(
    target, proposed, cut, subtract, uniform, vocab,
    WITH_Q: tl.constexpr, BLOCK_V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The token where the cumulated weight first exceeds uniform * total: its block, then its place."""
    with_removal = vocab * 0 + 1
    mass = _block_masses(
        target, proposed, cut, subtract, vocab, with_removal, WITH_Q, BLOCK_V, BLOCKS, BLOCK_T
    )
    if tl.sum(mass, 0) <= 0.0:  # by rounding alone
        with_removal = with_removal * 0
        mass = _block_masses(
            target, proposed, cut, subtract, vocab, with_removal, WITH_Q, BLOCK_V, BLOCKS, BLOCK_T
        )
    goal = uniform * tl.sum(mass, 0)
    t = tl.arange(0, BLOCK_T)
    hit = tl.min(tl.where((tl.cumsum(mass, 0) > goal) & (mass > 0.0), t, _NONE), 0)
    last = tl.max(tl.where(mass > 0.0, t, 0), 0)
    block = tl.minimum(hit, last)
    before = tl.sum(tl.where(t < block, mass, 0.0), 0)
    weight, v = _weights(
        target, proposed, cut, subtract, block * BLOCK_V, vocab, with_removal, WITH_Q, BLOCK_V
    )
    hit = tl.min(tl.where((before + tl.cumsum(weight, 0) > goal) & (weight > 0.0), v, _NONE), 0)
    last = tl.max(tl.where(weight > 0.0, v, 0), 0)
    return tl.minimum(hit, last)


@triton.jit(do_not_specialize=["nodes", "longest", "row_pages", "vocab"])
def accept_sampled_kernel(
    requests,
    seq_lens,
    table,
    tokens,
    target_probs,
    draft_probs,
    uniforms,
    accept_length,
    out_tokens,
    last_token,
    new_seq_lens,
    select_index,
    input_ids,
    hidden_index,
    positions,
    slot_mapping,
    mask,
    nodes,
    longest,
    row_pages,
    vocab,
    PAGE: tl.constexpr,
    CHAIN: tl.constexpr,
    WITH_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    b = tl.program_id(0)
    request = tl.load(requests + b)
    live = request != 0
    length = tl.where(live, tl.load(seq_lens + b), 0)
    n = tl.arange(0, BLOCK_N)
    draft = (n > 0) & (n < nodes)
    token = tl.load(tokens + b * nodes + n, mask=draft, other=0)
    u = tl.load(uniforms + b * nodes + n, mask=draft, other=1.0)
    first = b.to(tl.int64) * nodes  # int64: probabilities of a large batch exceed 2^31 elements
    known = draft & live & (token >= 0) & (token < vocab)
    if CHAIN:
        parent = n - 1
        depth = n
    else:
        tree, elder, parent = _load_tree(mask, b, n, nodes)
        known = known & (parent >= 0)
    p = tl.load(target_probs + (first + parent) * vocab + token, mask=known, other=0.0)
    if WITH_Q:
        q = tl.load(
            draft_probs + (b.to(tl.int64) * (nodes - 1) + parent) * vocab + token, mask=known, other=1.0
        )
        passed = (u * q < p).to(tl.int32)
    elif CHAIN:
        passed = (u < p).to(tl.int32)
    else:
        tried_before = tl.sum(tl.where(elder, p[None, :], 0.0), 1)
        passed = (u * (1.0 - tried_before) < p).to(tl.int32)
    if CHAIN:
        path = _chain_path(passed, n, nodes)
    else:
        path, depth = _tree_path(passed, tree, elder, n, nodes, longest)
    path = tl.where(live, path, 0)
    tip = tl.max(tl.where(path != 0, n, 0), 0)

    cut = tl.where(draft & (parent == tip), token, -1)  # all children of the tip were refused
    subtract = (tip < nodes - 1).to(tl.int32)
    proposed = draft_probs + (b.to(tl.int64) * (nodes - 1) + tip) * vocab
    bonus = _draw(
        target_probs + (first + tip) * vocab, proposed, cut, subtract,
        tl.load(uniforms + b * nodes), tl.where(live, vocab, 0), WITH_Q, BLOCK_V, BLOCKS, BLOCK_T,
    )  # fmt: skip
    _commit(
        b, request, length, path, depth, token, bonus, table,
        accept_length, out_tokens, last_token, new_seq_lens, select_index,
        input_ids, hidden_index, positions, slot_mapping,
        nodes, longest, row_pages, PAGE, not CHAIN, BLOCK_N, BLOCK_S,
    )  # fmt: skip
