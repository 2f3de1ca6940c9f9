"""Grids, constants and variants of the kernels: one bound launch per op, in the op's own arguments.

`bind(name, args)` checks the arguments, allocates nothing, and returns a zero-argument launch; ops launch it
once, loops keep it. Importing this module imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
from torch import Tensor

from piecewise_graph.kernels.launch import Launch, Launcher

from . import accept_kernels, argument_checks, metadata_kernels, tree_kernels

_BLOCK = 1024
_BLOCK_V = 8192
_pow2 = triton.next_power_of_2


@cache
def _launcher(kernel: Any, num_warps: int) -> Launcher:
    return Launcher(kernel, num_warps=num_warps)


def bind(name: str, args: Sequence[Any]) -> Launch:
    """A launch of the op `name` on these very tensors, which the caller keeps alive.

    Raises:
        MetadataError: the arguments do not fit together.
    """
    argument_checks.for_op(name)(*args)
    launch: Launch = globals()[f"_{name}"](*args)
    return launch


def _extend_batch(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    query_lens: Tensor,
    qo_indptr: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    block_table: Tensor,
) -> Launch:
    size, rows, pages = requests.numel(), slot_mapping.numel(), block_table.shape[1]
    longest = max(rows, pages, 1)
    block = min(_BLOCK, _pow2(longest))
    tensors = (requests, seq_lens, query_lens, table, qo_indptr, slot_mapping, positions, block_table)
    return _launcher(metadata_kernels.extend_batch_kernel, 4).bind(
        (size + 1, triton.cdiv(longest, block), 1),
        (*tensors, size, rows, table.shape[1], pages),
        page_size,
        _pow2(size),
        block,
    )


def _kv_indices(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
) -> Launch:
    size, pages = requests.numel(), table.shape[1]
    block = min(_BLOCK, _pow2(pages))
    return _launcher(metadata_kernels.kv_indices_kernel, 4).bind(
        (size, triton.cdiv(pages, block), 1),
        (requests, seq_lens, table, kv_indptr, indices, last_page_len, size, pages, indices.numel()),
        page_size,
        _pow2(size),
        block,
    )


def _advance(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
) -> Launch:
    size = requests.numel()
    block = min(128, _pow2(size))
    return _launcher(metadata_kernels.advance_kernel, 1).bind(
        (triton.cdiv(size, block), 1, 1),
        (requests, seq_lens, table, positions, slot_mapping, size, table.shape[1]),
        page_size,
        block,
    )


def _draft_steps(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    positions: Tensor,
    slot_mapping: Tensor,
    lengths: Tensor,
    kv_indptr: Tensor | None,
    indices: Tensor | None,
) -> Launch:
    size, pages, levels = requests.numel(), table.shape[1], positions.shape[0]
    topk = positions.shape[1] // size
    with_kv = kv_indptr is not None and indices is not None
    block = min(_BLOCK, _pow2(pages * page_size))
    chunks = triton.cdiv(pages * page_size, block) if with_kv else 1
    tensors = [requests, seq_lens, table, positions, slot_mapping, lengths]
    if kv_indptr is not None and indices is not None:
        tensors += [kv_indptr, indices]
    else:
        tensors += [requests, requests]  # never touched
    return _launcher(metadata_kernels.draft_steps_kernel, 4 if with_kv else 1).bind(
        (size if levels else 0, chunks, 1),
        (*tensors, size, pages, indices.shape[1] if indices is not None else 0),
        page_size,
        levels,
        topk,
        with_kv,
        _pow2(size),
        _pow2(max(levels * topk, 1)),
        block,
    )


def _select_branches(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    level: int,
    *rest: Any,
) -> Launch:
    *buffers, kv_indptr, indices = rest
    scores, ancestors = buffers[2], buffers[10]
    size, topk = scores.shape
    steps = ancestors.shape[1]
    with_kv = indices is not None
    children = topk if level == 0 else topk * topk
    tensors = (requests, seq_lens, table, *buffers)
    tensors += (kv_indptr, indices) if with_kv else (requests, requests)
    block = _pow2(children)
    return _launcher(metadata_kernels.select_branches_kernel, 4).bind(
        (size, 1, 1),
        (*tensors, level, steps, size, table.shape[1], indices.shape[1] if with_kv else 0),
        page_size,
        topk,
        level == 0,
        level == steps - 1,
        with_kv,
        _pow2(topk),
        block,
        min(block, 32),
        _pow2(steps),
        _pow2(max((steps - 1) * topk, 1)),
    )


def _build_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    root_tokens: Tensor,
    draft_tokens: Tensor,
    scores: Tensor | None,
    parents: Tensor | None,
    *outs: Tensor,
) -> Launch:
    size, nodes = requests.numel(), outs[2].shape[-1]
    count = draft_tokens.shape[1]
    chain = scores is None or parents is None
    block = _pow2(nodes)
    extra = (requests, requests) if scores is None or parents is None else (scores, parents)
    return _launcher(tree_kernels.build_tree_kernel, _warps(block)).bind(
        (size, 1, 1),
        (
            *(requests, seq_lens, table, root_tokens, draft_tokens, *extra, *outs),
            *(size, nodes, count, table.shape[1]),
        ),
        page_size,
        chain,
        block,
        _pow2(max(count, 1)),
    )


def _warps(block_n: int) -> int:
    """Enough warps for a tile of block_n², 8 elements of it per thread."""
    return min(max(block_n * block_n // 256, 1), 8)


def _accept_greedy(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_ids: Tensor,
    *outs: Tensor,
) -> Launch:
    size, longest = outs[0].shape
    nodes = tokens.numel() // size
    block = _pow2(nodes)
    tree = requests if mask is None else mask
    return _launcher(accept_kernels.accept_greedy_kernel, 1 if mask is None else _warps(block)).bind(
        (size, 1, 1),
        (requests, seq_lens, table, tokens, tree, target_ids, *outs, nodes, longest, table.shape[1]),
        page_size,
        mask is None,
        block,
        _pow2(longest),
    )


def _accept_chain(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> Launch:
    batch = requests, seq_lens, table, page_size
    return _accept_sampled(batch, tokens, None, target_probs, draft_probs, uniforms, outs)


def _accept_tree(
    requests: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    page_size: int,
    tokens: Tensor,
    mask: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    *outs: Tensor,
) -> Launch:
    batch = requests, seq_lens, table, page_size
    return _accept_sampled(batch, tokens, mask, target_probs, None, uniforms, outs)


def _accept_sampled(
    batch: tuple[Tensor, Tensor, Tensor, int],
    tokens: Tensor,
    mask: Tensor | None,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    uniforms: Tensor,
    outs: tuple[Tensor, ...],
) -> Launch:
    requests, seq_lens, table, page_size = batch
    size, nodes, vocab = target_probs.shape
    longest = outs[0].shape[1]
    block_v = min(_BLOCK_V, _pow2(vocab))
    blocks = triton.cdiv(vocab, block_v)
    tree = requests if mask is None else mask
    draft = target_probs if draft_probs is None else draft_probs
    tensors = (requests, seq_lens, table, tokens, tree, target_probs, draft, uniforms, *outs)
    warps = max(block_v // 512, _warps(_pow2(nodes)))
    return _launcher(accept_kernels.accept_sampled_kernel, warps).bind(
        (size, 1, 1),
        (*tensors, nodes, longest, table.shape[1], vocab),
        page_size,
        mask is None,
        draft_probs is not None,
        _pow2(nodes),
        _pow2(longest),
        block_v,
        blocks,
        _pow2(blocks),
    )
