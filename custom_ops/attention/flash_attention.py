"""flash-attn 4 (`flash_attn.cute`): ragged batches, all lengths on the device, so it may be captured.

Its kernels are compiled at their first call, about three seconds for each dtype, head_dim, group, and window
or soft cap or not: in the run that warms a graph up, before its capture.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .batch import AttentionBatch
from .call import AttentionCall
from .implementations import Implementation, Mode

try:
    # The public function of the same file allocates its result; this one takes `out`.
    from flash_attn.cute.interface import _flash_attn_fwd
    from flash_attn.cute.utils import create_softcap_scoremod

    from .kv_write import give_back, rows_of, write_kv, zero_padding
except ImportError:
    raise
except Exception as error:  # an installation that does not fit this machine
    raise ImportError(f"flash_attn.cute does not load: {error}") from error


@cache
def _score_function(softcap: float) -> Any:
    """Made once: flash-attn would make and hash a new one in every call."""
    return create_softcap_scoremod(softcap)


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


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


def _limits(call: AttentionCall, batch: AttentionBatch) -> str | None:
    if call.q.is_cuda and _capability(call.q.device) not in (9, 10, 11):
        return "it reads pages on compute capability 9, 10 and 11"
    return None


IMPLEMENTATION = Implementation(
    "flash_attn",
    (
        Mode(
            prepare=lambda batch, call: None,
            attend=_attend,
            devices=frozenset({"cuda"}),
            dtypes=frozenset({torch.float16, torch.bfloat16}),
            head_dims=frozenset({64, 80, 96, 128, 256}),
            page_sizes=frozenset({1, 16, 32, 64, 128}),
            window=True,
            softcap=True,
            capturable=True,
            limits=_limits,
        ),
    ),
)
