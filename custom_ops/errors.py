"""What can go wrong in the attention op, the paged cache and the metadata ops: what, where, what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from piecewise_graph.errors import PiecewiseError

_ITS_OWN_GENERATE = "load it with attn_implementation='sdpa', and call its own generate."


class AttentionError(PiecewiseError, ValueError):
    """An attention call that cannot be served: a wrong argument, batch, model or implementation."""

    # --- the context, the implementation, the model ---

    @classmethod
    def no_batch(cls) -> AttentionError:
        return cls(
            "piecewise::attention does not know its batch: the forward context has no field 'attention'.",
            "surround the forward by `with pg.forward_context(attention=batch):`, batch an AttentionBatch; "
            "or pass cu_seqlens= there for packed sequences without a KV cache.",
        )

    @classmethod
    def unknown(cls, name: str, known: Sequence[str]) -> AttentionError:
        return cls(f"no attention implementation is named {name!r}.", f"choose one of {', '.join(known)}.")

    @classmethod
    def reserved_name(cls, name: str) -> AttentionError:
        return cls(
            f"transformers takes {name!r} for an attention of its own. It does so with all names that it has "
            "registered, and with those that contain 'flash' or '|'.",
            "choose another name for register_attention, such as 'piecewise'.",
        )

    @classmethod
    def not_installed(cls, name: str, reason: str, able: Sequence[str]) -> AttentionError:
        return cls(f"attention implementation {name!r} is not usable here: {reason}.", _others(able))

    @classmethod
    def incapable(cls, name: str, reason: str, able: Sequence[str]) -> AttentionError:
        return cls(f"attention implementation {name!r} cannot serve this call: {reason}.", _others(able))

    @classmethod
    def unsupported_model(cls, feature: str) -> AttentionError:
        return cls(
            f"this model asks its attention for {feature}, which piecewise::attention does not do.",
            "load it with attn_implementation='sdpa'; the backend splits and captures that too.",
        )

    @classmethod
    def no_causal_lm(cls, kind: str) -> AttentionError:
        return cls(
            f"a {kind} is no causal LM of transformers, which can be run in parts.",
            'pass it as AutoModelForCausalLM loads it with attn_implementation="piecewise", not what '
            "torch.compile or pg.compile made of it: it is compiled here, with options of pg.compile.",
        )

    @classmethod
    def own_attention(cls, config: str) -> AttentionError:
        return cls(
            f"the model of {config} computes its attention itself, and would only lose its causal mask.",
            "load it with attn_implementation='eager'; the backend splits and captures what it can of that.",
        )

    @classmethod
    def other_layers(cls, config: str, kind: str) -> AttentionError:
        return cls(
            f"the model of {config} has layers of kind {kind!r}. piecewise::attention keeps keys and values, "
            "by request; whatever else such layers keep or mix, the requests of a batch would share.",
            _ITS_OWN_GENERATE,
        )

    @classmethod
    def mixes_tokens(cls, model: str) -> AttentionError:
        return cls(
            f"in {model} tokens meet outside of piecewise::attention (in a convolution, a recurrence, or an "
            "attention of its own), so that requests of one batch would change each other.",
            _ITS_OWN_GENERATE,
        )

    @classmethod
    def attends_again(cls, who: str) -> AttentionError:
        return cls(
            f"{who} calls its attention more than once in one forward. The KV cache holds one K and V per "
            "layer; the second call would overwrite those of the first.",
            _ITS_OWN_GENERATE,
        )

    @classmethod
    def other_heads(cls, model: str, found: Sequence[int], named: Sequence[int]) -> AttentionError:
        return cls(
            f"{model} hands {found[0]} KV heads of {found[1]} to its attention, its configuration names "
            f"{named[0]} of {named[1]}. No KV cache that is made by the configuration holds them.",
            _ITS_OWN_GENERATE,
        )

    @classmethod
    def rope_of_the_longest(cls, tokens: int, limit: int) -> AttentionError:
        return cls(
            f"a request has, or may get, {tokens} tokens. Beyond {limit} the RoPE (longrope, dynamic) of the "
            "model is another one in the whole call: it changes all other requests, and no cached keys fit.",
            f"keep requests to {limit} tokens: by a lower max_new_tokens, or by max_seq_len={limit} of the "
            "RequestTable.",
        )

    # --- continuous batching of transformers ---

    @classmethod
    def not_ours(cls, name: str | None) -> AttentionError:
        return cls(
            f"the model was loaded with attn_implementation={name!r}, which is not our attention.",
            "call pg.register_attention(), and load it with attn_implementation='piecewise'.",
        )

    @classmethod
    def no_body(cls, model: str) -> AttentionError:
        return cls(f"{model} has no body apart from its head.", "pass a causal LM, such as LlamaForCausalLM.")

    @classmethod
    def body_not_called(cls, model: str, body: str) -> AttentionError:
        return cls(
            f"the forward of {model} does not call its body, {body}, but a part of it. The body is what is "
            "compiled.",
            "load it with attn_implementation='sdpa', and call its own generate_batch.",
        )

    @classmethod
    def no_pages(cls) -> AttentionError:
        return cls(
            "the model was called without the cache of continuous batching.",
            "use generate_batch, or the model that you passed to pg.continuous_batching.",
        )

    @classmethod
    def windowed_cache(cls) -> AttentionError:
        return cls(
            "the model has layers with a sliding window. transformers stores those in a ring of pages, which "
            "piecewise::attention does not read.",
            "load it with attn_implementation='sdpa', and call its own generate_batch.",
        )

    @classmethod
    def compiled_twice(cls) -> AttentionError:
        return cls(
            "the ContinuousBatchingConfig asks transformers for CUDA graphs or torch.compile, around a model "
            "that has graphs of its own.",
            "leave out use_cuda_graph, the padding intervals, the compile configs and default_compile_level.",
        )

    @classmethod
    def two_batches(cls) -> AttentionError:
        return cls(
            "the ContinuousBatchingConfig asks transformers for use_async_batching, which prepares a step "
            "on other streams while the one before is running. Graphs were not tried like that.",
            "leave out use_async_batching, or pass False.",
        )

    # --- the arguments of a call ---

    @classmethod
    def wrong_shapes(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionError:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        remedy = (
            "pass q, k, v of the same tokens, [rows, heads, head_dim]; heads of q a multiple of those of k"
        )
        return cls._of_call(shapes, remedy)

    @classmethod
    def mixed_dtypes(cls, q: Tensor, k: Tensor, v: Tensor) -> AttentionError:
        return cls._of_call(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}", "convert them to one dtype first")

    @classmethod
    def not_positive(cls, name: str, value: float) -> AttentionError:
        return cls._of_call(f"{name}={value}", f"pass a positive {name}, or None for none")

    @classmethod
    def strided(cls, name: str, stride: int) -> AttentionError:
        what = f"{name} has stride {stride} in its last dimension"
        return cls._of_call(what, f"pass {name}.contiguous()")

    @classmethod
    def wrong_rows(cls, tokens: int, batch: int) -> AttentionError:
        return cls(
            f"the batch describes {batch} tokens, but the model was called with {tokens}.",
            "build or fill the batch from the same requests as input_ids; one row per token.",
        )

    @classmethod
    def wrong_lengths(cls, starts: Sequence[int], rows: int) -> AttentionError:
        shown = ", ".join(map(str, starts[:8])) + (", ..." if len(starts) > 8 else "")
        return cls(
            f"cu_seqlens is [{shown}], but the model was called with {rows} tokens.",
            f"pass the first row of each sequence in order, then their number: from 0 to {rows}.",
        )

    # --- the model against the KV cache ---

    @classmethod
    def wrong_layer(cls, layer: int, layers: int) -> AttentionError:
        what = f"layer {layer} of the model, and a KV cache of {layers} layers"
        return cls._of_batch(what, "build the cache with PagedKVCache.for_model(model.config, ...)")

    @classmethod
    def wrong_heads(cls, model: Sequence[int], cache: Sequence[int]) -> AttentionError:
        what = f"the model has {model[0]} KV heads of {model[1]}, its KV cache {cache[0]} of {cache[1]}"
        return cls._of_batch(what, "build the cache with PagedKVCache.for_model(model.config, ...)")

    @classmethod
    def wrong_dtype(cls, model: torch.dtype, cache: torch.dtype) -> AttentionError:
        what = f"the model computes {model}, its KV cache holds {cache}"
        return cls._of_batch(what, f"build the cache with dtype={model}")

    @classmethod
    def window_below_tree(cls, window: int, width: int) -> AttentionError:
        what = f"a sliding window of {window} tokens and a tree mask of {width}"
        return cls._of_batch(what, "keep draft trees smaller than the window")

    # --- the tensors and lengths of a batch ---

    @classmethod
    def wrong_tensor(cls, name: str, found: Tensor, shape: tuple[int, ...], requests: int) -> AttentionError:
        what = f"{name} is {found.dtype} {tuple(found.shape)}"
        return cls._of_batch(what, f"pass int32 {shape}, as seq_lens names {requests} requests")

    @classmethod
    def wrong_tree_mask(cls, mask: Tensor, requests: int, rows: int) -> AttentionError:
        what = f"tree_mask is {mask.dtype} {tuple(mask.shape)}"
        return cls._of_batch(what, f"pass bool [{requests}, {rows}, width], width at least {rows}")

    @classmethod
    def not_rectangular(cls, requests: int, query_len: int, slots: int) -> AttentionError:
        what = f"{requests} requests of {query_len} rows each, and {slots} slots"
        return cls._of_batch(what, "pass one slot per row, padded requests' rows included")

    @classmethod
    def too_few_slots(cls, rows: int, slots: int) -> AttentionError:
        return cls._of_batch(f"host_query_lens of {rows} rows, and {slots} slots", "pass one slot per row")

    @classmethod
    def unequal_query_lens(cls, query_len: int, max_query_len: int) -> AttentionError:
        return cls._of_batch(f"query_len={query_len}, max_query_len={max_query_len}", "make them equal")

    @classmethod
    def wrong_count(cls, name: str, found: int, requests: int) -> AttentionError:
        return cls._of_batch(f"{found} {name} for {requests} requests", "pass one per request")

    @classmethod
    def above_bound(cls, name: str, found: int, bound: str, limit: int) -> AttentionError:
        return cls._of_batch(f"{name} up to {found}, {bound}={limit}", f"raise {bound}")

    # --- the requests that a batch is filled with ---

    @classmethod
    def not_integers(cls, name: str, values: object) -> AttentionError:
        return cls._of_batch(f"{name} is {values!r:.80}", "pass a list of whole numbers, one per request")

    @classmethod
    def unequal_counts(cls, counts: Mapping[str, int]) -> AttentionError:
        found = ", ".join(f"{count} {name}" for name, count in counts.items())
        return cls._of_batch(found, "pass one of each per request")

    @classmethod
    def impossible_lengths(cls, slot: int, rows: int, tokens: int) -> AttentionError:
        what = f"request slot {slot} has {rows} new rows and {tokens} tokens with them"
        return cls._of_batch(what, "pass the new rows in query_lens, and all tokens with them in seq_lens")

    @classmethod
    def repeated_slot(cls, slot: int) -> AttentionError:
        what = f"request slot {slot} is named twice"
        return cls._of_batch(what, "pass all new rows of a request as one entry")

    @classmethod
    def no_rows(cls, requests: int) -> AttentionError:
        what = f"{requests} requests and no row"
        return cls._of_batch(what, "pass at least one request with a new row, or skip the forward")

    @classmethod
    def buffers_too_small(cls, requests: Sequence[int], buffers: Sequence[int]) -> AttentionError:
        what = f"{requests[0]} requests with {requests[1]} rows"
        return cls._of_batch(what, f"make BatchBuffers for more than {buffers[0]} and {buffers[1]}")

    @classmethod
    def not_uniform(cls, index: int, rows: int, query_len: int) -> AttentionError:
        what = f"request {index} has {rows} rows, each of uniform buffers {query_len}"
        return cls._of_batch(what, "make BatchBuffers without uniform=True for such batches")

    @classmethod
    def not_joinable(cls) -> AttentionError:
        what = "a batch with a tree mask, or a first one without query_len, is to be joined with prompts"
        return cls._of_batch(what, "call the model once for each batch")

    @classmethod
    def wrong_pages(cls, table: tuple[int, object], cache: tuple[int, object]) -> AttentionError:
        what = "a request table with pages of {} tokens on {}, and a KV cache with pages of {} on {}"
        remedy = "make the table with RequestTable.for_cache(cache, ...)"
        return cls._of_batch(what.format(*table, *cache), remedy)

    @classmethod
    def table_too_large(cls, pages: int, cache_pages: int) -> AttentionError:
        what = f"a request table of {pages} pages, and a KV cache of {cache_pages}"
        return cls._of_batch(what, "make the table with RequestTable.for_cache(cache, ...)")

    @classmethod
    def _of_batch(cls, what: str, remedy: str) -> AttentionError:
        return cls(f"this AttentionBatch cannot be right: {what}.", f"{remedy}.")

    @classmethod
    def _of_call(cls, what: str, remedy: str) -> AttentionError:
        return cls(f"piecewise::attention cannot be called like this: {what}.", f"{remedy}.")


class CacheError(PiecewiseError):
    """The paged KV cache cannot hold what was asked; nothing was changed."""

    @classmethod
    def no_pages(cls, wanted: int, free: int, total: int, page_size: int) -> CacheError:
        return cls(
            f"{wanted} more pages of {page_size} tokens are wanted, {free} of {total} are free.",
            "close finished requests first, admit fewer at a time, or make the cache larger (num_pages).",
        )

    @classmethod
    def not_pages(cls, found: Tensor, first: Tensor) -> CacheError:
        return cls(
            f"K or V of a layer is {tuple(found.shape)} with strides {found.stride()}, the first K "
            f"{tuple(first.shape)} with strides {first.stride()}.",
            "pass [num_pages, page_size, kv_heads, head_dim]: pages of one shape, dense, equally far apart.",
        )

    @classmethod
    def no_sizes(cls, config: str, reason: object) -> CacheError:
        return cls(
            f"no cache of layers of one size fits the model of {config}: {reason}",
            _ITS_OWN_GENERATE,
        )

    @classmethod
    def never_fits(cls, tokens: int, pages: int, total: int, page_size: int) -> CacheError:
        return cls(
            f"a request of {tokens} tokens needs {pages} pages of {page_size} tokens; the cache has {total}.",
            "make the cache larger (num_pages; continuous batching: num_blocks), or ask for fewer tokens.",
        )

    @classmethod
    def no_slots(cls, total: int) -> CacheError:
        return cls(
            f"all {total} request slots are taken.",
            "close a finished request first, or raise max_requests.",
        )

    @classmethod
    def too_long(cls, who: str, tokens: int, limit: int) -> CacheError:
        return cls(
            f"{who} would hold {tokens} tokens; a row of the block table has room for {limit}.",
            "raise max_seq_len of the RequestTable, or stop the request earlier.",
        )

    @classmethod
    def not_reserved(cls, slot: int, tokens: int, capacity: int) -> CacheError:
        return cls(
            f"request slot {slot} would hold {tokens} tokens; its pages have room for {capacity}.",
            f"call RequestTable.reserve({{{slot}: {tokens}}}) before the batch is filled.",
        )

    @classmethod
    def not_open(cls, slot: int) -> CacheError:
        return cls(f"request slot {slot} is not open.", "use the slot that open() returned, until close().")


def _others(able: Sequence[str]) -> str:
    return f"use {' or '.join(able)}." if able else "no implementation that is usable here can do this."


class MetadataError(PiecewiseError, ValueError):
    """Tensors of a metadata op that do not fit together; nothing was written."""

    @classmethod
    def wrong_shape(cls, op: str, name: str, got: Sequence[int], expected: Sequence[object]) -> MetadataError:
        wanted = ", ".join(map(str, expected))
        return cls(
            f"{op}: {name} has shape {list(got)}, the other arguments ask for [{wanted}].",
            "make it with the same batch size, draft tokens, steps and top-k as the rest; "
            "the allocate() of the buffer classes does.",
        )

    @classmethod
    def wrong_dtype(cls, op: str, name: str, got: object, expected: Sequence[object]) -> MetadataError:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        return cls(
            f"{op}: {name} is {str(got).removeprefix('torch.')}, not {names}.",
            f"convert it once, outside of the loop, or allocate it as {names}.",
        )

    @classmethod
    def wrong_device(cls, op: str, name: str, got: object, expected: object) -> MetadataError:
        return cls(
            f"{op}: {name} is on {got}, but requests is on {expected}.",
            "keep everything that a batch needs on one device.",
        )

    @classmethod
    def not_contiguous(cls, op: str, name: str, strides: Sequence[int]) -> MetadataError:
        return cls(
            f"{op}: {name} is not contiguous, its strides are {tuple(strides)}.",
            "pass a contiguous tensor: kernels address it by row, and a view of some columns has gaps.",
        )

    @classmethod
    def no_requests(cls, op: str) -> MetadataError:
        return cls(f"{op}: requests is empty.", "skip the batch, or pad it with request 0.")

    @classmethod
    def wrong_table(cls, op: str, shape: Sequence[int]) -> MetadataError:
        return cls(
            f"{op}: table has shape {list(shape)}.", "pass RequestTable.block_table, [requests, pages]."
        )

    @classmethod
    def wrong_page_size(cls, op: str, page_size: int) -> MetadataError:
        return cls(f"{op}: a page of {page_size} tokens.", "pass the page size of the cache.")

    @classmethod
    def no_such_level(cls, op: str, level: int, steps: int) -> MetadataError:
        return cls(
            f"{op}: level {level} of {steps} steps.",
            "count levels from 0, the root's children, to steps - 1.",
        )

    @classmethod
    def no_such_position(cls, op: str, position: int, most: int) -> MetadataError:
        return cls(f"{op}: max_position is {position}.", f"pass a position from 0 to {most}.")

    @classmethod
    def half_a_tree(cls, op: str) -> MetadataError:
        return cls(f"{op}: one of scores and parents is None.", "pass both for a tree, neither for a chain.")

    @classmethod
    def wrong_candidates(cls, op: str, nodes: int, count: int) -> MetadataError:
        return cls(
            f"{op}: {nodes} nodes are wanted of a root and {count} draft tokens.",
            "a tree needs at least nodes - 1 candidates, a chain exactly as many.",
        )

    @classmethod
    def wrong_nodes(cls, op: str, nodes: int, most: int) -> MetadataError:
        return cls(
            f"{op}: a tree of {nodes} nodes.",
            f"draft 1 to {most} tokens per request, the root included.",
        )

    @classmethod
    def tree_needs_small_pages(cls, op: str, page_size: int) -> MetadataError:
        return cls(
            f"{op}: a tree and a page size of {page_size}: the accepted path does not fill whole pages.",
            "use a page size of 1 for trees, where a commit permutes slots, or a chain (top-k 1, mask=None).",
        )
