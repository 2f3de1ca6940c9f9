"""A paged KV cache, and the table that says which pages a request owns.

Note [The null page]
Page 0 and request slot 0 are never handed out. Padded rows of a batch write K and V to slot 0 of page 0.
Padded requests look up row 0 of the table, where all pages are 0. So padding never touches a request.

Note [No host-device synchronisation]
Only the host knows which pages are free. The device needs the rows of the block table. `flush` sends them as
one copy from pinned memory and one scatter, ordered by the stream like every kernel that reads them. A closed
request's pages may be handed out at once: the kernels of their next owner come later in the stream.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import CacheError
from .rope_limit import rope_limit

NULL_SLOT = 0


class PagedKVCache:
    """K and V of every layer, in pages.

    Attributes:
        k, v: per layer `[num_pages, page_size, kv_heads, head_dim]`. Slot s of a layer is row
            `s % page_size` of page `s // page_size`.
        page_pitch: slots from the start of one page to that of the next; `page_size` where pages lie side by
            side.
        memo: of implementations of attention, for what depends on this cache alone.
        rope_limit: most tokens of a request without a change of the model's RoPE for all others; None where
            there is no such limit, or the model is not known.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, 2, num_pages, page_size, kv_heads, head_dim)
        storage = torch.zeros(shape, dtype=dtype, device=device)
        self._hold([layer[0] for layer in storage], [layer[1] for layer in storage])

    @classmethod
    def of_pages(cls, k: Sequence[Tensor], v: Sequence[Tensor]) -> PagedKVCache:
        """A cache on memory that somebody else allocated, and hands out; it has no null page.

        Args:
            k, v: per layer `[num_pages, page_size, kv_heads, head_dim]`, with pages of one shape, each dense.
                Pages may lie apart, all of them equally far: vLLM keeps K and V of a page together.

        Raises:
            CacheError: they are not like that.
        """
        cache = cls.__new__(cls)
        cache._hold(k, v)
        for tensor in (*cache.k, *cache.v):
            if _layout(tensor) != _layout(k[0]) or cache.page_pitch < cache.page_size:
                raise CacheError.not_pages(tensor, k[0])
        return cache

    def _hold(self, k: Sequence[Tensor], v: Sequence[Tensor]) -> None:
        self.k, self.v, self.num_layers = tuple(k), tuple(v), len(k)
        self.num_pages, self.page_size, self.kv_heads, self.head_dim = k[0].shape
        self.page_pitch = _layout(k[0])[1]
        self.dtype, self.device = k[0].dtype, k[0].device
        self.memo: dict[Hashable, Any] = {}
        self.rope_limit: int | None = None

    @classmethod
    def for_model(
        cls, model: Any, *, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> PagedKVCache:
        """A cache for a transformers model.

        Args:
            model: the model, or its `config`. The config of a tensor-parallel model does not tell which heads
                this rank has.

        Raises:
            CacheError: the model has no attention, or layers of several sizes.
        """
        config = getattr(model, "config", model)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        kv_heads, head_dim = kv_sizes(config)
        cache = cls(
            num_layers=config.num_hidden_layers,
            num_pages=num_pages,
            page_size=page_size,
            kv_heads=min(kv_heads, _local_heads(model, head_dim) or kv_heads),
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )
        cache.rope_limit = rope_limit(config)
        return cache

    def scratch(self, name: Hashable, size: int, dtype: torch.dtype) -> Tensor:
        """At least `size` elements, zeros at first, for all attention over this cache.

        The stream orders its uses, as it orders the writes to the cache. A larger size gets new memory.
        """
        found = self.memo.get(name)
        if found is None or found.numel() < size:
            found = self.memo[name] = torch.zeros(size, dtype=dtype, device=self.device)
        return found


def _layout(pages: Tensor) -> tuple[torch.Size, int]:
    """The shape of the pages of a layer's K or V, and their pitch; 0 where they are not dense."""
    _, page_size, kv_heads, head_dim = pages.shape
    slot = kv_heads * head_dim
    if not pages[:1].is_contiguous() or pages.stride(0) % slot:
        return pages.shape[1:], 0
    return pages.shape[1:], pages.stride(0) // slot if len(pages) > 1 else page_size


def kv_sizes(config: Any) -> tuple[int, int]:
    """(KV heads, head_dim) of every layer, as the configuration of a text model names them.

    Raises:
        CacheError: the model has no attention, or layers of several sizes.
    """
    try:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return getattr(config, "num_key_value_heads", None) or heads, head_dim
    except (AttributeError, RuntimeError) as error:  # layers without attention, or of several sizes
        raise CacheError.no_sizes(type(config).__name__, error) from error


def _local_heads(model: Any, head_dim: int) -> int | None:
    """KV heads that this rank of a sharded model projects, a part of one as one; None of other models."""
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else ()
    if not any(hasattr(parameter, "to_local") for parameter in parameters):
        return None
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    keys = (module for name, module in decoder.named_modules() if name.endswith(".k_proj"))
    weights: list[Any] = [module.weight for module in keys if isinstance(module, torch.nn.Linear)]
    rows = [len(weight.to_local() if hasattr(weight, "to_local") else weight) for weight in weights]
    return -(-max(rows) // head_dim) if rows else None


class RequestTable:
    """Which pages each request owns; slot 0 and page 0 are null.

    Args:
        num_pages: of the cache, the null page included.
        max_requests: open at the same time.
        max_seq_len: tokens that one request may hold.

    Attributes:
        block_table: int32 `[max_requests + 1, max_pages]` on the device, with up to 3 columns more; row r
            lists the pages of request slot r in order, 0 where it has none. With a page size of 1 its entries
            are cache slots: the table that SGLang calls `req_to_token`.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_requests: int,
        max_seq_len: int,
        device: torch.device | str,
    ) -> None:
        self.page_size, self.max_requests, self.total_pages = page_size, max_requests, num_pages - 1
        self.max_pages = -(-max_seq_len // page_size)
        width = -(-self.max_pages // 4) * 4  # rows of a multiple of 16 bytes, which torch gathers faster
        self.block_table = torch.zeros(max_requests + 1, width, dtype=torch.int32, device=device)
        self._pages: dict[int, list[int]] = {}
        self._unsent: dict[int, int] = {}  # flat index into block_table -> page
        self.clear()

    @classmethod
    def for_cache(cls, cache: PagedKVCache, *, max_requests: int, max_seq_len: int) -> RequestTable:
        """A table that hands out all pages of `cache`."""
        return cls(
            num_pages=cache.num_pages,
            page_size=cache.page_size,
            max_requests=max_requests,
            max_seq_len=max_seq_len,
            device=cache.device,
        )

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def open_slots(self) -> tuple[int, ...]:
        return tuple(self._pages)

    def capacity(self, slot: int) -> int:
        """Tokens that the pages of `slot` hold."""
        return len(self._owned(slot)) * self.page_size

    def open(self) -> int:
        """A request slot without pages.

        Raises:
            CacheError: all are taken.
        """
        if not self._free_slots:
            raise CacheError.no_slots(self.max_requests)
        slot = self._free_slots.pop()
        self._pages[slot] = []
        return slot

    def reserve(self, tokens: Mapping[int, int]) -> None:
        """Give every slot named pages for `tokens[slot]` tokens in all, or change nothing.

        Raises:
            CacheError: too few pages are free, or a request outgrows its row.
        """
        wanted: dict[int, int] = {}
        for slot, count in tokens.items():
            if count > self.max_pages * self.page_size:
                raise CacheError.too_long(f"request slot {slot}", count, self.max_pages * self.page_size)
            wanted[slot] = max(-(-count // self.page_size) - len(self._owned(slot)), 0)
        total = sum(wanted.values())
        if total > self.free_pages:
            raise CacheError.no_pages(total, self.free_pages, self.total_pages, self.page_size)
        for slot, count in wanted.items():
            for _ in range(count):
                self._append(slot, self._free_pages.pop())

    def check_fits(self, tokens: int) -> None:
        """Refuse more tokens than a request could hold if it had all pages.

        Raises:
            CacheError: it could not.
        """
        if tokens > self.max_pages * self.page_size:
            raise CacheError.too_long("a request", tokens, self.max_pages * self.page_size)
        pages = -(-tokens // self.page_size)
        if pages > self.total_pages:
            raise CacheError.never_fits(tokens, pages, self.total_pages, self.page_size)

    def close(self, slot: int) -> None:
        """Give back the pages and the slot of a finished request."""
        pages = self._owned(slot)
        row = slot * self.block_table.stride(0)
        self._unsent.update((row + index, 0) for index in range(len(pages)))
        self._free_pages.extend(reversed(pages))
        del self._pages[slot]
        self._free_slots.append(slot)

    def clear(self) -> None:
        """Close all slots and take back all pages, also after an exception has left the table in between."""
        self._free_pages = list(range(self.total_pages, 0, -1))
        self._free_slots = list(range(self.max_requests, 0, -1))
        self._pages, self._unsent = {}, {}
        self.block_table.zero_()

    def flush(self) -> None:
        """Send the changes to the device, without waiting. Call it before the batch that needs them."""
        if not self._unsent:
            return
        changes = [[*self._unsent], [*self._unsent.values()]]
        index, pages = device_columns(changes, self.block_table.device)
        self.block_table.view(-1).scatter_(0, index.long(), pages)
        self._unsent = {}  # only now: after a transfer that failed, the next flush has to send them too

    def _append(self, slot: int, page: int) -> None:
        pages = self._pages[slot]
        self._unsent[slot * self.block_table.stride(0) + len(pages)] = page
        pages.append(page)

    def _owned(self, slot: int) -> list[int]:
        if slot not in self._pages:
            raise CacheError.not_open(slot)
        return self._pages[slot]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting; torch keeps the pinned source until the copy is done."""
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def device_ints(values: Sequence[int], device: torch.device) -> Tensor:
    """int32 `[len(values)]` on the device, sent without waiting; at least one."""
    # Through an array: torch takes four times as long to make a tensor of a list of a thousand integers.
    return to_device(torch.frombuffer(array("i", values), dtype=torch.int32), device)


def overwrite_ints(destination: Tensor, values: Sequence[Any]) -> None:
    """Overwrite an int32 tensor with `values` of its shape, without waiting."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=destination.is_cuda)
    destination.copy_(host, non_blocking=True)


def device_columns(columns: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """int32 of every column's length on the device, all sent as one copy, without waiting.

    Each begins at a multiple of 16 bytes, which kernels are compiled for.
    """
    packed, starts = array("i"), list[int]()
    for column in columns:
        starts.append(len(packed))
        packed.extend([*column, *[0] * (-len(column) % 4)])
    sent = device_ints(packed, device)
    return [sent[start : start + len(column)] for start, column in zip(starts, columns, strict=True)]
