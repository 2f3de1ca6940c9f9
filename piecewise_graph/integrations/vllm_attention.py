"""Attention of vLLM's decode batches by `piecewise::attention`, over vLLM's KV caches.

Note [One launch]
In a full graph FlashAttention 3 takes three launches per layer: K and V into the cache, attention in parts,
and the parts together. With 32 requests of 192 tokens of the 8B shape they take 21 us on an H200, and our one
launch takes 13. The linear behind it starts while it runs.

Note [Which layers]
Layers of vLLM's FlashAttentionImpl that ask for nothing which our kernel lacks. Their two methods are
exchanged while a decode batch is captured, on these objects alone. All other calls are vLLM's.

Note [Shared pages]
vLLM writes K and V of all requests before it reads any. Our launch reads old tokens while it writes new ones.
With cached prefixes, a request may find a page in the very step that fills it, for another request. That can
be no other step than the one in which it is scheduled for the first time, or again after a preemption. Graphs
with our attention serve no such step.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch, attend_in_graph, expect_graph_calls
from piecewise_graph.custom_ops.kv_cache import PagedKVCache
from piecewise_graph.errors import PiecewiseError

_BACKEND = "vllm.v1.attention.backends.flash_attn"
# Attributes of FlashAttentionImpl, and what they are where it computes what our kernel does.
_PLAIN = {
    "alibi_slopes": None,
    "sinks": None,
    "kv_sharing_target_layer_name": None,
    "kv_cache_dtype": "auto",
    "attn_type": "decoder",
    "dcp_world_size": 1,
    "batch_invariant_enabled": False,
}


class _Layer(NamedTuple):
    """One of vLLM's attention layers in a batch."""

    layer: Any
    metadata: Any
    slots: Any

    @property
    def group(self) -> Hashable:
        """Layers for which it is equal are served as one batch over one cache."""
        pages: Tensor = self.layer.kv_cache
        return id(self.metadata), self.slots.data_ptr(), pages.shape, pages.stride()


class DecodeAttention:
    """Serves layers of the decode batches that one model is captured for.

    Args:
        sizes: token counts of batches, some of them of decode batches.

    Attributes:
        served: names of the layers of the last batch that are.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.served: tuple[str, ...] = ()
        self._caches: dict[Hashable, PagedKVCache] = {}  # with the workspace that all graphs share
        self._batches: list[AttentionBatch] = []  # that graphs were captured with
        self._expected = set[Hashable]()

    @contextmanager
    def instead(self, context: Any) -> Iterator[None]:
        """Within the block, calls of attention are ours where that is possible.

        Args:
            context: vLLM's forward context, of a batch in mode FULL.
        """
        served = list[str]()
        with ExitStack() as block:
            for layers in _groups(context).values():
                with suppress(PiecewiseError):  # of tensors that are others than ours would be
                    batch = self._batch([*layers.values()])
                    self._batches.append(batch)
                    for index, (name, (layer, _, _)) in enumerate(layers.items()):
                        if self._can_serve(batch, layer.impl):
                            served.append(name)
                            block.enter_context(_exchanged(layer.impl, batch, index))
            self.served = tuple(served)
            yield

    def forget(self) -> None:
        """Let go of vLLM's KV caches and of all that graphs read; they are gone."""
        for batch in self._batches:
            batch.served_by.clear()  # it holds the batch: a circle, and vLLM freezes the garbage collector
        self._batches.clear()
        self._caches.clear()
        self._expected.clear()
        self.served = ()

    def _batch(self, layers: Sequence[_Layer]) -> AttentionBatch:
        """One that reads what vLLM's kernels would read.

        Raises:
            PiecewiseError: its tensors are others than ours would be.
        """
        pages = [layer.kv_cache for layer, _, _ in layers]
        shape = pages[0].shape, pages[0].stride(), pages[0].dtype  # hybrid models share memory
        key = shape, *(each.data_ptr() for each in pages)
        if key not in self._caches:
            k, v = ([each[:, which] for each in pages] for which in (0, 1))
            self._caches[key] = PagedKVCache.of_pages(k, v)
        _, metadata, slots = layers[0]
        rows = metadata.max_query_len
        return AttentionBatch(
            self._caches[key],
            block_table=metadata.block_table,
            seq_lens=metadata.seq_lens,
            qo_indptr=metadata.query_start_loc,
            slot_mapping=slots,
            max_query_len=rows,
            max_seq_len=metadata.block_table.shape[1] * pages[0].shape[2],
            query_len=rows if len(slots) == len(metadata.seq_lens) * rows else None,
        )

    def _can_serve(self, batch: AttentionBatch, impl: Any) -> bool:
        """Whether our kernel can. It is compiled ahead for smaller batches too: the largest come first."""
        options = _options(batch, impl)
        key = batch.kv_cache, impl.num_heads, batch.max_query_len, *options.values()
        rows, sizes = batch.query_len, self.sizes if key not in self._expected else ()
        smaller = (size for size in sizes if rows and size < batch.num_tokens and size % rows == 0)
        try:
            for each in (batch, *(_first(batch, size) for size in smaller)):
                expect_graph_calls(each, impl.num_heads, **options)
        except PiecewiseError:
            return False
        self._expected.add(key)
        return True


def _first(batch: AttentionBatch, tokens: int) -> AttentionBatch:
    """The requests that have the first so many tokens of a batch, all with the same number of them."""
    requests = tokens // batch.max_query_len
    return replace(
        batch,
        block_table=batch.block_table[:requests],
        seq_lens=batch.seq_lens[:requests],
        qo_indptr=batch.qo_indptr[: requests + 1],
        slot_mapping=batch.slot_mapping[:tokens],
    )


def _groups(context: Any) -> Mapping[Hashable, dict[str, _Layer]]:
    """Layers by name, together where metadata and pages are alike; see Note [Which layers]."""
    groups = defaultdict[Hashable, dict[str, _Layer]](dict)
    by_layer, slots = context.attn_metadata, context.slot_mapping
    if not (isinstance(by_layer, dict) and isinstance(slots, dict)):  # of micro-batches, or of none
        return groups
    for name, metadata in by_layer.items():
        found = _Layer(context.no_compile_layers.get(name), metadata, slots.get(name))
        if _is_plain(found):
            groups[found.group][name] = found
    return groups


def _is_plain(found: _Layer) -> bool:
    """It is one that our kernel may serve."""
    layer, metadata, slots = found
    module = sys.modules.get(_BACKEND)  # not imported: then no layer is of it
    impl, pages = getattr(layer, "impl", None), getattr(layer, "kv_cache", None)
    if module is None or type(impl) is not module.FlashAttentionImpl or not isinstance(slots, Tensor):
        return False
    heads = getattr(impl, "num_kv_heads", None), getattr(impl, "head_size", None)
    if not isinstance(pages, Tensor) or pages.shape[1:2] + pages.shape[3:] != (2, *heads):
        return False
    is_changed = {"forward", "do_kv_cache_update"} & vars(impl).keys()  # by somebody else
    asks = {name: getattr(impl, name, NotImplemented) for name in _PLAIN}
    return not is_changed and asks == _PLAIN and metadata.causal and not metadata.use_cascade


def _options(batch: AttentionBatch, impl: Any) -> dict[str, Any]:
    """Of `attend_in_graph`, for calls of a layer."""
    before, after = impl.sliding_window
    return {
        "window": before + 1 if (before, after) != (-1, -1) else None,
        "softcap": impl.logits_soft_cap or None,
        "implementation": "triton" if batch.kv_cache.device.type == "cuda" else "torch",
    }


@contextmanager
def _exchanged(impl: Any, batch: AttentionBatch, index: int) -> Iterator[None]:
    """Within the block, both methods of a layer's attention are ours."""
    options = _options(batch, impl)

    def forward(
        _: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, output: Tensor, **___: Any
    ) -> Tensor:
        attend_in_graph(batch, query, key, value, output, layer=index, scale=impl.scale, **options)
        return output

    def do_kv_cache_update(*_: Any) -> None:
        """`forward` writes K and V."""

    impl.forward, impl.do_kv_cache_update = forward, do_kv_cache_update
    try:
        yield
    finally:
        del impl.forward, impl.do_kv_cache_update
