"""The torch reference of acceptance and commit. Arguments and shapes are those of the ops.

Every rule is the same walk over the tree: each draft node takes its own test; of siblings the first that
passes is accepted; a node is on the accepted path when it and all of its ancestors are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kv_cache import NULL_SLOT
from .reference import live_lens, slots_of


def accept_greedy(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_ids: Tensor,
    *outs: Tensor,
) -> None:
    size = requests.numel()
    token, target = tokens.view(size, -1), target_ids.view(size, -1)
    tree, parent = _tree(mask, token)
    passed = token == target.gather(1, parent.clamp(min=0))
    path = _path(passed, tree, parent, outs[0].shape[1])
    bonus = target.gather(1, _tip(path)[:, None])[:, 0]
    _commit(requests, seq_lens, table, page_size, token, tree, path, bonus, mask is not None, outs)


def accept_chain(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> None:
    size, nodes, vocab = target_probs.shape
    token = tokens.view(size, nodes)
    tree, parent = _tree(None, token)
    drafts = token[:, 1:, None].long()
    passed = torch.zeros_like(token, dtype=torch.bool)
    target, draft = target_probs[:, :-1].gather(2, drafts), draft_probs.gather(2, drafts)
    passed[:, 1:] = uniforms[:, 1:] * draft[..., 0] < target[..., 0]
    path = _path(passed, tree, parent, outs[0].shape[1])

    tip = _tip(path)[:, None, None].expand(-1, 1, vocab)
    after_last = torch.zeros_like(target_probs[:, :1])  # no draft was proposed after the last node
    proposed = torch.cat([draft_probs, after_last], 1).gather(1, tip)[:, 0]
    target_tip = target_probs.gather(1, tip)[:, 0]
    bonus = draw((target_tip - proposed).clamp(min=0), target_tip, uniforms[:, 0])
    _commit(requests, seq_lens, table, page_size, token, tree, path, bonus, False, outs)


def accept_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> None:
    size, nodes, vocab = target_probs.shape
    token = tokens.view(size, nodes)
    tree, parent = _tree(mask, token)
    drafted = torch.arange(nodes, device=token.device) > 0
    rows = parent.clamp(min=0)[:, :, None].expand(-1, -1, vocab)
    mass = target_probs.gather(1, rows).gather(2, token[:, :, None].long())[..., 0]
    tried_before = (_elder_siblings(parent) * mass[:, None, :]).sum(-1)
    passed = drafted & (uniforms * (1 - tried_before) < mass)
    path = _path(passed, tree, parent, outs[0].shape[1])

    tip = _tip(path)[:, None]
    target_tip = target_probs.gather(1, tip[:, :, None].expand(-1, 1, vocab))[:, 0]
    refused = drafted & (parent == tip)  # all children of the tip, or the path would go on
    removed = torch.zeros(size, vocab + 1, dtype=torch.bool, device=token.device)
    removed.scatter_(1, torch.where(refused, token, vocab).long(), True)
    bonus = draw(target_tip.masked_fill(removed[:, :vocab], 0), target_tip, uniforms[:, 0])
    _commit(requests, seq_lens, table, page_size, token, tree, path, bonus, mask is not None, outs)


def draw(weights: Tensor, otherwise: Tensor, uniform: Tensor) -> Tensor:
    """`[B]` tokens: the first of each row `[B, V]` whose cumulated weight exceeds `uniform * total`.

    Weights need not sum to 1. Rows without any weight, which only rounding makes, draw from `otherwise`.
    """
    weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, otherwise)
    reached = weights.cumsum(1)
    index = torch.arange(weights.shape[1], device=weights.device)
    hit = (reached > uniform[:, None] * reached[:, -1:]) & (weights > 0)
    last = torch.where(weights > 0, index, 0).amax(1)  # uniform * total may round up to the total
    return torch.where(hit.any(1), hit.int().argmax(1), last)


def _tree(mask: Tensor | None, token: Tensor) -> tuple[Tensor, Tensor]:
    """Ancestors bool `[B, N, N]` and the parent of each node int64 `[B, N]`, -1 for the root."""
    size, nodes = token.shape
    if mask is None:
        mask = torch.ones(nodes, nodes, dtype=torch.bool, device=token.device).tril().expand(size, -1, -1)
    node = torch.arange(nodes, device=token.device)
    proper = mask & (node < node[:, None])
    return mask, torch.where(proper, node, -1).amax(-1)  # nodes ascend along a path: the last is the parent


def _elder_siblings(parent: Tensor) -> Tensor:
    """bool `[B, n, m]`: m is a sibling that is tried before n."""
    node = torch.arange(parent.shape[1], device=parent.device)
    same = parent[:, :, None] == parent[:, None, :]
    return same & (node < node[:, None]) & (node > 0)


def _path(passed: Tensor, tree: Tensor, parent: Tensor, longest: int) -> Tensor:
    """bool `[B, N]`: the accepted path, root included, `longest` nodes at most."""
    beaten = (_elder_siblings(parent) & passed[:, None, :]).any(-1)
    good = passed & ~beaten
    good[:, 0] = True
    return ~(tree & ~good[:, None, :]).any(-1) & (tree.sum(-1) <= longest)


def _tip(path: Tensor) -> Tensor:
    node = torch.arange(path.shape[1], device=path.device)
    return torch.where(path, node, 0).amax(1)


def _commit(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    token: Tensor,
    tree: Tensor,
    path: Tensor,
    bonus: Tensor,
    permute: bool,
    outs: tuple[Tensor, ...],
) -> None:
    """Write `Accepted`, and reorder the slots of an accepted path that is not the first nodes."""
    size, nodes = token.shape
    live, lens = requests != 0, live_lens(requests, seq_lens)
    path = path & live[:, None]
    count = path.sum(1)
    node = torch.arange(nodes, device=token.device)
    row = torch.arange(size, device=token.device)[:, None] * nodes + node
    # Path first, in order; the others after it, in theirs.
    order = torch.where(path, node, node + nodes).argsort(dim=1)
    kept = node < count[:, None]
    follows = token.gather(1, order).roll(-1, 1)
    follows = torch.where(node == count[:, None] - 1, bonus[:, None], follows)

    def padded(values: Tensor, other: int | Tensor) -> Tensor:
        return torch.where(kept, values, other)

    longest = outs[0].shape[1]
    accept_index, accept_len, out_tokens, last, new_lens, select, ids, hidden, positions, slots = outs
    for out, values in ((accept_index, row.gather(1, order)), (out_tokens, follows)):
        width = min(longest, nodes)
        out.fill_(-1)
        out[:, :width] = padded(values, -1)[:, :width]
    accept_len.copy_(count)
    last.copy_(torch.where(live, bonus, 0))
    select.copy_(row[:, 0] + (count - 1).clamp(min=0))
    ids.copy_(padded(follows, 0).flatten())
    hidden.copy_(padded(row.gather(1, order), row).flatten())
    token_index = lens[:, None] + node
    positions.copy_(torch.where(live[:, None], token_index, 0).flatten())
    if permute:
        _permute(requests, lens, table, order)
    slots.copy_(slots_of(requests, token_index, table, page_size).flatten())
    new_lens.copy_(torch.where(live, lens + count, 0))


def _permute(requests: Tensor, lens: Tensor, table: Tensor, order: Tensor) -> None:
    """`table[request, len + i] = table[request, len + order[i]]`, where all nodes have pages.

    Others would get entries that the row's owner does not know of, and never takes back.
    """
    nodes = order.shape[1]
    node = torch.arange(nodes, device=order.device)
    fits = (requests != 0) & (lens + nodes <= table.shape[1])
    start = torch.where(fits, lens, 0)[:, None]
    rows = requests.long()[:, None]
    before = table[rows, (start + order).clamp(max=table.shape[1] - 1)]
    fits = fits & (before != NULL_SLOT).all(1)
    # Padded requests and full rows write into an extra row, which is dropped.
    room = torch.cat([table, table.new_zeros(1, table.shape[1])])
    rows = torch.where(fits[:, None], rows, table.shape[0])
    room[rows, (start + node).clamp(max=table.shape[1] - 1)] = before
    table.copy_(room[:-1])
