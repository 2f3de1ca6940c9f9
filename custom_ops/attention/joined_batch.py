"""Batches of decoding requests and of prompts in one forward."""

from __future__ import annotations

import torch

from piecewise_graph.kernels.launch import multiprocessors

from ..errors import AttentionError
from .batch import AttentionBatch
from .call import Traits

_LONG = 1024  # tokens


def joined(first: AttentionBatch, second: AttentionBatch, longest: int) -> AttentionBatch:
    """The requests of both, over the cache of the first; lengths stay on the device.

    Args:
        first: decoding or verifying requests, all with `query_len` rows, padded ones included.
        second: prompts; their rows stand behind.
        longest: tokens of the longest request of `first`, roughly: it decides the speed alone.

    Raises:
        AttentionError: one has a tree mask, or `first` has no query_len.
    """
    kv_cache, rows = first.kv_cache, first.num_tokens
    if first.query_len is None or any(batch.tree_mask is not None for batch in (first, second)):
        raise AttentionError.not_joinable()
    if second.kv_cache is not kv_cache:
        second = second.over(kv_cache)
    starts = torch.arange(0, rows + 1, first.query_len, dtype=torch.int32, device=kv_cache.device)
    both = AttentionBatch(
        kv_cache,
        block_table=torch.cat([first.block_table, second.block_table]),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        qo_indptr=torch.cat([starts, second.qo_indptr[1:] + rows]),
        slot_mapping=torch.cat([first.slot_mapping, second.slot_mapping]),
        max_query_len=max(first.max_query_len, second.max_query_len),
        max_seq_len=max(first.max_seq_len, second.max_seq_len),
    )
    both.parts, both.longest = (first, second), longest
    return both


def served_apart(batch: AttentionBatch, traits: Traits) -> bool:
    """Whether the parts of a batch are faster in launches of their own.

    One launch gives every request the tiles that prompts want. A multiprocessor runs one program with tiles
    of 128 rows at a time: many decoding requests wait for each other. The tokens of a long one are not split
    over programs. With a KV head per query head decoding reads so much that it had better run while prompts
    compute. float32 and deterministic calls have small tiles in any case. Measured on an H200 with 8 to 64
    requests of 160 to 8,192 tokens.
    """
    if not batch.parts or traits.group == 1 or traits.dtype.itemsize > 2 or traits.deterministic:
        return False
    first, second = batch.parts
    seen = batch.longest if traits.window is None else min(batch.longest, traits.window)
    large = traits.head_dim > 64 and second.max_query_len * traits.group > 64
    programs = first.num_requests * traits.kv_heads
    return seen > _LONG or (large and programs >= multiprocessors(batch.kv_cache.device))
