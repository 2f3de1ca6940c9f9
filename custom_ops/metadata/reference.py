"""The torch reference of batches, drafts and trees: the definition, on any device, without a host sync.

Arguments and shapes are those of the ops (`metadata_ops.py`, `metadata_buffers.py`). Lines read top to
bottom; nothing is tuned.
"""

from __future__ import annotations

import torch
from torch import Tensor


def live_lens(requests: Tensor, seq_lens: Tensor) -> Tensor:
    """A copy of the lengths in which padded requests have none."""
    return torch.where(requests != 0, seq_lens, 0)


def slots_of(requests: Tensor, tokens: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Slots of `tokens [B, n]`: 0 for padded requests and for tokens outside of the request's row."""
    page = tokens.div(page_size, rounding_mode="floor")
    inside = (requests != 0)[:, None] & (page >= 0) & (page < table.shape[1])
    pages = table[requests.long()].gather(1, page.clamp(0, table.shape[1] - 1).long())
    return torch.where(inside, pages * page_size + tokens % page_size, 0)


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _arange(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device)


def _scatter(out: Tensor, index: Tensor, value: Tensor, keep: Tensor) -> None:
    """`out[index] = value` where `keep`, along the last dimension; the rest stays."""
    width = out.shape[-1]
    room = torch.cat([out, out.new_zeros(*out.shape[:-1], 1)], dim=-1)
    room.scatter_(-1, torch.where(keep & (index < width), index, width).long(), value.to(out.dtype))
    out.copy_(room[..., :width])


def extend_batch(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    query_lens: Tensor,
    qo_indptr: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    block_table: Tensor,
) -> None:
    lens, queries = live_lens(requests, seq_lens), live_lens(requests, query_lens)
    indptr = _indptr(queries)
    qo_indptr.copy_(indptr)
    row = _arange(slot_mapping.numel(), requests)
    owner = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp(max=requests.numel() - 1)
    token = (lens - queries)[owner] + row - indptr[owner]
    token = torch.where(row < indptr[-1], token, 0)
    slots = slots_of(requests[owner], token[:, None], table, page_size)[:, 0]
    positions.copy_(token)
    slot_mapping.copy_(torch.where(row < indptr[-1], slots, 0))
    used = (lens + page_size - 1) // page_size
    width = block_table.shape[1]
    pages = table[requests.long()][:, :width]
    block_table.copy_(torch.where(_arange(width, used) < used[:, None], pages, block_table))


def kv_indices(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    lens = live_lens(requests, seq_lens)
    pages = ((lens + page_size - 1) // page_size).clamp(max=table.shape[1])
    indptr = _indptr(pages)
    kv_indptr.copy_(indptr)
    last_page_len.copy_(torch.where(lens > 0, (lens - 1) % page_size + 1, 0))
    column = _arange(table.shape[1], table)
    place = indptr[:-1, None] + column
    keep = column < pages[:, None]
    _scatter(indices, place.flatten(), table[requests.long()].flatten(), keep.flatten())


def advance(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    lens = live_lens(requests, seq_lens)
    positions.copy_(lens)
    slot_mapping.copy_(slots_of(requests, lens[:, None], table, page_size)[:, 0])
    seq_lens.copy_(torch.where(requests != 0, lens + 1, 0))


def draft_steps(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    kv_indptr: Tensor | None,
    indices: Tensor | None,
) -> None:
    size, levels = requests.numel(), positions.shape[0]
    topk = positions.shape[1] // max(size, 1)
    live, lens = requests != 0, live_lens(requests, seq_lens)
    for level in range(levels):
        branch = _arange(topk, requests)
        token = lens[:, None] + level * topk + branch
        slot_mapping[level] = slots_of(requests, token, table, page_size).flatten()
        positions[level] = torch.where(live, lens + level, 0).repeat_interleave(topk)
        lengths[level] = torch.where(live, lens + (level + 1) * topk, 0)
        if kv_indptr is None or indices is None:
            continue
        attended = torch.where(live, lens + level + 1, 0).repeat_interleave(topk)
        kv_indptr[level] = _indptr(attended)
        # A chain's extension follows its prefix; a tree's is written by select_branches.
        known = torch.where(live, lens + level + 1, 0) if topk == 1 else lens
        column = _arange(table.shape[1] * page_size, table)
        slots = slots_of(requests, column.expand(size, -1), table, page_size).repeat_interleave(topk, 0)
        keep = column < known.repeat_interleave(topk)[:, None]
        place = kv_indptr[level, :-1, None] + column
        _scatter(indices[level], place.flatten(), slots.flatten(), keep.flatten())


def select_branches(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    level: int,
    probs: Tensor,
    child_tokens: Tensor,
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    hidden_index: Tensor,
    candidates: Tensor,
    all_scores: Tensor,
    all_tokens: Tensor,
    all_parents: Tensor,
    ancestors: Tensor,
    mask: Tensor,
    kv_indptr: Tensor | None,
    indices: Tensor | None,
) -> None:
    size, topk = scores.shape
    steps = ancestors.shape[1]
    live = (requests != 0)[:, None]
    child = torch.where(live, child_tokens.reshape(size, -1), 0).to(torch.int32)
    prob = torch.where(live, probs.reshape(size, -1), 0.0)
    if level == 0:
        offset, score, above = 0, prob, torch.full_like(child, -1)
    else:
        offset = topk + (level - 1) * topk * topk
        score = torch.where(live, scores, 0.0).repeat_interleave(topk, 1) * prob
        above = candidates.repeat_interleave(topk, 1)
    everywhere = slice(offset, offset + score.shape[1])
    all_scores[:, everywhere], all_tokens[:, everywhere], all_parents[:, everywhere] = score, child, above
    if level == steps - 1:
        return

    # Stable: of equal scores the lower index wins. Level 0 keeps all its k, in their order.
    if level == 0:
        best = torch.arange(topk, device=scores.device).expand(size, -1)
    else:
        best = score.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    parent = best // topk  # 0 at level 0
    request_row = torch.arange(size, device=scores.device)[:, None]
    before = request_row * topk + parent
    scores.copy_(score.gather(1, best))
    tokens.copy_(child.gather(1, best))
    parents.copy_(parent)
    hidden_index.copy_((request_row.expand(-1, topk) if level == 0 else before).flatten())
    candidates.copy_(offset + best)

    lens = live_lens(requests, seq_lens)
    own = level * topk + _arange(topk, requests)
    path = ancestors[before.flatten()]  # copies
    path[:, level:] = 0
    path[:, level] = slots_of(requests, lens[:, None] + own, table, page_size).flatten()
    seen = mask.flatten(0, 1)[before.flatten()].reshape(mask.shape)
    seen[:, :, level * topk :] = False
    seen |= _arange(mask.shape[2], mask) == own[:, None]
    ancestors.copy_(path)
    mask.copy_(seen)
    if kv_indptr is not None and indices is not None:
        depth = _arange(level + 1, requests)
        place = kv_indptr[level, :-1, None] + lens.repeat_interleave(topk)[:, None] + depth
        keep = live.repeat_interleave(topk, 0).expand_as(place)
        _scatter(indices[level], place.flatten(), path[:, : level + 1].flatten(), keep.flatten())


def build_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    root_tokens: Tensor,
    draft_tokens: Tensor,
    scores: Tensor | None,
    parents: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    qo_indptr: Tensor,
) -> None:
    size, nodes = retrieve_index.shape
    live, lens = requests != 0, live_lens(requests, seq_lens)
    node = _arange(nodes, requests)
    if scores is None or parents is None:
        chosen, parent = (node[1:] - 1).expand(size, -1), (node - 1).expand(size, -1)
    else:
        chosen, parent = _best_nodes(live, scores, parents, nodes)
    drafts = draft_tokens.gather(1, chosen.long())
    all_tokens = torch.cat([root_tokens[:, None].to(torch.int32), drafts.to(torch.int32)], 1)
    ancestor = _ancestors(parent)
    depth = ancestor.sum(-1, dtype=torch.int32) - 1

    tokens.copy_(torch.where(live[:, None], all_tokens, 0).flatten())
    positions.copy_(torch.where(live[:, None], lens[:, None] + depth, 0).flatten())
    mask.copy_(ancestor)
    retrieve_index.copy_(_arange(size * nodes, requests).view(size, nodes))
    child_of = (parent[:, None, :] == node[:, None]) & (node > 0)  # [B, n, m]: m is a child of n
    after = (parent[:, None, :] == parent[:, :, None]) & (node > node[:, None]) & (node[:, None] > 0)
    next_token.copy_(_first(child_of))
    next_sibling.copy_(_first(after))
    slot_mapping.copy_(slots_of(requests, lens[:, None] + node, table, page_size).flatten())
    lengths.copy_(torch.where(live, lens + nodes, 0))
    qo_indptr.copy_(_arange(size + 1, requests) * nodes)


def _best_nodes(live: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Candidates chosen `[B, N-1]`, ascending, and the parent node of every node `[B, N]`, -1 for the root.

    A padded request gets the first N - 1, all of them children of the root.
    """
    ranked = torch.where(live[:, None], scores, 0.0).sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : nodes - 1].sort(dim=1).values
    wanted = torch.where(live[:, None], parents.gather(1, chosen), -1)
    same = chosen[:, None, :] == wanted[:, :, None]
    earlier = torch.ones(nodes - 1, nodes - 1, dtype=torch.bool, device=scores.device).tril(-1)
    place = _arange(nodes - 1, scores) + 1
    parent = torch.where(same & earlier, place, 0).sum(-1, dtype=torch.int32)
    return chosen, torch.cat([torch.full_like(parent[:, :1], -1), parent], 1) if nodes > 1 else _root(live)


def _root(live: Tensor) -> Tensor:
    return torch.full((live.numel(), 1), -1, dtype=torch.int32, device=live.device)


def _ancestors(parent: Tensor) -> Tensor:
    """bool `[B, N, N]`: n's ancestors and n itself, from each node's parent (-1: none)."""
    size, nodes = parent.shape
    result = torch.eye(nodes, dtype=torch.bool, device=parent.device).repeat(size, 1, 1)
    for node in range(1, nodes):  # a parent's row is complete before its children need it
        above = parent[:, node].long()
        result[:, node] |= result[torch.arange(size, device=parent.device), above]
    return result


def _first(found: Tensor) -> Tensor:
    """Index of the first True along the last dimension, -1 if there is none."""
    return torch.where(found.any(-1), found.int().argmax(-1), -1).to(torch.int32)
