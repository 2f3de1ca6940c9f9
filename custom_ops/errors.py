"""What can go wrong in the attention op and the paged cache: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Sequence

from piecewise_graph.errors import PiecewiseError


class AttentionError(PiecewiseError, ValueError):
    """An attention call that its implementation, or any, cannot serve as it was asked."""

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
            f"transformers takes {name!r} for an attention of its own, as all names with 'flash' or '|', and "
            "those that it has registered.",
            "choose another name for register_attention, such as 'piecewise'.",
        )

    @classmethod
    def not_installed(cls, name: str, why: str, able: Sequence[str]) -> AttentionError:
        return cls(f"attention implementation {name!r} is not usable here: {why}.", _others(able))

    @classmethod
    def incapable(cls, name: str, lacks: str, able: Sequence[str]) -> AttentionError:
        return cls(f"attention implementation {name!r} cannot serve this call: {lacks}.", _others(able))

    @classmethod
    def bad_batch(cls, what: str, remedy: str) -> AttentionError:
        return cls(f"this AttentionBatch cannot be right: {what}.", remedy)

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

    @classmethod
    def wrong_layer(cls, layer: int, layers: int) -> AttentionError:
        what = f"layer {layer} of the model, and a KV cache of {layers} layers"
        return cls.bad_batch(what, "build the cache with PagedKVCache.for_model(model.config, ...)")

    @classmethod
    def bad_call(cls, what: str, remedy: str) -> AttentionError:
        return cls(f"piecewise::attention cannot be called like this: {what}.", remedy)

    @classmethod
    def unsupported_model(cls, what: str) -> AttentionError:
        return cls(
            f"this model asks its attention for {what}, which piecewise::attention does not do.",
            "load it with attn_implementation='sdpa'; the backend splits and captures that too.",
        )

    @classmethod
    def own_attention(cls, config: str) -> AttentionError:
        return cls(
            f"the model of {config} computes its attention itself, and would only lose its causal mask.",
            "load it with attn_implementation='eager'; the backend splits and captures what it can of that.",
        )


class CacheError(PiecewiseError):
    """The paged KV cache cannot hold what was asked; nothing was changed."""

    @classmethod
    def no_pages(cls, wanted: int, free: int, total: int, page_size: int) -> CacheError:
        return cls(
            f"{wanted} more pages of {page_size} tokens are wanted, {free} of {total} are free.",
            "close finished requests first, admit fewer at a time, or make the cache larger (num_pages).",
        )

    @classmethod
    def never_fits(cls, tokens: int, pages: int, total: int, page_size: int) -> CacheError:
        return cls(
            f"a request of {tokens} tokens needs {pages} pages of {page_size} tokens; the cache has {total}.",
            "make the cache larger (num_pages), or ask for fewer tokens.",
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
