"""The ops of batches, drafts and trees. Each function is an op's torch reference and declares its signature.

Lines read top to bottom; nothing is tuned. A greedy round with a chain is three launches: `draft_steps`,
`build_tree`, `accept_greedy`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor

from ..errors import MetadataError
from .metadata_buffers import Batch, Branches, DraftSteps, ExtendRows, Tree, num_candidates
from .op_dispatch import metadata_op
from .op_signature import Call, floats, ids, ints

MAX_NODES = 256  # a node block squared has to fit into one program's registers
MAX_POSITION = 2**31 - 1


def _extend_rule(call: Call) -> None:
    call.expect("block_table", call.sizes["B"], min(call.sizes["Q"], call.sizes["P"]))


@metadata_op(_extend_rule)
def extend_batch(batch: Batch, query_lens: Annotated[Tensor, ints("B")], out: ExtendRows) -> None:
    """Metadata of a batch that appends tokens: prefill, chunked prefill, or decode with query_lens of 1.

    Args:
        batch: seq_lens count the tokens after this batch.
        query_lens: tokens that each request appends. Row j of request b is its token
            `seq_lens[b] - query_lens[b] + j`.
        out: written. Of its T rows, at least the sum of query_lens; rows that do not fit are dropped.
    """
    lens = batch.live_lens()
    indptr = _indptr(replace(batch, seq_lens=query_lens).live_lens())
    out.qo_indptr.copy_(indptr)
    row = _arange(out.positions.numel(), lens)
    owner = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp(max=batch.size - 1)
    token = lens[owner] - indptr[owner + 1] + row
    token = torch.where(row < indptr[-1], token, 0)
    slots = replace(batch, requests=batch.requests[owner]).slots_of(token[:, None])[:, 0]
    out.positions.copy_(token)
    out.slot_mapping.copy_(torch.where(row < indptr[-1], slots, 0))
    used = (lens + batch.page_size - 1) // batch.page_size
    width = out.block_table.shape[1]
    pages = batch.table[batch.requests.long()][:, :width]
    out.block_table.copy_(torch.where(_arange(width, used) < used[:, None], pages, out.block_table))


@metadata_op(lambda call: None)
def draft_steps(batch: Batch, out: DraftSteps) -> None:
    """Metadata of all S - 1 draft forwards of a round in one launch.

    EAGLE's draft writes, for the token that follows position i, its own K and V at i: the pair of that token
    and the target's feature at i. So the draft cache holds seq_len tokens after draft-extend, and forward s
    puts branch j at token `seq_len + s*k + j`. Reserve `seq_len + max(N, (S-1)*k)` tokens before the round.

    Source: EAGLE-2 (arXiv 2406.16858) for the tree of top-k branches.

    Args:
        batch: seq_lens before the round: tokens whose target K and V are right.
        out: written.
    """
    levels, topk = out.positions.shape[0], out.positions.shape[1] // batch.size
    live, lens = batch.requests != 0, batch.live_lens()
    branch = _arange(topk, lens)
    for level in range(levels):
        token = lens[:, None] + level * topk + branch
        out.slot_mapping[level] = batch.slots_of(token).flatten()
        out.positions[level] = torch.where(live, lens + level, 0).repeat_interleave(topk)
        out.seq_lens[level] = torch.where(live, lens + (level + 1) * topk, 0)


def _branches_rule(call: Call) -> None:
    level, size, steps, topk = (call.sizes[name] for name in ("level", "B", "S", "k"))
    if not 0 <= level < steps:
        raise MetadataError.no_such_level(call.op, level, steps)
    call.expect("probs", size, topk if level else 1, topk)
    call.expect("all_scores", size, num_candidates(steps, topk))


@metadata_op(_branches_rule)
def select_branches(
    requests: Annotated[Tensor, ints("B")],
    level: int,
    probs: Annotated[Tensor, floats("B", "J", "k")],
    child_tokens: Annotated[Tensor, ids("B", "J", "k")],
    out: Branches,
) -> None:
    """Take the children of one level in: append them to the candidates, keep the best k as branches.

    Level 0 begins the draft: the root's k children are the branches. Level l follows draft forward l - 1:
    of the k² products of branch score and child probability the k largest stay. Ties go to the lower index,
    so a parent always ranks before its children. The last level (S - 1) only appends. A branch inherits its
    parent's row of the mask and adds itself.

    Source: EAGLE-2 (arXiv 2406.16858), expansion phase.

    Args:
        requests: `Batch.requests`.
        level: 0 to S - 1.
        probs: draft probabilities in [0, 1] of the top-k children of each of J branches; J is 1 at level 0
            (the root), else k.
        child_tokens: their token ids in the target's vocabulary.
        out: read and written in place.
    """
    size, topk = out.scores.shape
    live = (requests != 0)[:, None]
    child = torch.where(live, child_tokens.flatten(1), 0).to(torch.int32)
    score = torch.where(live, probs.flatten(1), 0.0)
    offset, above = 0, torch.full_like(child, -1)
    if level:
        offset = num_candidates(level, topk)
        score = score * torch.where(live, out.scores, 0.0).repeat_interleave(topk, 1)
        above = out.candidates.repeat_interleave(topk, 1)
    added = slice(offset, offset + score.shape[1])
    out.all_scores[:, added], out.all_tokens[:, added], out.all_parents[:, added] = score, child, above
    width = out.mask.shape[2]
    if level * topk == width:
        return

    if level:  # stable: of equal scores the lower index wins
        best = score.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    else:
        best = torch.arange(topk, device=score.device).expand(size, -1)
    row = torch.arange(size, device=score.device)[:, None]
    before = row * topk + best // topk  # at level 0 the first branch, of which nothing is kept
    out.hidden_index.copy_((before if level else row.expand(-1, topk)).flatten())
    out.scores.copy_(score.gather(1, best))
    out.tokens.copy_(child.gather(1, best))
    out.candidates.copy_(offset + best)
    seen = out.mask.flatten(0, 1)[before.flatten()].view_as(out.mask)  # copies
    seen[:, :, level * topk :] = False
    seen |= _arange(width, requests) == (level * topk + _arange(topk, requests))[:, None]
    out.mask.copy_(seen)


def _tree_rule(call: Call) -> None:
    check_nodes(call)
    nodes, count, last = (call.sizes[name] for name in ("N", "M", "max_position"))
    if not 0 <= last <= MAX_POSITION:
        raise MetadataError.no_such_position(call.op, last, MAX_POSITION)
    if ("scores" in call.shapes) != ("parents" in call.shapes):
        raise MetadataError.half_a_tree(call.op)
    if count < nodes - 1 or ("scores" not in call.shapes and count != nodes - 1):
        raise MetadataError.wrong_candidates(call.op, nodes, count)


def check_nodes(call: Call) -> None:
    """Refuse a tree that no kernel holds."""
    if not 1 <= call.sizes["N"] <= MAX_NODES:
        raise MetadataError.wrong_nodes(call.op, call.sizes["N"], MAX_NODES)


@metadata_op(_tree_rule)
def build_tree(
    batch: Batch,
    root_tokens: Annotated[Tensor, ids("B")],
    draft_tokens: Annotated[Tensor, ids("B", "M")],
    out: Tree,
    *,
    scores: Annotated[Tensor | None, floats("B", "M")] = None,
    parents: Annotated[Tensor | None, ints("B", "M")] = None,
    max_position: int = MAX_POSITION,
) -> None:
    """Inputs of a verify forward: the best N - 1 of M candidates under the root, or a chain as it is.

    Candidates are ranked by score, ties to the lower index, and become nodes 1 to N - 1 by ascending index.
    So a parent's node comes before its children's, and siblings come in the order in which they were
    proposed.

    Source: EAGLE-2 (arXiv 2406.16858), reranking phase.

    Args:
        batch: seq_lens before verify; the root is token `seq_len`.
        root_tokens: the bonus token of the round before.
        draft_tokens: the candidates, `Branches.all_tokens` with M = C; of a chain its tokens, M = N - 1.
        out: written.
        scores: not negative, at most the parent's; None for a chain.
        parents: candidate that each extends, -1 for the root; None for a chain.
        max_position: the last one that the target has. A draft may reach past it; such a token is never kept.
    """
    size, nodes = out.mask.shape[:2]
    live, lens = (batch.requests != 0)[:, None], batch.live_lens()
    node = _arange(nodes, lens)
    if scores is None or parents is None:
        chosen, parent = (node[1:] - 1).expand(size, -1), (node - 1).expand(size, -1)
    else:
        chosen, parent = _best_nodes(live, scores, parents, nodes)
    drafts = draft_tokens.gather(1, chosen.long())
    tokens = torch.cat([root_tokens[:, None].to(torch.int32), drafts.to(torch.int32)], 1)
    ancestor = _ancestors(parent)
    depth = ancestor.sum(-1, dtype=torch.int32) - 1

    out.tokens.copy_(torch.where(live, tokens, 0).flatten())
    positions = (lens[:, None] + depth).clamp(max=max_position)
    out.positions.copy_(torch.where(live, positions, 0).flatten())
    out.mask.copy_(ancestor)
    out.slot_mapping.copy_(batch.slots_of(lens[:, None] + node).flatten())
    out.seq_lens.copy_(torch.where(live[:, 0], lens + nodes, 0))
    out.qo_indptr.copy_(_arange(size + 1, lens) * nodes)


def _best_nodes(live: Tensor, scores: Tensor, parents: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Candidates chosen `[B, N-1]`, ascending, and the parent node of every node `[B, N]`, -1 for the root.

    A padded request gets the first N - 1, all of them children of the root.
    """
    ranked = torch.where(live, scores, 0.0).sort(dim=1, descending=True, stable=True).indices
    chosen = ranked[:, : nodes - 1].sort(dim=1).values
    wanted = torch.where(live, parents.gather(1, chosen), -1)
    same = chosen[:, None, :] == wanted[:, :, None]
    earlier = torch.ones(nodes - 1, nodes - 1, dtype=torch.bool, device=scores.device).tril(-1)
    place = _arange(nodes - 1, scores) + 1
    parent = torch.where(same & earlier, place, 0).sum(-1, dtype=torch.int32)
    root = torch.full((len(parent), 1), -1, dtype=torch.int32, device=parent.device)
    return chosen, torch.cat([root, parent], 1)


def _ancestors(parent: Tensor) -> Tensor:
    """bool `[B, N, N]`: n's ancestors and n itself, from each node's parent (-1: none)."""
    size, nodes = parent.shape
    result = torch.eye(nodes, dtype=torch.bool, device=parent.device).repeat(size, 1, 1)
    for node in range(1, nodes):  # a parent's row is complete before its children need it
        above = parent[:, node].long()
        result[:, node] |= result[torch.arange(size, device=parent.device), above]
    return result


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _arange(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device)
