"""Grids, constants and variants of the kernels: one launch per op.

A kernel gets the op's tensors in the order of its schema, then sizes, then constants. Importing this module
imports Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from torch import Tensor

from piecewise_graph.kernels.launch import Launcher, Planned

from . import accept_kernels, metadata_kernels, tree_kernels
from .op_signature import Call

# One variant of extend_batch serves nearly all batches, so that the first prompts wait for no compile.
_EXTEND_BLOCK, _EXTEND_REQUESTS = 256, 32
_BLOCK_V, _GATHER_BLOCK = 8192, 1024
_pow2 = triton.next_power_of_2


@cache
def _launcher(kernel: Any, num_warps: int) -> Launcher:
    return Launcher(kernel, num_warps=num_warps)


def plan(call: Call, tensors: list[Tensor]) -> Planned:
    """A launch on these very tensors, which the caller keeps alive. It allocates nothing.

    Args:
        call: the op and its sizes.
        tensors: the op's, in order. Some other tensor stands in for one that was not passed; it is not read.
    """
    planned: Planned = globals()[f"_{call.op}"](call, tensors)
    return planned


def _gather_requests(call: Call, tensors: list[Tensor]) -> Planned:
    size, row_pages = call.sizes["B"], call.sizes["P"]
    block = min(_pow2(row_pages), _GATHER_BLOCK)
    return Planned(
        _launcher(metadata_kernels.gather_requests_kernel, 4),
        (size, triton.cdiv(row_pages, block), 1),
        (*tensors, row_pages, *(state.stride(0) for state in tensors[2:4])),
        (block,),
    )


def _scatter_accepted(call: Call, tensors: list[Tensor]) -> Planned:
    longest, read, written = call.sizes["S+1"], tensors[:5], tensors[-3:]
    return Planned(
        _launcher(metadata_kernels.scatter_accepted_kernel, 1),
        (call.sizes["B"], 1, 1),
        (*read, *written, longest, *(state.stride(0) for state in written[1:])),
        (_pow2(longest + 1),),
    )


def _extend_batch(call: Call, tensors: list[Tensor]) -> Planned:
    size, rows, row_pages, pages = (call.sizes[letter] for letter in "BTPQ")
    longest = max(rows, pages, 1)
    return Planned(
        _launcher(metadata_kernels.extend_batch_kernel, 4),
        (size + 1, triton.cdiv(longest, _EXTEND_BLOCK), 1),
        (*tensors, size, rows, row_pages, pages),
        (call.sizes["page_size"], max(_pow2(size), _EXTEND_REQUESTS), _EXTEND_BLOCK),
    )


def _draft_steps(call: Call, tensors: list[Tensor]) -> Planned:
    size, levels, topk = call.sizes["B"], call.sizes["S-1"], call.sizes["k"]
    return Planned(
        _launcher(metadata_kernels.draft_steps_kernel, 1),
        (size if levels else 0, 1, 1),
        (*tensors, size, call.sizes["P"]),
        (call.sizes["page_size"], levels, topk, _pow2(max(levels * topk, 1))),
    )


def _select_branches(call: Call, tensors: list[Tensor]) -> Planned:
    level, steps, topk = call.sizes["level"], call.sizes["S"], call.sizes["k"]
    block = _pow2(topk if level == 0 else topk * topk)
    return Planned(
        _launcher(metadata_kernels.select_branches_kernel, 4),
        (call.sizes["B"], 1, 1),
        (*tensors, level, steps),
        (
            topk,
            level == 0,
            level == steps - 1,
            _pow2(topk),
            block,
            min(block, 32),
            _pow2(max((steps - 1) * topk, 1)),
        ),
    )


def _build_tree(call: Call, tensors: list[Tensor]) -> Planned:
    size, nodes, count, row_pages = (call.sizes[letter] for letter in "BNMP")
    block = _pow2(nodes)
    return Planned(
        _launcher(tree_kernels.build_tree_kernel, _warps(block)),
        (size, 1, 1),
        (*tensors, call.sizes["max_position"], size, nodes, count, row_pages),
        (call.sizes["page_size"], "scores" not in call.shapes, block, _pow2(max(count, 1))),
    )


def _warps(block_n: int) -> int:
    """Enough warps for a tile of block_n², 8 elements of it per thread."""
    return min(max(block_n * block_n // 256, 1), 8)


def _accept_greedy(call: Call, tensors: list[Tensor]) -> Planned:
    size, nodes, row_pages, longest = (call.sizes[dim] for dim in ("B", "N", "P", "S+1"))
    chain, block = "mask" not in call.shapes, _pow2(nodes)
    return Planned(
        _launcher(accept_kernels.accept_greedy_kernel, 1 if chain else _warps(block)),
        (size, 1, 1),
        (*tensors, nodes, longest, row_pages),
        (call.sizes["page_size"], chain, block, _pow2(longest)),
    )


def _accept_chain(call: Call, tensors: list[Tensor]) -> Planned:
    return _accept_sampled(call, [*tensors, tensors[0]], chain=True, drawn=True)


def _accept_tree(call: Call, tensors: list[Tensor]) -> Planned:
    with_draft = [*tensors[:5], tensors[0], *tensors[5:]]
    return _accept_sampled(call, with_draft, chain="mask" not in call.shapes, drawn=False)


def _accept_sampled(call: Call, tensors: list[Tensor], *, chain: bool, drawn: bool) -> Planned:
    """One kernel for both: `drawn` says whether it reads draft_probs, `chain` whether it ignores the mask."""
    size, nodes, row_pages, vocab, longest = (call.sizes[dim] for dim in ("B", "N", "P", "V", "S+1"))
    block_v = min(_BLOCK_V, _pow2(vocab))
    blocks = triton.cdiv(vocab, block_v)
    warps = max(block_v // 512, _warps(_pow2(nodes)))
    return Planned(
        _launcher(accept_kernels.accept_sampled_kernel, warps),
        (size, 1, 1),
        (*tensors, nodes, longest, row_pages, vocab),
        (call.sizes["page_size"], chain, drawn, _pow2(nodes), _pow2(longest), block_v, blocks, _pow2(blocks)),
    )
