"""What the metadata ops read and write: frozen bundles of static buffers.

A bundle is made once, for the largest batch of a CUDA graph. Every launch overwrites it.

Letters, here and in every docstring: `B` requests, `k` top-k, `S` steps, `N` draft tokens (the root included;
`S + 1` when k = 1), `C = k + (S - 1) k²` candidates, `V` vocabulary, `R` rows and `P` columns of the block
table, `T` rows of a batch, `Q` columns of its own block table. Shapes and dtypes stand beside the fields.
"Token t of a request" is its t-th token, counted from 0. Its slot in the cache is
`table[request, t // page_size] * page_size + t % page_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from .op_signature import Bundle, bools, columns, floats, ints


@dataclass(frozen=True)
class Batch(Bundle):
    """The requests of one batch, and where their tokens live.

    Attributes:
        requests: row of `table` of each request. 0 is a padded request: its length counts as 0 whatever
            `seq_lens` says, its rows get slot 0 and position 0, and its row of the table never changes.
        seq_lens: tokens of each request.
        table: `RequestTable.block_table`. A token past the end of its row has slot 0, in the null page.
        page_size: tokens per page.
    """

    requests: Annotated[Tensor, ints("B")]
    seq_lens: Annotated[Tensor, ints("B")]
    table: Annotated[Tensor, ints("R", "P")]
    page_size: int

    @property
    def size(self) -> int:
        return self.requests.numel()

    @property
    def device(self) -> torch.device:
        return self.requests.device

    def ints(self, *shape: int) -> Tensor:
        """int32 zeros beside the batch."""
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def live_lens(self) -> Tensor:
        """int32 `[B]`: a copy of the lengths in which padded requests have none."""
        return torch.where(self.requests != 0, self.seq_lens, 0)

    def slots_of(self, tokens: Tensor) -> Tensor:
        """Slots of int32 `tokens [B, n]`: 0 for padded requests and for tokens outside of the row."""
        page = tokens.div(self.page_size, rounding_mode="floor")
        width = self.table.shape[1]
        inside = (self.requests != 0)[:, None] & (page >= 0) & (page < width)
        pages = self.table[self.requests.long()].gather(1, page.clamp(0, width - 1).long())
        return torch.where(inside, pages * self.page_size + tokens % self.page_size, 0)


@dataclass(frozen=True)
class RequestState(Bundle):
    """What requests carry from round to round, by their row of the table. They may be columns of a matrix.

    Attributes:
        seq_lens: tokens whose target K and V are right.
        root_tokens: the token after them, chosen and not yet computed.
    """

    seq_lens: Annotated[Tensor, columns("R")]
    root_tokens: Annotated[Tensor, columns("R")]


@dataclass(frozen=True)
class Gathered(Bundle):
    """`RequestState` and pages of the requests of one batch."""

    seq_lens: Annotated[Tensor, ints("B")]
    root_tokens: Annotated[Tensor, ints("B")]
    block_table: Annotated[Tensor, ints("B", "P")]


@dataclass(frozen=True)
class ExtendRows(Bundle):
    """Rows of a batch that writes `query_lens[b]` tokens of request b, packed one request after another.

    Attributes:
        qo_indptr: where each request's rows begin; also flash-attention's `cu_seqlens_q`.
        slot_mapping, positions: of T rows. Rows past the sum of query_lens get 0.
        block_table: the used pages of each request; unused entries keep what they hold. Q is at most P.
    """

    qo_indptr: Annotated[Tensor, ints("B+1")]
    slot_mapping: Annotated[Tensor, ints("T")]
    positions: Annotated[Tensor, ints("T")]
    block_table: Annotated[Tensor, ints("B", "Q")]

    @classmethod
    def allocate(cls, batch: Batch, num_rows: int) -> ExtendRows:
        return cls.zeros(batch.device, B=batch.size, T=num_rows, Q=batch.table.shape[1])

    @classmethod
    def unwritten(cls, batch: Batch, num_rows: int) -> ExtendRows:
        """For `extend_batch` to write: only what it leaves alone is set, in one launch."""
        (requests, pages), device = (batch.size, batch.table.shape[1]), batch.device
        indptr, slots, positions = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (requests + 1, num_rows, num_rows)
        )
        table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        return cls(indptr, slots, positions, table)


@dataclass(frozen=True)
class DraftSteps(Bundle):
    """What the S - 1 draft forwards of a round need to know; forward s computes branches of depth s + 1.

    Attributes:
        positions: `seq_len + s`: all branches of a level have the same depth.
        slot_mapping: slot of token `seq_len + s*k + j` for branch j, in the draft model's cache.
        seq_lens: `seq_len + (s+1)*k`: tokens in the draft cache after forward s. `Branches.mask` says which
            of them a branch attends to.
    """

    positions: Annotated[Tensor, ints("S-1", "B*k")]
    slot_mapping: Annotated[Tensor, ints("S-1", "B*k")]
    seq_lens: Annotated[Tensor, ints("S-1", "B")]

    @classmethod
    def allocate(cls, batch: Batch, *, steps: int, topk: int) -> DraftSteps:
        return cls.zeros(batch.device, B=batch.size, S=steps, k=topk)


@dataclass(frozen=True)
class Branches(Bundle):
    """The k branches that a draft with top-k > 1 keeps, and all candidates that it has seen.

    Attributes:
        scores: product of the probabilities along the branch. Best first.
        tokens: what the next draft forward computes.
        hidden_index: row of the forward before (`[B*k, H]`; at level 0 the selected rows of draft-extend,
            `[B, H]`). The branch continues the hidden state of that row.
        candidates: index of each branch in the candidate list.
        all_scores, all_tokens, all_parents: the candidate list. Level 0 has k entries with parent -1 (the
            root). Each later level has k² entries in the order of (branch, child).
        mask: the tokens `seq_len + i` of the draft cache that a branch attends to besides the prefix: its
            ancestors and itself.
    """

    scores: Annotated[Tensor, floats("B", "k")]
    tokens: Annotated[Tensor, ints("B", "k")]
    hidden_index: Annotated[Tensor, ints("B*k")]
    candidates: Annotated[Tensor, ints("B", "k")]
    all_scores: Annotated[Tensor, floats("B", "C")]
    all_tokens: Annotated[Tensor, ints("B", "C")]
    all_parents: Annotated[Tensor, ints("B", "C")]
    mask: Annotated[Tensor, bools("B", "k", "(S-1)*k")]

    @classmethod
    def allocate(cls, batch: Batch, *, steps: int, topk: int) -> Branches:
        return cls.zeros(batch.device, B=batch.size, S=steps, k=topk, C=num_candidates(steps, topk))


def num_candidates(steps: int, topk: int) -> int:
    return topk + (steps - 1) * topk * topk


@dataclass(frozen=True)
class Tree(Bundle):
    """Inputs of a verify forward: N rows per request, node 0 is the root, a parent comes before its children.

    Attributes:
        tokens: the root, then the draft tokens.
        positions: `seq_len + depth`, or `max_position` if that is less.
        mask: row n attends to column m among the N draft tokens: its ancestors and itself. The prefix needs
            no mask.
        slot_mapping: slots of tokens `seq_len .. seq_len + N - 1`.
        seq_lens: `seq_len + N`: tokens in the cache after the forward. Draft-extend uses it, too.
        qo_indptr: `b*N`. Draft-extend uses it, too.
    """

    tokens: Annotated[Tensor, ints("B*N")]
    positions: Annotated[Tensor, ints("B*N")]
    mask: Annotated[Tensor, bools("B", "N", "N")]
    slot_mapping: Annotated[Tensor, ints("B*N")]
    seq_lens: Annotated[Tensor, ints("B")]
    qo_indptr: Annotated[Tensor, ints("B+1")]

    @classmethod
    def allocate(cls, batch: Batch, *, nodes: int) -> Tree:
        return cls.zeros(batch.device, B=batch.size, N=nodes)


@dataclass(frozen=True)
class Accepted(Bundle):
    """What a verify accepted, and the inputs of the draft-extend forward that follows.

    Attributes:
        accept_length: tokens that this round adds, bonus included: 1 to S+1; 0 for a padded request.
        out_tokens: those tokens: accepted drafts, then the bonus, then -1.
        bonus: the last of them: the root of the next round.
        new_seq_lens: `seq_len + accept_length`: tokens whose target K and V are right. May be the `seq_lens`
            that the op read.
        select_index: `b*N + accept_length - 1`: the draft-extend row whose output starts the next draft.
        input_ids: draft-extend row r of a request gets the token after accepted node r, which is
            out_tokens[r]; 0 past accept_length, where nothing is read.
        hidden_index: verify row whose hidden state goes with it; past accept_length the row itself.
        positions: `seq_len + r`.
        slot_mapping: slots of tokens `seq_len + r` after the commit.
    """

    accept_length: Annotated[Tensor, ints("B")]
    out_tokens: Annotated[Tensor, ints("B", "S+1")]
    bonus: Annotated[Tensor, ints("B")]
    new_seq_lens: Annotated[Tensor, ints("B")]
    select_index: Annotated[Tensor, ints("B")]
    input_ids: Annotated[Tensor, ints("B*N")]
    hidden_index: Annotated[Tensor, ints("B*N")]
    positions: Annotated[Tensor, ints("B*N")]
    slot_mapping: Annotated[Tensor, ints("B*N")]

    @classmethod
    def allocate(cls, batch: Batch, *, nodes: int, steps: int) -> Accepted:
        return cls.zeros(batch.device, B=batch.size, N=nodes, S=steps)
