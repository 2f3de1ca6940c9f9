"""What implementations of attention declare: the modes in which they serve batches, and their limits."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .batch import AttentionBatch
from .call import AttentionCall


def _nothing(batch: AttentionBatch, call: AttentionCall) -> None:
    pass


@dataclass(frozen=True)
class Mode:
    """One way in which an implementation serves batches. None stands for any, everywhere below.

    Attributes:
        attend: `(batch, state, call)`, writes `call.out`, and K and V into the cache.
        prepare: `(batch, call) -> state`, once per batch, outside of graphs.
        compile_ahead: `(batch, state, call)`, has compiled in other threads what `attend` will launch.
        devices, dtypes, head_dims, page_sizes: what it has kernels for.
        capabilities: major compute capabilities of the GPUs that it runs on.
        max_group: most query heads per KV head.
        max_query_len: most rows of one request.
        tree_mask, window, softcap: it can do these.
        pages_apart: it reads and writes pages that do not lie side by side.
        uniform: it needs the same number of rows from every request.
        capturable: all of `attend` runs on the device and may be part of a graph.
        host_lengths: `prepare` needs the lengths on the host.
        limits: `(call, batch) -> reason or None`, whatever else it cannot do.
    """

    attend: Callable[[AttentionBatch, Any, AttentionCall], None]
    prepare: Callable[[AttentionBatch, AttentionCall], Any] = _nothing
    compile_ahead: Callable[[AttentionBatch, Any, AttentionCall], None] | None = None
    devices: Container[str] | None = None
    capabilities: Container[int] | None = None
    dtypes: Container[torch.dtype] | None = None
    head_dims: Container[int] | None = None
    page_sizes: Container[int] | None = None
    max_group: int | None = None
    max_query_len: int | None = None
    tree_mask: bool = False
    window: bool = False
    softcap: bool = False
    pages_apart: bool = False
    uniform: bool = False
    capturable: bool = False
    host_lengths: bool = False
    limits: Callable[[AttentionCall, AttentionBatch], str | None] | None = None

    def reason(self, call: AttentionCall, batch: AttentionBatch, captured: bool) -> str | None:
        """Why this mode cannot serve the call; None when it can."""
        return next(self.reasons(call, batch, captured), None)

    def reasons(self, call: AttentionCall, batch: AttentionBatch, captured: bool) -> Iterator[str]:
        """All that the call asks for and this mode cannot do."""
        traits, page_size = call.traits, batch.kv_cache.page_size
        if self.devices is not None and traits.device not in self.devices:
            yield f"it does not run on device type {traits.device!r}"
        if self.capabilities is not None and call.q.is_cuda:
            capability = compute_capability(call.q.device)
            if capability not in self.capabilities:
                yield f"it does not run on compute capability {capability}"
        if self.dtypes is not None and traits.dtype not in self.dtypes:
            yield f"it has no kernels for {traits.dtype}"
        if self.head_dims is not None and traits.head_dim not in self.head_dims:
            yield f"it has no kernels for head_dim {traits.head_dim}"
        if self.page_sizes is not None and page_size not in self.page_sizes:
            yield f"it does not read pages of {page_size} tokens"
        if self.max_group is not None and traits.group > self.max_group:
            yield f"it serves at most {self.max_group} query heads per KV head"
        if batch.tree_mask is not None and not self.tree_mask:
            yield "it has no tree mask"
        if traits.window is not None and not self.window:
            yield "it has no sliding window"
        if traits.softcap is not None and not self.softcap:
            yield "it has no soft cap"
        if batch.kv_cache.page_pitch != page_size and not self.pages_apart:
            yield "it needs pages that lie side by side"
        if self.uniform and batch.query_len is None:
            yield "it needs the same number of rows from every request (query_len)"
        if self.max_query_len is not None and batch.max_query_len > self.max_query_len:
            yield f"it serves at most {self.max_query_len} rows per request"
        if captured and not self.capturable:
            yield "it cannot be part of a full graph"
        if self.host_lengths and (batch.host_seq_lens is None or batch.host_query_lens is None):
            yield "it plans on the host and the batch has no host_query_lens and host_seq_lens"
        limit = None if self.limits is None else self.limits(call, batch)
        if limit is not None:
            yield limit


@cache
def compute_capability(device: torch.device) -> int:
    """The major number."""
    return torch.cuda.get_device_capability(device)[0]
