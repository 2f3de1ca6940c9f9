"""The ops of acceptance and commit. Each function is the op's torch reference, and declares its signature.

Every rule is the same walk over the tree: each draft node takes its own test; of siblings the first that
passes is accepted; a node is on the accepted path when it and all of its ancestors are.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from ..errors import MetadataError
from ..kv_cache import NULL_SLOT
from .draft_ops import check_nodes
from .metadata_buffers import Accepted, Batch
from .op_dispatch import metadata_op
from .op_signature import Call, bools, floats, ids, ints


def _tree_or_chain(call: Call) -> None:
    if "mask" not in call.shapes:
        _chain(call)
        return
    check_nodes(call)
    if call.sizes["page_size"] != 1:
        raise MetadataError.tree_needs_small_pages(call.op, call.sizes["page_size"])


def _chain(call: Call) -> None:
    """A chain may be accepted to its end: S + 1 is N."""
    check_nodes(call)
    call.expect("out_tokens", call.sizes["B"], call.sizes["N"])


@metadata_op(_tree_or_chain, writes=("table",))
def accept_greedy(
    batch: Batch,
    tokens: Annotated[Tensor, ints("B*N")],
    target_ids: Annotated[Tensor, ids("B*N")],
    out: Accepted,
    *,
    mask: Annotated[Tensor | None, bools("B", "N", "N")] = None,
) -> None:
    """Accept the path on which every draft token is the target's choice; commit; prepare draft-extend.

    The output equals plain greedy decoding token for token. The commit of a tree (mask given, page size 1)
    permutes the request's entries of `batch.table` at tokens `seq_len .. seq_len + N - 1`: slots of the
    accepted path first, in order, then the others in theirs. No K or V is copied, no slot is lost. A chain's
    accepted tokens are in place already, whatever the page size. Reserve `seq_len + N` tokens before the
    round: a row without pages for all of them is not permuted.

    Source: draft-extend rows of fixed size as in sglang#6606 and #9588; the commit permutes a block table
    where SGLang moves K and V.

    Args:
        batch: seq_lens before verify.
        tokens: `Tree.tokens`.
        target_ids: the target's argmax at every row of the verify forward.
        out: written.
        mask: `Tree.mask`; None for a chain (N = S + 1).

    Raises:
        MetadataError: a tree with a page size above 1.
    """
    token, target = tokens.view(batch.size, -1), target_ids.view(batch.size, -1)
    tree, parent = _tree(mask, token)
    passed = token == target.gather(1, parent.clamp(min=0))
    path = _path(passed, tree, parent, out.out_tokens.shape[1])
    bonus = target.gather(1, _tip(path)[:, None])[:, 0]
    _commit(batch, token, path, bonus, out, permute=mask is not None)


@metadata_op(_chain)
def accept_chain(
    batch: Batch,
    tokens: Annotated[Tensor, ints("B*N")],
    target_probs: Annotated[Tensor, floats("B", "N", "V")],
    draft_probs: Annotated[Tensor, floats("B", "N-1", "V")],
    uniforms: Annotated[Tensor, floats("B", "N")],
    out: Accepted,
) -> None:
    """Rejection sampling of a chain whose tokens were sampled from the draft; commit; prepare draft-extend.

    Draft i is accepted when `u_i q_i(x) < p_i(x)`. The bonus is drawn from the normalised max(p - q, 0) at
    the first refusal, from p after the last draft. Output has the target's distribution, whatever q is.

    Source: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318).

    Args:
        batch: seq_lens before verify.
        tokens: `Tree.tokens` of a chain; token i of a request was drawn from draft_probs[:, i-1].
        target_probs: what the target samples from, after temperature, top-p and the like.
        draft_probs: what the draft sampled from, in the target's vocabulary.
        uniforms: in [0, 1): column i > 0 tests draft i, column 0 draws the bonus.
        out: written.
    """
    size, nodes, vocab = target_probs.shape
    token = tokens.view(size, nodes)
    tree, parent = _tree(None, token)
    drafts = token[:, 1:, None].long()
    passed = torch.zeros_like(token, dtype=torch.bool)
    target, draft = target_probs[:, :-1].gather(2, drafts), draft_probs.gather(2, drafts)
    passed[:, 1:] = uniforms[:, 1:] * draft[..., 0] < target[..., 0]
    path = _path(passed, tree, parent, nodes)

    tip = _tip(path)[:, None, None].expand(-1, 1, vocab)
    after_last = torch.zeros_like(target_probs[:, :1])  # no draft was proposed after the last node
    proposed = torch.cat([draft_probs, after_last], 1).gather(1, tip)[:, 0]
    target_tip = target_probs.gather(1, tip)[:, 0]
    bonus = draw((target_tip - proposed).clamp(min=0), target_tip, uniforms[:, 0])
    _commit(batch, token, path, bonus, out, permute=False)


@metadata_op(_tree_or_chain, writes=("table",))
def accept_tree(
    batch: Batch,
    tokens: Annotated[Tensor, ints("B*N")],
    target_probs: Annotated[Tensor, floats("B", "N", "V")],
    uniforms: Annotated[Tensor, floats("B", "N")],
    out: Accepted,
    *,
    mask: Annotated[Tensor | None, bools("B", "N", "N")] = None,
) -> None:
    """Rejection sampling of a tree whose tokens were chosen, not sampled; commit; prepare draft-extend.

    A node's children are tried in order: child c is accepted when `u_c (1 - mass of those refused before) <
    p(c)`. The bonus is drawn from p at the last accepted node, without the children refused there. Each
    proposal is a point mass, so the output has the target's distribution, whatever the draft's top-k found.

    Source: SpecInfer (arXiv 2305.09781), multi-step speculative sampling; EAGLE (arXiv 2401.15077), appendix.

    Args:
        batch: seq_lens before verify.
        tokens: `Tree.tokens`; children of one node differ.
        target_probs: normalised: what the target samples from at each node.
        uniforms: in [0, 1): column c > 0 tests node c, column 0 draws the bonus.
        out: written.
        mask: `Tree.mask`; None for a chain (N = S + 1).

    Raises:
        MetadataError: a tree with a page size above 1.
    """
    size, nodes, vocab = target_probs.shape
    token = tokens.view(size, nodes)
    tree, parent = _tree(mask, token)
    drafted = torch.arange(nodes, device=token.device) > 0
    rows = parent.clamp(min=0)[:, :, None].expand(-1, -1, vocab)
    mass = target_probs.gather(1, rows).gather(2, token[:, :, None].long())[..., 0]
    tried_before = (_elder_siblings(parent) * mass[:, None, :]).sum(-1)
    passed = drafted & (uniforms * (1 - tried_before) < mass)
    path = _path(passed, tree, parent, out.out_tokens.shape[1])

    tip = _tip(path)[:, None]
    target_tip = target_probs.gather(1, tip[:, :, None].expand(-1, 1, vocab))[:, 0]
    refused = drafted & (parent == tip)  # all children of the tip, or the path would go on
    removed = torch.zeros(size, vocab + 1, dtype=torch.bool, device=token.device)
    removed.scatter_(1, torch.where(refused, token, vocab).long(), True)
    bonus = draw(target_tip.masked_fill(removed[:, :vocab], 0), target_tip, uniforms[:, 0])
    _commit(batch, token, path, bonus, out, permute=mask is not None)


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
    batch: Batch, token: Tensor, path: Tensor, bonus: Tensor, out: Accepted, *, permute: bool
) -> None:
    """Write `out`, and reorder the slots of an accepted path that is not the first nodes."""
    size, nodes = token.shape
    live, lens = batch.requests != 0, batch.live_lens()
    path = path & live[:, None]
    count = path.sum(1)
    node = torch.arange(nodes, device=token.device)
    row = torch.arange(size, device=token.device)[:, None] * nodes + node
    # Path first, in order; the others after it, in theirs.
    order = torch.where(path, node, node + nodes).argsort(dim=1)
    kept = node < count[:, None]
    follows = token.gather(1, order).roll(-1, 1)
    follows = torch.where(node == count[:, None] - 1, bonus[:, None], follows)

    width = min(out.out_tokens.shape[1], nodes)
    out.out_tokens.fill_(-1)
    out.out_tokens[:, :width] = torch.where(kept, follows, -1)[:, :width]
    out.accept_length.copy_(count)
    out.bonus.copy_(torch.where(live, bonus, 0))
    out.select_index.copy_(row[:, 0] + (count - 1).clamp(min=0))
    out.input_ids.copy_(torch.where(kept, follows, 0).flatten())
    out.hidden_index.copy_(torch.where(kept, row.gather(1, order), row).flatten())
    token_index = lens[:, None] + node
    out.positions.copy_(torch.where(live[:, None], token_index, 0).flatten())
    if permute:
        _permute(batch, order)
    out.slot_mapping.copy_(batch.slots_of(token_index).flatten())
    out.new_seq_lens.copy_(torch.where(live, lens + count, 0))


def _permute(batch: Batch, order: Tensor) -> None:
    """`table[request, len + i] = table[request, len + order[i]]`, where all nodes have pages.

    Other rows would get entries that the table's owner does not know of and never takes back.
    """
    lens, table, nodes = batch.live_lens(), batch.table, order.shape[1]
    node = torch.arange(nodes, device=order.device)
    fits = (batch.requests != 0) & (lens + nodes <= table.shape[1])
    start = torch.where(fits, lens, 0)[:, None]
    rows = batch.requests.long()[:, None]
    before = table[rows, (start + order).clamp(max=table.shape[1] - 1)]
    fits = fits & (before != NULL_SLOT).all(1)
    # Padded requests and full rows write into an extra row, which is dropped.
    room = torch.cat([table, table.new_zeros(1, table.shape[1])])
    rows = torch.where(fits[:, None], rows, table.shape[0])
    room[rows, (start + node).clamp(max=table.shape[1] - 1)] = before
    table.copy_(room[:-1])
