"""Size asserts: shapes, dtypes, devices and strides, on the host alone. Device data is never read.

One function per op, with the op's own arguments. It returns nothing and raises MetadataError.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import MetadataError

INT = (torch.int32,)
IDS = (torch.int32, torch.int64)  # argmax and topk make int64
FLOAT = (torch.float32,)
BOOL = (torch.bool,)
MAX_NODES = 256  # a node block squared has to fit into one program's registers

Row = tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]


def _expect(op: str, device: torch.device, rows: list[Row]) -> None:
    for name, tensor, shape, dtypes in rows:
        if tensor.shape != shape:
            raise MetadataError.wrong_shape(op, name, tensor.shape, shape)
        if tensor.dtype not in dtypes:
            raise MetadataError.wrong_dtype(op, name, tensor.dtype, dtypes)
        if tensor.device != device:
            raise MetadataError.wrong_device(op, name, tensor.device, device)
        if not tensor.is_contiguous():
            raise MetadataError.not_contiguous(op, name, tensor.stride())


def _batch(op: str, requests: Tensor, seq_lens: Tensor, table: Tensor, page_size: int) -> list[Row]:
    if page_size < 1:
        raise MetadataError.bad_sizes(op, f"a page of {page_size} tokens", "pass the page size of the cache.")
    if table.dim() != 2 or table.numel() == 0:
        raise MetadataError.bad_sizes(
            op, f"table has shape {tuple(table.shape)}", "pass RequestTable.block_table, [requests, pages]."
        )
    if requests.numel() == 0:
        raise MetadataError.bad_sizes(op, "requests is empty", "skip the batch, or pad it with request 0.")
    size = (requests.numel(),)
    return [
        ("requests", requests, size, INT),
        ("seq_lens", seq_lens, size, INT),
        ("table", table, tuple(table.shape), INT),
    ]


def extend_batch(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    query_lens: Tensor,
    qo_indptr: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    block_table: Tensor,
) -> None:
    op, size = "extend_batch", requests.numel()
    rows = _batch(op, requests, seq_lens, table, page_size)
    pages = block_table.shape[-1]
    if pages > table.shape[1]:
        raise MetadataError.wrong_shape(op, "block_table", block_table.shape, (size, table.shape[1]))
    total = (slot_mapping.numel(),)
    rows += [
        ("query_lens", query_lens, (size,), INT),
        ("qo_indptr", qo_indptr, (size + 1,), INT),
        ("slot_mapping", slot_mapping, total, INT),
        ("positions", positions, total, INT),
        ("block_table", block_table, (size, pages), INT),
    ]
    _expect(op, requests.device, rows)


def kv_indices(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> None:
    op, size = "kv_indices", requests.numel()
    rows = _batch(op, requests, seq_lens, table, page_size)
    rows += [
        ("kv_indptr", kv_indptr, (size + 1,), INT),
        ("kv_indices", indices, (indices.numel(),), INT),
        ("last_page_len", last_page_len, (size,), INT),
    ]
    _expect(op, requests.device, rows)


def advance(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
) -> None:
    op, size = "advance", (requests.numel(),)
    rows = _batch(op, requests, seq_lens, table, page_size)
    rows += [("positions", positions, size, INT), ("slot_mapping", slot_mapping, size, INT)]
    _expect(op, requests.device, rows)


def draft_steps(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    kv_indptr: Tensor | None,
    indices: Tensor | None,
) -> None:
    op, size = "draft_steps", requests.numel()
    rows = _batch(op, requests, seq_lens, table, page_size)
    levels, branches = _levels(op, positions, size)
    rows += [
        ("positions", positions, (levels, branches), INT),
        ("slot_mapping", slot_mapping, (levels, branches), INT),
        ("out.seq_lens", lengths, (levels, size), INT),
    ]
    rows += _kv(op, levels, branches, kv_indptr, indices)
    _expect(op, requests.device, rows)


def _levels(op: str, positions: Tensor, size: int) -> tuple[int, int]:
    """(S - 1, B * k)."""
    if positions.dim() != 2 or positions.shape[1] % max(size, 1):
        raise MetadataError.bad_sizes(
            op,
            f"positions has shape {tuple(positions.shape)}, not [steps - 1, {size} requests * top-k]",
            "allocate the buffers with DraftSteps.allocate(batch, steps=, topk=).",
        )
    return positions.shape[0], positions.shape[1]


def _kv(op: str, levels: int, rows: int, kv_indptr: Tensor | None, indices: Tensor | None) -> list[Row]:
    if kv_indptr is None and indices is None:
        return []
    if kv_indptr is None or indices is None:
        raise MetadataError.bad_sizes(
            op, "one of kv_indptr and kv_indices is None", "pass both, or neither if attention needs none."
        )
    return [
        ("kv_indptr", kv_indptr, (levels, rows + 1), INT),
        ("kv_indices", indices, (levels, indices.shape[-1]), INT),
    ]


def select_branches(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    level: int,
    probs: Tensor,
    child_tokens: Tensor,
    scores: Tensor,
    tokens: Tensor,
    parents: Tensor,
    hidden_index: Tensor,
    candidates: Tensor,
    all_scores: Tensor,
    all_tokens: Tensor,
    all_parents: Tensor,
    ancestors: Tensor,
    mask: Tensor,
    kv_indptr: Tensor | None,
    indices: Tensor | None,
) -> None:
    op, size = "select_branches", requests.numel()
    rows = _batch(op, requests, seq_lens, table, page_size)
    topk, steps = scores.shape[-1], ancestors.shape[-1]
    if not 0 <= level < steps:
        raise MetadataError.bad_sizes(
            op, f"level {level} of {steps} steps", "count levels from 0, the root's children, to steps - 1."
        )
    children = (size, topk) if level == 0 else (size, topk, topk)
    some, every = (size, topk), (size, topk + (steps - 1) * topk * topk)
    rows += [
        ("probs", probs, children, FLOAT),
        ("child_tokens", child_tokens, children, IDS),
        ("scores", scores, some, FLOAT),
        ("tokens", tokens, some, INT),
        ("parents", parents, some, INT),
        ("hidden_index", hidden_index, (size * topk,), INT),
        ("candidates", candidates, some, INT),
        ("all_scores", all_scores, every, FLOAT),
        ("all_tokens", all_tokens, every, INT),
        ("all_parents", all_parents, every, INT),
        ("ancestors", ancestors, (size * topk, steps), INT),
        ("mask", mask, (size, topk, (steps - 1) * topk), BOOL),
    ]
    rows += _kv(op, steps - 1, size * topk, kv_indptr, indices)
    _expect(op, requests.device, rows)


def build_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    root_tokens: Tensor,
    draft_tokens: Tensor,
    scores: Tensor | None,
    parents: Tensor | None,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    qo_indptr: Tensor,
) -> None:
    op, size, nodes = "build_tree", requests.numel(), mask.shape[-1]
    rows = _batch(op, requests, seq_lens, table, page_size)
    count = draft_tokens.shape[-1] if draft_tokens.dim() else 0
    _nodes(op, nodes)
    if (scores is None) != (parents is None):
        raise MetadataError.bad_sizes(
            op, "one of scores and parents is None", "pass both for a tree, neither for a chain."
        )
    if count < nodes - 1 or (scores is None and count != nodes - 1):
        raise MetadataError.bad_sizes(
            op,
            f"{nodes} nodes are wanted of a root and {count} draft tokens",
            "a tree needs at least nodes - 1 candidates, a chain exactly as many.",
        )
    if scores is not None and parents is not None:
        rows += [("scores", scores, (size, count), FLOAT), ("parents", parents, (size, count), INT)]
    per_node, flat = (size, nodes), (size * nodes,)
    rows += [
        ("root_tokens", root_tokens, (size,), IDS),
        ("draft_tokens", draft_tokens, (size, count), IDS),
        ("tokens", tokens, flat, INT),
        ("positions", positions, flat, INT),
        ("mask", mask, (size, nodes, nodes), BOOL),
        ("retrieve_index", retrieve_index, per_node, INT),
        ("next_token", next_token, per_node, INT),
        ("next_sibling", next_sibling, per_node, INT),
        ("slot_mapping", slot_mapping, flat, INT),
        ("out.seq_lens", lengths, (size,), INT),
        ("qo_indptr", qo_indptr, (size + 1,), INT),
    ]
    _expect(op, requests.device, rows)


def _nodes(op: str, nodes: int) -> None:
    if not 1 <= nodes <= MAX_NODES:
        raise MetadataError.bad_sizes(
            op, f"a tree of {nodes} nodes", f"draft 1 to {MAX_NODES} tokens per request, the root included."
        )


def _accept(
    op: str,
    batch: tuple[Tensor, Tensor, Tensor, int],
    tokens: Tensor,
    mask: Tensor | None,
    outs: tuple[Tensor, ...],
) -> tuple[int, int, list[Row]]:
    """(B, N, rows to check) of what all rules of acceptance share."""
    requests, page_size = batch[0], batch[3]
    rows, size = _batch(op, *batch), requests.numel()
    nodes = tokens.numel() // max(size, 1)
    _nodes(op, nodes or 1)
    if mask is not None:
        if page_size != 1:
            raise MetadataError.tree_needs_small_pages(op, page_size)
        rows.append(("mask", mask, (size, nodes, nodes), BOOL))
    path, one, flat = (size, outs[0].shape[-1]), (size,), (size * nodes,)
    if mask is None and path[1] != nodes:
        raise MetadataError.wrong_shape(op, "accept_index", outs[0].shape, (size, nodes))
    shapes = {
        "accept_index": path,
        "accept_len": one,
        "out_tokens": path,
        "bonus": one,
        "new_seq_lens": one,
        "select_index": one,
        "input_ids": flat,
        "hidden_index": flat,
        "out.positions": flat,
        "out.slot_mapping": flat,
    }
    rows.append(("tokens", tokens, flat, INT))
    rows += [(name, out, shape, INT) for (name, shape), out in zip(shapes.items(), outs, strict=True)]
    return size, nodes, rows


def accept_greedy(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_ids: Tensor,
    *outs: Tensor,
) -> None:
    op = "accept_greedy"
    size, nodes, rows = _accept(op, (requests, seq_lens, table, page_size), tokens, mask, outs)
    rows.append(("target_ids", target_ids, (size * nodes,), IDS))
    _expect(op, requests.device, rows)


def accept_chain(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> None:
    op = "accept_chain"
    size, nodes, rows = _accept(op, (requests, seq_lens, table, page_size), tokens, None, outs)
    vocab = target_probs.shape[-1]
    rows.append(("draft_probs", draft_probs, (size, nodes - 1, vocab), FLOAT))
    rows += _sampled(size, nodes, target_probs, uniforms)
    _expect(op, requests.device, rows)


def accept_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> None:
    op = "accept_tree"
    size, nodes, rows = _accept(op, (requests, seq_lens, table, page_size), tokens, mask, outs)
    rows += _sampled(size, nodes, target_probs, uniforms)
    _expect(op, requests.device, rows)


def _sampled(size: int, nodes: int, target_probs: Tensor, uniforms: Tensor) -> list[Row]:
    return [
        ("target_probs", target_probs, (size, nodes, target_probs.shape[-1]), FLOAT),
        ("uniforms", uniforms, (size, nodes), FLOAT),
    ]


def for_op(name: str) -> Any:
    """The check of one op."""
    return globals()[name]
