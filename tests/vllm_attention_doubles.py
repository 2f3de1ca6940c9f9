"""A double of vLLM 0.23.0's FlashAttention: what a layer's attention is called with, and what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WIDTH, PAGE = 8, 4  # of hidden states and of the one head; tokens


@dataclass
class Metadata:
    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool = True
    use_cascade: bool = False


class FlashAttentionImpl:
    """Of one layer, with one head; loops over requests and rows."""

    attn_type, kv_cache_dtype, batch_invariant_enabled, dcp_world_size = "decoder", "auto", False, 1
    alibi_slopes: Any = None
    sinks: Any = None
    kv_sharing_target_layer_name: str | None = None

    def __init__(self, window: int | None = None, softcap: float = 0) -> None:
        self.num_heads = self.num_kv_heads = 1
        self.head_size, self.scale, self.logits_soft_cap = WIDTH, 0.3, softcap
        self.sliding_window = (-1, -1) if window is None else (window - 1, 0)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, pages: Tensor, slots: Tensor
    ) -> None:
        """Keys may be longer than the slots, and slots of -1 are not written: so does vLLM's kernel."""
        live = slots >= 0
        for which, new in enumerate((key, value)):
            at = slots[live]
            pages[at // PAGE, which, at % PAGE] = new[: len(slots)][live]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:
            return output.fill_(0)
        starts = attn_metadata.query_start_loc.tolist()
        for index, length in enumerate(attn_metadata.seq_lens.tolist()):
            first, last = starts[index], starts[index + 1]
            keys, values = (kv_cache[attn_metadata.block_table[index].long(), which] for which in (0, 1))
            keys, values = (each.flatten(0, 1)[:length, 0] for each in (keys, values))
            for row in range(first, last):
                end = length - (last - 1 - row)
                seen = slice(
                    max(end - 1 - self.sliding_window[0], 0) if self.sliding_window[0] >= 0 else 0, end
                )
                scores = keys[seen] @ query[row, 0] * self.scale
                if self.logits_soft_cap:
                    scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
                output[row, 0] = torch.softmax(scores, 0) @ values[seen]
        return output
