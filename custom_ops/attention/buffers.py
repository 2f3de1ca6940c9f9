"""How a batch gets to the device: lengths in one copy, everything that follows from them in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_cache import PagedKVCache, RequestTable
from ..metadata import Batch, ExtendRows, extend_batch
from .batch import AttentionBatch


class BatchBuffers:
    """The tensors of an `AttentionBatch`, which `fill` rewrites in place: what a full graph is captured with.

    Args:
        num_requests: of the batch, padded ones included.
        num_tokens: rows of the batch, padded ones included.
        max_query_len: most rows of one request.
        max_seq_len: most tokens of one request; None = what the table has room for.
        uniform: every request has `max_query_len` rows.
        tree_width: columns of a tree mask, which the caller writes into `batch.tree_mask`; None = causal.

    Attributes:
        batch: pass it as `pg.forward_context(attention=...)`.
        positions: int32 `[num_tokens]`, each row's position in its request; 0 for padded rows.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        table: RequestTable,
        *,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int | None = None,
        uniform: bool = False,
        tree_width: int | None = None,
        host_query_lens: tuple[int, ...] | None = None,
        host_seq_lens: tuple[int, ...] | None = None,
    ) -> None:
        device = cache.device
        self._table = table
        aligned = -(-num_requests // 4) * 4  # each row of `_given` begins at a multiple of 16 bytes
        self._given = torch.zeros(3, aligned, dtype=torch.int32, device=device)
        requests, seq_lens, self._query_lens = self._given[:, :num_requests]
        self._request = Batch(requests, seq_lens, table.block_table, cache.page_size)
        self._rows = ExtendRows.allocate(self._request, num_tokens)
        self.positions = self._rows.positions
        mask = None
        if tree_width is not None:
            shape = num_requests, max_query_len, tree_width
            mask = torch.zeros(shape, dtype=torch.bool, device=device)
        self.batch = AttentionBatch(
            cache,
            block_table=self._rows.block_table,
            seq_lens=seq_lens,
            qo_indptr=self._rows.qo_indptr,
            slot_mapping=self._rows.slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len or table.max_pages * cache.page_size,
            query_len=max_query_len if uniform else None,
            tree_mask=mask,
            host_query_lens=host_query_lens,
            host_seq_lens=host_seq_lens,
        )

    def fill(self, slots: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]) -> Tensor:
        """Describe these requests; those that `num_requests` has more are padding. Waits for nothing.

        Args:
            slots: request slots, whose pages are reserved.
            query_lens: rows of each.
            seq_lens: tokens of each with these rows.

        Returns:
            `positions`.

        Raises:
            AttentionError: more requests, rows or tokens than the buffers were made for.
        """
        batch = self.batch
        if len(slots) > batch.num_requests or sum(query_lens) > batch.num_tokens:
            what = f"{len(slots)} requests with {sum(query_lens)} rows"
            room = f"{batch.num_requests} requests and {batch.num_tokens} rows"
            raise AttentionError.bad_batch(what, f"make BatchBuffers for more than {room}")
        if any(rows > batch.max_query_len for rows in query_lens):
            what = f"a request of {max(query_lens)} rows"
            raise AttentionError.bad_batch(what, f"max_query_len is {batch.max_query_len}; raise it")
        if any(length > batch.max_seq_len for length in seq_lens):
            what = f"a request of {max(seq_lens)} tokens"
            raise AttentionError.bad_batch(what, f"max_seq_len is {batch.max_seq_len}; raise it")
        self._table.flush()
        host = torch.zeros(self._given.shape, dtype=torch.int32, pin_memory=self._given.is_cuda)
        for row, values in zip(host, (slots, seq_lens, query_lens), strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.int32)
        self._given.copy_(host, non_blocking=True)
        extend_batch(self._request, self._query_lens, self._rows)
        batch.filled.append(sum(query_lens))
        return self.positions


def make_batch(
    cache: PagedKVCache,
    table: RequestTable,
    slots: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> tuple[AttentionBatch, Tensor]:
    """A batch of exactly these requests, for forwards that are no full graph; see `BatchBuffers.fill`.

    Returns:
        (batch, positions int32 `[sum(query_lens)]`).
    """
    buffers = BatchBuffers(
        cache,
        table,
        num_requests=len(slots),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        host_query_lens=tuple(query_lens),
        host_seq_lens=tuple(seq_lens),
    )
    return buffers.batch, buffers.fill(slots, query_lens, seq_lens)
