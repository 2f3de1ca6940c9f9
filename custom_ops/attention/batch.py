"""AttentionBatch: what one batch's attention calls read from the forward context.

Note [Three parts]
The work around an attention call is of three kinds, and an implementation says where each of its steps
belongs:

1. once per batch, on the host: build an `AttentionBatch` (`RequestTable.flush`, lengths to the device).
2. once per batch, outside of any graph: `Mode.prepare`. Choosing grids and workspaces; FlashInfer's plan.
3. in every call, inside a graph where there is one: `Mode.attend`. Device only; no `.item()`, no `.cpu()`.

What a captured call reads has to stay where it is: a full graph is captured with one batch object, and
replayed under the same object, whose tensors the caller (or a metadata kernel) writes in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..errors import AttentionError
from ..kv_cache import PagedKVCache
from .call import AttentionCall, Traits


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The requests of one batch: their tokens stand one request after another, one row per token.

    Attributes:
        kv_cache: where K and V are read and written.
        block_table: int32 `[requests, max_pages]`, the pages of each request in order.
        seq_lens: int32 `[requests]`, tokens of each request with this batch's; 0 for a padded request.
        qo_indptr: int32 `[requests + 1]`, the first row of each request, then the number of live rows.
        slot_mapping: int32 `[num_tokens]`, the cache slot to which each row's K and V go; padded rows name
            the sink (slot 0).
        max_query_len: upper bound of the rows of one request.
        max_seq_len: upper bound of `seq_lens`, in a captured graph for all its replays.
        query_len: where every request has the same number of rows, padded ones included: that number.
        tree_mask: bool `[requests, max_query_len, width]`: which of a request's last `width` tokens each of
            its rows sees (its own row and its ancestors); all before them are seen. None = causal.
        host_query_lens, host_seq_lens: the same lengths on the host, for implementations that plan there.
        num_tokens: rows that the batch describes, padded requests' included.
        filled: at most one number: with how many tokens the model has to be called, where the host knows it
            (`BatchBuffers.fill`).

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
    filled: deque[int] = field(default_factory=lambda: deque(maxlen=1), init=False, repr=False)
    _runs: dict[tuple[Traits, bool], Callable[[AttentionCall], None]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", self.slot_mapping.shape[0])
        for what, remedy in self._faults():
            raise AttentionError.bad_batch(what, remedy)

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]

    def run(self, call: AttentionCall, *, captured: bool) -> None:
        """Serve one attention call with the implementation that it asks for.

        Args:
            captured: the call is, or will be, part of a graph.
        """
        if self.num_tokens not in call.rows:
            raise AttentionError.wrong_rows(call.rows[1], self.num_tokens)
        # In a full graph that is being made, padding included, the rows say nothing: the core has asked
        # check_tokens. Everywhere else they do.
        if self.filled and self.filled[-1] != call.rows[1] and not (captured and call.live is None):
            raise AttentionError.wrong_rows(call.rows[1], self.filled[-1])
        if not 0 <= call.layer < self.kv_cache.num_layers:  # layers share their traits, and so their step
            raise AttentionError.wrong_layer(call.layer, self.kv_cache.num_layers)
        attend = self._runs.get((call.traits, captured))
        if attend is None:
            attend = self._choose(call, captured)
        attend(call)

    def check_tokens(self, num_tokens: int) -> None:
        """Refuse a forward of another number of tokens than the batch was last filled for.

        Called by the core before every replay of a full graph, which runs none of this file.
        """
        if self.filled and num_tokens != self.filled[-1]:
            raise AttentionError.wrong_rows(num_tokens, self.filled[-1])

    def _choose(self, call: AttentionCall, captured: bool) -> Callable[[AttentionCall], None]:
        from .implementations import choose

        mode = choose(call, self, captured)
        attend = partial(mode.attend, self, mode.prepare(self, call))
        self._runs[call.traits, captured] = attend
        return attend

    def _faults(self) -> list[tuple[str, str]]:
        requests = self.seq_lens.shape[0]
        expected = {
            "block_table": (requests, self.block_table.shape[-1]),
            "seq_lens": (requests,),
            "qo_indptr": (requests + 1,),
            "slot_mapping": (self.slot_mapping.shape[0],),
        }
        faults = []
        for name, shape in expected.items():
            tensor = getattr(self, name)
            if tensor.dtype != torch.int32 or tuple(tensor.shape) != shape:
                found = f"{name} is {tensor.dtype} {tuple(tensor.shape)}"
                faults.append((found, f"pass int32 {shape}, as seq_lens names {requests} requests"))
        if self.query_len is not None and self.num_tokens != requests * self.query_len:
            what = f"{requests} requests of {self.query_len} rows each, and {self.num_tokens} slots"
            faults.append((what, "pass one slot per row, padded requests' rows included"))
        if self.query_len is not None and self.max_query_len != self.query_len:
            faults.append(
                (f"query_len={self.query_len}, max_query_len={self.max_query_len}", "make them equal")
            )
        faults += self._host_faults(requests)
        if self.tree_mask is not None and not _mask_fits(self.tree_mask, requests, self.max_query_len):
            what = f"tree_mask is {self.tree_mask.dtype} {tuple(self.tree_mask.shape)}"
            rows = self.max_query_len
            faults.append((what, f"pass bool [{requests}, {rows}, width], width at least {rows}"))
        return faults

    def _host_faults(self, requests: int) -> list[tuple[str, str]]:
        """Planners believe the lengths on the host, kernels those on the device: they have to agree."""
        faults = []
        bounds = {
            "host_query_lens": (self.host_query_lens, "max_query_len", self.max_query_len),
            "host_seq_lens": (self.host_seq_lens, "max_seq_len", self.max_seq_len),
        }
        for name, (lengths, bound, most) in bounds.items():
            if lengths is None:
                continue
            if len(lengths) != requests:
                faults.append((f"{len(lengths)} {name} for {requests} requests", "pass one per request"))
            if max(lengths, default=0) > most:
                faults.append((f"{name} up to {max(lengths)}, {bound}={most}", f"raise {bound}"))
        rows = sum(self.host_query_lens or ())
        if rows > self.num_tokens:
            what = f"host_query_lens of {rows} rows, and {self.num_tokens} slots"
            faults.append((what, "pass one slot per row"))
        return faults


def _mask_fits(mask: Tensor, requests: int, rows: int) -> bool:
    return (
        mask.dtype == torch.bool
        and mask.dim() == 3
        and mask.shape[:2] == (requests, rows)
        and mask.shape[2] >= rows
    )
