"""Batches of decoding requests and of prompts in one forward."""

from __future__ import annotations

import torch

from piecewise_graph.kernels.launch import multiprocessors

from .batch import AttentionBatch

_SMALL_HEAD = 64  # elements


def joined(first: AttentionBatch, second: AttentionBatch) -> AttentionBatch:
    """The requests of both, over the cache of the first; lengths stay on the device.

    One launch gives every request the large tiles that prompts want. A multiprocessor runs one program with
    such tiles at a time, so many decoding requests wait for each other. Where they are a program or more for
    every multiprocessor, they have a launch of their own. Tiles for heads of 64 elements are smaller.

    Args:
        first: decoding or verifying requests, all with the same number of rows.
        second: prompts; their rows stand behind.
    """
    kv_cache = first.kv_cache
    if second.kv_cache is not kv_cache:
        second = second.over(kv_cache)
    programs, device = first.num_requests * kv_cache.kv_heads, kv_cache.device
    alone = kv_cache.head_dim > _SMALL_HEAD and programs >= multiprocessors(device)
    return AttentionBatch(
        kv_cache,
        block_table=torch.cat([first.block_table, second.block_table]),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        qo_indptr=torch.cat([first.qo_indptr, second.qo_indptr[1:] + first.num_tokens]),
        slot_mapping=torch.cat([first.slot_mapping, second.slot_mapping]),
        max_query_len=max(first.max_query_len, second.max_query_len),
        max_seq_len=max(first.max_seq_len, second.max_seq_len),
        parts=(first, second) if alone else (),
    )
