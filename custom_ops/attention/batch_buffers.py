"""How a batch gets to the device: lengths in one copy, everything that follows from them in one launch."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import AttentionError, CacheError
from ..kv_cache import NULL_SLOT, PagedKVCache, RequestTable, device_columns, overwrite_ints
from ..metadata import Batch, ExtendRows, extend_batch
from .batch import AttentionBatch
from .served_models import check_positions


class BatchBuffers:
    """The tensors of an `AttentionBatch`, which `fill` rewrites in place, as full graphs need it.

    Until then it is a batch of padding, without requests.

    Args:
        num_requests: of the batch, padded ones included.
        num_tokens: rows of the batch, padded ones included. In a full graph that is the capture size to which
            the call is padded, so each capture size needs buffers of its own.
        max_query_len: most rows of one request.
        max_seq_len: most tokens of one request; None = as many as a row of the table holds.
        uniform: every request has `max_query_len` rows.

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
    ) -> None:
        _check_table(cache, table)
        self._table = table
        aligned = -(-num_requests // 4) * 4  # each row of `_given` begins at a multiple of 16 bytes
        self._given = torch.zeros(3, aligned, dtype=torch.int32, device=cache.device)
        requests, seq_lens, self._query_lens = self._given[:, :num_requests]
        self._request = Batch(requests, seq_lens, table.block_table, cache.page_size)
        self._rows = ExtendRows.allocate(self._request, num_tokens)
        self.positions = self._rows.positions
        self.batch = AttentionBatch(
            cache,
            block_table=self._rows.block_table,
            seq_lens=seq_lens,
            qo_indptr=self._rows.qo_indptr,
            slot_mapping=self._rows.slot_mapping,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len or table.max_pages * cache.page_size,
            query_len=max_query_len if uniform else None,
        )

    def compile_ahead(self) -> None:
        """Have compiled, in another thread, the kernel that `fill` launches."""
        extend_batch.compile_ahead(self._request, self._query_lens, self._rows)

    def fill(
        self,
        slots: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        *,
        padded: bool = False,
    ) -> Tensor:
        """Describe these requests; the others of `num_requests` become padding. Waits for nothing.

        Args:
            slots: request slots with reserved pages, each at most once.
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
        self._check_fits(requests)
        self._table.flush()
        room = self._given.shape[1] - len(requests.slots)
        overwrite_ints(self._given, [[*values, *[0] * room] for values in requests.columns.values()])
        extend_batch(self._request, self._query_lens, self._rows)
        self.batch.expected_tokens = self.batch.num_tokens if padded else sum(requests.query_lens)
        return self.positions

    def _check_fits(self, requests: _Requests) -> None:
        batch, query_lens, seq_lens = self.batch, requests.query_lens, requests.seq_lens
        wanted, given = (len(query_lens), sum(query_lens)), (batch.num_requests, batch.num_tokens)
        if wanted[0] > given[0] or wanted[1] > given[1]:
            raise AttentionError.buffers_too_small(wanted, given)
        if max(query_lens, default=0) > batch.max_query_len:
            raise AttentionError.above_bound(
                "query_lens", max(query_lens), "max_query_len", batch.max_query_len
            )
        longest = max(seq_lens, default=0)
        if longest > batch.max_seq_len:
            raise AttentionError.above_bound("seq_lens", longest, "max_seq_len", batch.max_seq_len)
        check_positions(batch.kv_cache.rope_limit, longest)
        if batch.query_len is None:
            return
        # The i-th request of a uniform batch begins at row i * query_len, whatever stands before it.
        used = len(query_lens)
        while used and query_lens[used - 1] == 0 == seq_lens[used - 1]:
            used -= 1
        for index, rows in enumerate(query_lens[:used]):
            if rows != batch.query_len:
                raise AttentionError.not_uniform(index, rows, batch.query_len)


class _Requests:
    """Requests of a batch, found to be possible.

    Attributes:
        columns: slots, seq_lens, query_lens, in the order in which the device gets them.

    Raises:
        AttentionError, CacheError: as `BatchBuffers.fill`.
    """

    def __init__(
        self, table: RequestTable, slots: Sequence[int], query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        self.slots = _integers("slots", slots)
        self.query_lens = _integers("query_lens", query_lens)
        self.seq_lens = _integers("seq_lens", seq_lens)
        self.columns = {"slots": self.slots, "seq_lens": self.seq_lens, "query_lens": self.query_lens}
        counts = {name: len(values) for name, values in self.columns.items()}
        if len(set(counts.values())) > 1:
            raise AttentionError.unequal_counts(counts)
        seen: set[int] = set()
        for slot, length, rows in zip(*self.columns.values(), strict=True):
            if rows < 0 or length < rows:
                raise AttentionError.impossible_lengths(slot, rows, length)
            if slot == NULL_SLOT and length == 0:
                continue  # a padded request, written out
            if slot in seen:
                raise AttentionError.repeated_slot(slot)
            seen.add(slot)
            capacity = table.capacity(slot)
            if length > capacity:
                raise CacheError.not_reserved(slot, length, capacity)


def _integers(name: str, values: Sequence[int]) -> list[int]:
    try:
        return [value if type(value) is int else operator.index(value) for value in values]
    except TypeError as error:
        raise AttentionError.not_integers(name, values) from error


def _check_table(cache: PagedKVCache, table: RequestTable) -> None:
    pages, wanted = (table.page_size, table.block_table.device), (cache.page_size, cache.device)
    if pages != wanted:
        raise AttentionError.wrong_pages(pages, wanted)
    if table.total_pages + 1 > cache.num_pages:
        raise AttentionError.table_too_large(table.total_pages + 1, cache.num_pages)


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
    _check_table(cache, table)
    requests = _Requests(table, slots, query_lens, seq_lens)
    if not any(requests.query_lens):
        raise AttentionError.no_rows(len(requests.slots))
    check_positions(cache.rope_limit, max(requests.seq_lens))
    table.flush()
    owners, lengths, rows_of_each = device_columns([*requests.columns.values()], cache.device)
    request = Batch(owners, lengths, table.block_table, cache.page_size)
    rows = ExtendRows.unwritten(request, sum(requests.query_lens))
    extend_batch(request, rows_of_each, rows)
    batch = AttentionBatch(
        cache,
        block_table=rows.block_table,
        seq_lens=lengths,
        qo_indptr=rows.qo_indptr,
        slot_mapping=rows.slot_mapping,
        max_query_len=max(requests.query_lens),
        max_seq_len=max(requests.seq_lens),
        # Lengths on the host hold for one filling, so only a batch that is not filled again has them.
        host_query_lens=tuple(requests.query_lens),
        host_seq_lens=tuple(requests.seq_lens),
    )
    batch.expected_tokens = batch.num_tokens
    return batch, rows.positions
