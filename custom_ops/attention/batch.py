"""AttentionBatch: what one batch's attention calls read from the forward context.

The work around an attention call is of three kinds, and every implementation says which of its steps belongs
where:

1. Once per batch, on the host: build an `AttentionBatch` (`RequestTable.flush`, lengths to the device).
2. Once per batch, outside of any graph: `Mode.prepare` chooses grids and workspaces. FlashInfer plans here.
3. In every call, inside a graph where there is one: `Mode.attend`. It runs on the device alone, without
   `.item()` and `.cpu()`.

What a captured call reads has to stay where it is. A full graph is captured with one batch object and
replayed under the same object; the caller (or a metadata kernel) writes its tensors in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_cache import PagedKVCache
from .call import AttentionCall, Traits


@dataclass(eq=False)
class AttentionBatch:
    """The requests of one batch: their tokens stand one request after another, one row per token.

    Attributes:
        kv_cache: where K and V are read and written.
        block_table: int32 `[requests, max_pages]`, the pages of each request in order.
        seq_lens: int32 `[requests]`, tokens of each request with this batch's; 0 for a padded request.
        qo_indptr: int32 `[requests + 1]`, the first row of each request, then the number of live rows.
        slot_mapping: int32 `[num_tokens]`, the cache slot to which each row's K and V go; padded rows name
            the null slot (0). Or int64, as vLLM has it: K and V of rows with negative slots go nowhere, and
            no row of a request may see them.
        max_query_len: upper bound of the rows of one request.
        max_seq_len: upper bound of `seq_lens`, in a captured graph for all its replays.
        query_len: where every request has the same number of rows, padded ones included: that number.
        tree_mask: bool `[requests, max_query_len, width]`: which of a request's last `width` tokens each of
            its rows sees (its own row and its ancestors); all before them are seen. None = causal.
        host_query_lens, host_seq_lens: the same lengths on the host, for implementations that plan there.
        num_tokens: rows that the batch describes, padded requests' included.
        parts: batches whose rows, one after another, are this one's; each may be served alone. See `joined`.
        longest: with parts, roughly the tokens of the longest request of the first one.
        expected_tokens: with how many tokens the model has to be called. `BatchBuffers.fill` sets it; None
            where only the device knows.
        served_by: the step that `implementations.serve` has prepared for equal calls, captured or not.

    Raises:
        AttentionError: shapes or dtypes that cannot belong together.
    """

    kv_cache: PagedKVCache
    block_table: Tensor
    seq_lens: Tensor
    qo_indptr: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int
    query_len: int | None = None
    tree_mask: Tensor | None = None
    host_query_lens: tuple[int, ...] | None = None
    host_seq_lens: tuple[int, ...] | None = None
    num_tokens: int = field(init=False)
    parts: tuple[AttentionBatch, ...] = field(default=(), init=False, repr=False)
    longest: int = field(default=0, init=False, repr=False)
    expected_tokens: int | None = field(default=None, init=False, repr=False)
    served_by: dict[tuple[Traits, bool], Callable[[AttentionCall], None]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self.num_tokens = self.slot_mapping.shape[0]
        self._check_tensors()
        if self.query_len is not None:
            if self.num_tokens != self.num_requests * self.query_len:
                raise AttentionError.not_rectangular(self.num_requests, self.query_len, self.num_tokens)
            if self.max_query_len != self.query_len:
                raise AttentionError.unequal_query_lens(self.query_len, self.max_query_len)
        self._check_host_lengths()

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    def over(self, kv_cache: PagedKVCache) -> AttentionBatch:
        """The same requests over another cache of the same pages: a draft's beside its target's."""
        made = replace(self, kv_cache=kv_cache)
        made.parts, made.longest = tuple(part.over(kv_cache) for part in self.parts), self.longest
        made.expected_tokens = self.expected_tokens
        return made

    def unwritten_in_forward(self) -> tuple[Tensor, ...]:
        """What no op of a forward under this batch writes unseen; graphs of it read that early."""
        return self.block_table, self.seq_lens, self.qo_indptr, self.slot_mapping

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse a forward of another number of tokens than the batch was last filled for.

        The core calls this before every replay of a full graph, which runs none of this package's code.

        Raises:
            AttentionError: the numbers differ.
        """
        if self.expected_tokens is not None and num_tokens != self.expected_tokens:
            raise AttentionError.wrong_rows(num_tokens, self.expected_tokens)

    def _check_tensors(self) -> None:
        requests, rows, mask = self.num_requests, self.max_query_len, self.tree_mask
        shapes = {
            "block_table": (requests, self.block_table.shape[-1]),
            "seq_lens": (requests,),
            "qo_indptr": (requests + 1,),
            "slot_mapping": (self.num_tokens,),
        }
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            wide = name == "slot_mapping" and tensor.dtype == torch.int64
            if not (wide or tensor.dtype == torch.int32) or tuple(tensor.shape) != shape:
                raise AttentionError.wrong_tensor(name, tensor, shape, requests)
        if mask is None:
            return
        shape = (requests, rows, max(mask.shape[-1], rows))
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise AttentionError.wrong_tree_mask(mask, requests, rows)

    def _check_host_lengths(self) -> None:
        """Planners believe the lengths on the host, kernels those on the device: they have to agree."""
        bounds = {"host_query_lens": "max_query_len", "host_seq_lens": "max_seq_len"}
        for name, bound in bounds.items():
            lengths, limit = getattr(self, name), getattr(self, bound)
            if lengths is None:
                continue
            if len(lengths) != self.num_requests:
                raise AttentionError.wrong_count(name, len(lengths), self.num_requests)
            if max(lengths, default=0) > limit:
                raise AttentionError.above_bound(name, max(lengths), bound, limit)
        rows = sum(self.host_query_lens or ())
        if rows > self.num_tokens:
            raise AttentionError.too_few_slots(rows, self.num_tokens)
