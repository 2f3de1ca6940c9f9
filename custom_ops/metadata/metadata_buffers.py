"""What the metadata ops read and write: frozen bundles of static buffers.

A bundle is made once, for the largest batch of a CUDA graph, and overwritten by every launch.

Letters, here and in every docstring: `B` requests, `k` top-k, `S` steps, `N` draft tokens (the root included;
`S + 1` when k = 1), `C = k + (S - 1) k²` candidates, `V` vocabulary. All int32 but masks (bool) and
probabilities (float32). "Token t of a request" is its t-th token, counted from 0; its cache slot is
`table[request, t // page_size] * page_size + t % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

INT = torch.int32


@dataclass(frozen=True)
class _Bundle:
    @property
    def args(self) -> tuple[Any, ...]:
        """The fields, in order: the order in which ops take them."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Batch(_Bundle):
    """The requests of one batch, and where their tokens live.

    Attributes:
        requests: `[B]` row of `table` of each request. 0 is a padded request: its length counts as 0 whatever
            it says, its rows get slot 0 and position 0, and no row of the table changes for it.
        seq_lens: `[B]` tokens of each request.
        table: `[R, P]`, `RequestTable.block_table`. A token past the end of its row has slot 0, the sink.
        page_size: tokens per page.
    """

    requests: Tensor
    seq_lens: Tensor
    table: Tensor
    page_size: int

    @property
    def size(self) -> int:
        return self.requests.numel()

    def ints(self, *shape: int) -> Tensor:
        """int32 zeros beside the batch."""
        return torch.zeros(shape, dtype=INT, device=self.requests.device)


@dataclass(frozen=True)
class ExtendRows(_Bundle):
    """Rows of a batch that writes `query_lens[b]` tokens of request b, packed one request after another.

    Attributes:
        qo_indptr: `[B + 1]` where each request's rows begin; also flash-attention's `cu_seqlens_q`.
        slot_mapping, positions: `[T]`, T at least the sum of query_lens; rows past it get 0.
        block_table: `[B, Q]`, Q at most P: the used pages of each request; unused entries keep what they
            hold.
    """

    qo_indptr: Tensor
    slot_mapping: Tensor
    positions: Tensor
    block_table: Tensor

    @classmethod
    def allocate(cls, batch: Batch, num_rows: int) -> ExtendRows:
        size = batch.size
        return cls(
            qo_indptr=batch.ints(size + 1),
            slot_mapping=batch.ints(num_rows),
            positions=batch.ints(num_rows),
            block_table=batch.ints(size, batch.table.shape[1]),
        )


@dataclass(frozen=True)
class PagedKV(_Bundle):
    """FlashInfer's description of a paged cache.

    Attributes:
        kv_indptr: `[B + 1]` where each request's pages begin in kv_indices.
        kv_indices: `[capacity]` page ids; entries past `kv_indptr[B]` keep what they hold, pages past the
            capacity are dropped.
        last_page_len: `[B]` tokens in each request's last page, 0 without tokens.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    last_page_len: Tensor

    @classmethod
    def allocate(cls, batch: Batch, capacity: int) -> PagedKV:
        return cls(batch.ints(batch.size + 1), batch.ints(capacity), batch.ints(batch.size))


@dataclass(frozen=True)
class DraftSteps(_Bundle):
    """What the S - 1 draft forwards of a round need to know; forward s computes branches of depth s + 1.

    Attributes:
        positions: `[S-1, B*k]`, `seq_len + s`: every branch of a level is as deep as the others.
        slot_mapping: `[S-1, B*k]` slot of token `seq_len + s*k + j` for branch j, in the draft model's cache.
        seq_lens: `[S-1, B]`, `seq_len + (s+1)*k`: tokens in the draft cache after forward s, of which
            `Branches.mask` says who attends to whom.
        kv_indptr: `[S-1, B*k + 1]`, or None with kv_indices: where each branch's slots begin.
        kv_indices: `[S-1, capacity]` slots that each branch attends to: the prefix, then its own ancestors
            and itself (`seq_len + s + 1` in all). Slots, whatever the page size: attention sees pages of one
            token. Capacity B*k*(longest seq_len + S - 1) is enough; what does not fit is dropped.
    """

    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    kv_indptr: Tensor | None = None
    kv_indices: Tensor | None = None

    @classmethod
    def allocate(cls, batch: Batch, *, steps: int, topk: int, kv_capacity: int | None = None) -> DraftSteps:
        levels, rows = steps - 1, batch.size * topk
        with_kv = kv_capacity is not None
        return cls(
            positions=batch.ints(levels, rows),
            slot_mapping=batch.ints(levels, rows),
            seq_lens=batch.ints(levels, batch.size),
            kv_indptr=batch.ints(levels, rows + 1) if with_kv else None,
            kv_indices=batch.ints(levels, kv_capacity) if kv_capacity is not None else None,
        )


@dataclass(frozen=True)
class Branches(_Bundle):
    """The k branches that a draft with top-k > 1 keeps, and all candidates that it has seen.

    Attributes:
        scores: `[B, k]` float32: product of the probabilities along the branch. Best first.
        tokens: `[B, k]`: what the next draft forward computes.
        parents: `[B, k]` branch of the level before that each branch extends; 0 at level 0.
        hidden_index: `[B*k]` row of the forward before (`[B*k, H]`; at level 0 the selected rows of
            draft-extend, `[B, H]`) whose hidden state each branch continues.
        candidates: `[B, k]` index of each branch in the candidate list.
        all_scores: `[B, C]` float32, all_tokens, all_parents: `[B, C]`: candidate list. Level 0 has k entries
            with parent -1 (the root), each later level k² in the order of (branch, child).
        ancestors: `[B*k, S]` slots of the branch's ancestors from depth 1 down to itself, then 0.
        mask: `[B, k, (S-1)*k]`: which tokens `seq_len + i` of the draft cache a branch attends to, beside the
            prefix: its ancestors and itself.
    """

    scores: Tensor
    tokens: Tensor
    parents: Tensor
    hidden_index: Tensor
    candidates: Tensor
    all_scores: Tensor
    all_tokens: Tensor
    all_parents: Tensor
    ancestors: Tensor
    mask: Tensor

    @classmethod
    def allocate(cls, batch: Batch, *, steps: int, topk: int) -> Branches:
        size, total = batch.size, topk + (steps - 1) * topk * topk
        device = batch.requests.device
        return cls(
            scores=torch.zeros(size, topk, device=device),
            tokens=batch.ints(size, topk),
            parents=batch.ints(size, topk),
            hidden_index=batch.ints(size * topk),
            candidates=batch.ints(size, topk),
            all_scores=torch.zeros(size, total, device=device),
            all_tokens=batch.ints(size, total),
            all_parents=batch.ints(size, total),
            ancestors=batch.ints(size * topk, steps),
            mask=torch.zeros(size, topk, (steps - 1) * topk, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True)
class Tree(_Bundle):
    """Inputs of a verify forward: N rows per request, node 0 is the root, a parent comes before its children.

    Attributes:
        tokens, positions: `[B*N]`; the position is `seq_len + depth`.
        mask: `[B, N, N]`: row attends to column among the N draft tokens: ancestors and itself. The prefix
            needs no mask.
        retrieve_index: `[B, N]`, `b*N + n`, the row of a node.
        next_token: `[B, N]` first child of a node, -1 if it has none.
        next_sibling: `[B, N]` next child of the same parent, -1 if none is left.
        slot_mapping: `[B*N]` slots of tokens `seq_len .. seq_len + N - 1`.
        seq_lens: `[B]`, `seq_len + N`: tokens in the cache after the forward. Draft-extend's, too.
        qo_indptr: `[B + 1]`, `b*N`. Draft-extend's, too.
    """

    tokens: Tensor
    positions: Tensor
    mask: Tensor
    retrieve_index: Tensor
    next_token: Tensor
    next_sibling: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor

    @classmethod
    def allocate(cls, batch: Batch, *, nodes: int) -> Tree:
        size, device = batch.size, batch.requests.device
        return cls(
            tokens=batch.ints(size * nodes),
            positions=batch.ints(size * nodes),
            mask=torch.zeros(size, nodes, nodes, dtype=torch.bool, device=device),
            retrieve_index=batch.ints(size, nodes),
            next_token=batch.ints(size, nodes),
            next_sibling=batch.ints(size, nodes),
            slot_mapping=batch.ints(size * nodes),
            seq_lens=batch.ints(size),
            qo_indptr=batch.ints(size + 1),
        )


@dataclass(frozen=True)
class Accepted(_Bundle):
    """What a verify accepted, and the inputs of the draft-extend forward that follows.

    Attributes:
        accept_index: `[B, S+1]` verify rows `b*N + node` of the accepted path, root first, then -1.
        accept_len: `[B]` tokens that this round adds, bonus included: 1 to S+1; 0 for a padded request.
        out_tokens: `[B, S+1]` those tokens: accepted drafts, then the bonus, then -1.
        bonus: `[B]` the last of them: the root of the next round.
        new_seq_lens: `[B]`, `seq_len + accept_len`: tokens whose target K and V are right. May be the
            `seq_lens` that the op read.
        select_index: `[B]`, `b*N + accept_len - 1`: the draft-extend row whose output starts the next draft.
        input_ids: `[B*N]` draft-extend row r of a request gets the token after accepted node r:
            out_tokens[r]; 0 past accept_len, where nothing is read.
        hidden_index: `[B*N]` verify row whose hidden state goes with it; past accept_len the row itself.
        positions: `[B*N]`, `seq_len + r`.
        slot_mapping: `[B*N]` slots of tokens `seq_len + r` after the commit.
    """

    accept_index: Tensor
    accept_len: Tensor
    out_tokens: Tensor
    bonus: Tensor
    new_seq_lens: Tensor
    select_index: Tensor
    input_ids: Tensor
    hidden_index: Tensor
    positions: Tensor
    slot_mapping: Tensor

    @classmethod
    def allocate(cls, batch: Batch, *, nodes: int, steps: int) -> Accepted:
        size, rows = batch.size, batch.size * nodes
        return cls(
            accept_index=batch.ints(size, steps + 1),
            accept_len=batch.ints(size),
            out_tokens=batch.ints(size, steps + 1),
            bonus=batch.ints(size),
            new_seq_lens=batch.ints(size),
            select_index=batch.ints(size),
            input_ids=batch.ints(rows),
            hidden_index=batch.ints(rows),
            positions=batch.ints(rows),
            slot_mapping=batch.ints(rows),
        )
