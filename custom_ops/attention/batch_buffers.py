"""How a batch gets to the device: lengths in one copy, everything that follows from them in one launch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import AttentionError, CacheError
from ..kv_cache import SINK_SLOT, PagedKVCache, RequestTable
from ..metadata import Batch, ExtendRows, extend_batch
from .batch import AttentionBatch


class BatchBuffers:
    """The tensors of an `AttentionBatch`, which `fill` rewrites in place: what a full graph is captured with.

    Args:
        num_requests: of the batch, padded ones included.
        num_tokens: rows of the batch, padded ones included: in a full graph the capture size to which the
            call is padded, so each capture size needs buffers of its own.
        max_query_len: most rows of one request.
        max_seq_len: most tokens of one request; None = what the table has room for.
        uniform: every request has `max_query_len` rows.
        tree_width: columns of a tree mask, which the caller writes into `batch.tree_mask`; None = causal.

    Attributes:
        batch: pass it as `pg.forward_context(attention=...)`.
        positions: int32 `[num_tokens]`, each row's position in its request; 0 for padded rows.

    Raises:
        AttentionError: the table's pages are not the cache's.
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
    ) -> None:
        _check_table(cache, table)
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
        )

    def fill(
        self,
        slots: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        padded: bool = False,
    ) -> Tensor:
        """Describe these requests; those that `num_requests` has more are padding. Waits for nothing.

        Args:
            slots: request slots, whose pages are reserved; each at most once.
            query_lens: rows of each, 0 for none. Of uniform buffers: `max_query_len` each, and 0 only of
                padded requests (no tokens either) after all others.
            seq_lens: tokens of each with these rows.
            padded: the model will be called with all `num_tokens` rows, those of the padding included;
                otherwise with one row per row named here.

        Returns:
            `positions`, all `num_tokens` of them; a call that is not padded takes the first
            `sum(query_lens)`.

        Raises:
            AttentionError: lengths that cannot be, or more requests, rows or tokens than the buffers were
                made for. Nothing was changed.
            CacheError: a slot is not open, or has no pages for its tokens. Nothing was changed.
        """
        requests = _Requests(self._table, slots, query_lens, seq_lens)
        self._check_room(requests)
        return self._send(requests, padded)

    def _send(self, requests: _Requests, padded: bool) -> Tensor:
        self._table.flush()
        host = torch.zeros(self._given.shape, dtype=torch.int32, pin_memory=self._given.is_cuda)
        for row, values in zip(host, requests.columns, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.int32)
        self._given.copy_(host, non_blocking=True)
        extend_batch(self._request, self._query_lens, self._rows)
        self.batch.filled.append(self.batch.num_tokens if padded else sum(requests.query_lens))
        return self.positions

    def _check_room(self, requests: _Requests) -> None:
        batch, query_lens, seq_lens = self.batch, requests.query_lens, requests.seq_lens
        if len(query_lens) > batch.num_requests or sum(query_lens) > batch.num_tokens:
            what = f"{len(query_lens)} requests with {sum(query_lens)} rows"
            room = f"{batch.num_requests} requests and {batch.num_tokens} rows"
            raise AttentionError.bad_batch(what, f"make BatchBuffers for more than {room}")
        if any(rows > batch.max_query_len for rows in query_lens):
            what = f"a request of {max(query_lens)} rows"
            raise AttentionError.bad_batch(what, f"max_query_len is {batch.max_query_len}; raise it")
        if any(length > batch.max_seq_len for length in seq_lens):
            what = f"a request of {max(seq_lens)} tokens"
            raise AttentionError.bad_batch(what, f"max_seq_len is {batch.max_seq_len}; raise it")
        if batch.query_len is None:
            return
        # The i-th request of a uniform batch begins at row i * query_len, whatever stands before it.
        used = len(query_lens)
        while used and query_lens[used - 1] == 0 == seq_lens[used - 1]:
            used -= 1
        odd = next((index for index in range(used) if query_lens[index] != batch.query_len), None)
        if odd is not None:
            what = f"request {odd} has {query_lens[odd]} rows, each of uniform buffers {batch.query_len}"
            raise AttentionError.bad_batch(what, "make BatchBuffers without uniform=True for such batches")


class _Requests:
    """Requests of a batch, found to be possible.

    Attributes:
        columns: slots, seq_lens, query_lens.
    """

    def __init__(
        self, table: RequestTable, slots: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        self.slots = _integers("slots", slots)
        self.query_lens = _integers("query_lens", query_lens)
        self.seq_lens = _integers("seq_lens", seq_lens)
        self.columns = self.slots, self.seq_lens, self.query_lens
        counts = {len(column) for column in self.columns}
        if len(counts) > 1:
            names = "slots", "seq_lens", "query_lens"
            found = ", ".join(
                f"{len(column)} {name}" for column, name in zip(self.columns, names, strict=True)
            )
            raise AttentionError.bad_batch(found, "pass one of each per request")
        seen: set[int] = set()
        for slot, rows, length in zip(self.slots, self.query_lens, self.seq_lens, strict=True):
            if rows < 0 or length < rows:
                what = f"request slot {slot} has {rows} new rows and {length} tokens with them"
                remedy = "pass in query_lens the new rows, and in seq_lens the tokens before plus those"
                raise AttentionError.bad_batch(what, remedy)
            if slot == SINK_SLOT and length == 0:
                continue  # a padded request, written out
            if slot in seen:
                what = f"request slot {slot} is named twice"
                raise AttentionError.bad_batch(what, "pass all new rows of a request as one entry")
            seen.add(slot)
            capacity = table.capacity(slot)
            if length > capacity:
                raise CacheError.not_reserved(slot, length, capacity)


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [value if type(value) is int else operator.index(value) for value in values]
    except TypeError as error:
        what = f"{name} is {values!r:.80}"
        raise AttentionError.bad_batch(what, "pass a list of whole numbers, one per request") from error


def _check_table(cache: PagedKVCache, table: RequestTable) -> None:
    found = table.page_size, table.block_table.device
    if found != (cache.page_size, cache.device):
        what = f"a request table with pages of {found[0]} tokens on {found[1]}"
        what += f", and a KV cache with pages of {cache.page_size} on {cache.device}"
    elif table.total_pages + 1 > cache.num_pages:
        what = f"a request table of {table.total_pages + 1} pages, and a KV cache of {cache.num_pages}"
    else:
        return
    raise AttentionError.bad_batch(what, "make the table with RequestTable.for_cache(cache, ...)")


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

    Raises:
        AttentionError, CacheError: as `BatchBuffers.fill`; or there is no row at all.
    """
    requests = _Requests(table, slots, query_lens, seq_lens)
    if not any(requests.query_lens):
        what = f"{len(requests.slots)} requests and no row"
        raise AttentionError.bad_batch(what, "pass at least one request with a new row, or skip the forward")
    buffers = BatchBuffers(
        cache,
        table,
        num_requests=len(requests.slots),
        num_tokens=sum(requests.query_lens),
        max_query_len=max(requests.query_lens),
        max_seq_len=max(requests.seq_lens),
    )
    positions = buffers._send(requests, padded=False)
    # Lengths on the host hold for one filling, so they belong to a batch whose buffers nobody can fill again.
    batch = replace(
        buffers.batch, host_query_lens=tuple(requests.query_lens), host_seq_lens=tuple(requests.seq_lens)
    )
    batch.filled.append(batch.num_tokens)
    return batch, positions
