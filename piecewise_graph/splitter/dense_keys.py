"""`F.scaled_dot_product_attention`, as tapes and uncaptured forwards call it.

Note [Expanded keys]
Under a mask, torch's memory-efficient CUDA kernel is wrong for some key counts where keys and values are
expanded (stride 0: one KV head for all query heads). Seen in torch 2.11 on an H200: off by 2.0 at 65 float32
keys, where dense copies and the math kernel are right. Multi-query models of transformers expand them when
they are compiled, though not in eager. So expanded keys and values are copied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, *options: Any, **named: Any
) -> Tensor:
    """torch's, on dense keys and values (Note [Expanded keys])."""
    return functional.scaled_dot_product_attention(query, _dense(key), _dense(value), *options, **named)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.contiguous() if 0 in tensor.stride() else tensor
