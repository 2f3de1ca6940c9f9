"""Batches of decoding requests and of prompts in one forward."""

from __future__ import annotations

import torch

from piecewise_graph.kernels.launch import multiprocessors

from .batch import AttentionBatch
from .call import Traits

_LONG = 2048  # tokens


def joined(first: AttentionBatch, second: AttentionBatch, longest: int) -> AttentionBatch:
    """The requests of both, over the cache of the first; lengths stay on the device.

    Args:
        first: decoding or verifying requests, all with the same number of rows.
        second: prompts; their rows stand behind.
        longest: tokens of the longest request of `first`; a few more or less decide nothing but the speed.
    """
    kv_cache = first.kv_cache
    if second.kv_cache is not kv_cache:
        second = second.over(kv_cache)
    return AttentionBatch(
        kv_cache,
        block_table=torch.cat([first.block_table, second.block_table]),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        qo_indptr=torch.cat([first.qo_indptr, second.qo_indptr[1:] + first.num_tokens]),
        slot_mapping=torch.cat([first.slot_mapping, second.slot_mapping]),
        max_query_len=max(first.max_query_len, second.max_query_len),
        max_seq_len=max(first.max_seq_len, second.max_seq_len),
        parts=(first, second),
        longest=longest,
    )


def served_apart(batch: AttentionBatch, traits: Traits) -> bool:
    """Whether the parts of a batch are faster in launches of their own.

    One launch gives every request the tiles that prompts want. A multiprocessor runs one program with tiles
    of 128 rows at a time, so many decoding requests wait for each other; and the tokens of a long one are not
    split over programs. With a KV head per query head decoding reads so much that it had better run while
    prompts compute. Measured on an H200 with 8 to 64 requests of 160 to 8,192 tokens.
    """
    if not batch.parts or traits.group == 1:
        return False
    programs = batch.parts[0].num_requests * traits.kv_heads
    many = traits.head_dim > 64 and programs >= multiprocessors(batch.seq_lens.device)
    return many or batch.longest > _LONG
