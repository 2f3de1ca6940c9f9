"""flash-attn 4 (`flash_attn.cute`): ragged batches, all lengths on the device, so it may be captured.

Its kernels are compiled at their first call, which is the run that warms a graph up before its capture. That
takes about three seconds for each combination of dtype, head_dim, group, window (or none) and soft cap (or
none).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

# The public function of the same file allocates its result; this one takes `out`.
from flash_attn.cute.interface import _flash_attn_fwd
from flash_attn.cute.utils import create_softcap_scoremod

from .batch import AttentionBatch
from .call import AttentionCall
from .kv_write import give_back, rows_of, write_kv, zero_padding
from .modes import Mode


@cache
def _score_function(softcap: float) -> Any:
    """Made once: flash-attn would make and hash a new one in every call."""
    return create_softcap_scoremod(softcap)


def _attend(batch: AttentionBatch, state: None, call: AttentionCall) -> None:
    write_kv(batch, call)
    q, out = rows_of(call, batch.num_tokens)
    _flash_attn_fwd(
        q,
        batch.kv_cache.k[call.layer],
        batch.kv_cache.v[call.layer],
        cu_seqlens_q=batch.qo_indptr,
        seqused_k=batch.seq_lens,
        max_seqlen_q=batch.max_query_len,
        max_seqlen_k=batch.max_seq_len,
        page_table=batch.block_table,
        softmax_scale=call.scale,
        causal=True,
        window_size_left=None if call.window is None else call.window - 1,
        score_mod=None if call.softcap is None else _score_function(call.softcap),
        out=out,
    )
    zero_padding(batch, call, out)
    give_back(call, batch.num_tokens, out)


MODE = Mode(
    _attend,
    devices={"cuda"},
    capabilities={9, 10, 11},  # it reads pages on these
    dtypes={torch.float16, torch.bfloat16},
    head_dims={64, 80, 96, 128, 256},
    page_sizes={1, 16, 32, 64, 128},
    window=True,
    softcap=True,
    capturable=True,
)
