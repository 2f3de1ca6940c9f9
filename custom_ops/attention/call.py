"""AttentionCall: one attention call of a model, as every implementation gets it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of one `piecewise::attention`.

    Attributes:
        q: `[rows, heads, head_dim]`; rows past the batch's tokens are padding.
        k, v: `[rows, kv_heads, head_dim]`, what the batch's tokens add to the cache.
        out: as `q`; written for the batch's tokens.
        layer: index into the KV cache.
        scale: factor of the scores.
        window: a token sees itself and the `window - 1` tokens before it; None = all of them.
        softcap: scores become `softcap * tanh(score / softcap)`; None = as they are.
        live: how many of the rows are tokens of the forward; the rest is padding. None = all.
        memo: an implementation's own, for what depends on this call alone.

    In a captured model the same call object comes back with every batch.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    implementation: str = "auto"
    live: int | None = None
    memo: dict[Any, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = field(init=False)  # how many a batch may describe: with padding, or without
    traits: Traits = field(init=False)

    def __post_init__(self) -> None:
        heads, head_dim = self.q.shape[1:]
        kv_heads = self.k.shape[1]
        traits = _traits(
            self.implementation, self.q.device.type, self.q.dtype, heads, kv_heads, head_dim,
            self.window, self.softcap,
        )  # fmt: skip
        object.__setattr__(self, "traits", traits)
        rows = self.q.shape[0]
        object.__setattr__(self, "rows", (rows, rows if self.live is None else self.live))


@dataclass(frozen=True, eq=False)
class Traits:
    """What decides whether an implementation can serve a call; the same object for most layers of a model.

    Compared by identity: a batch looks its steps up by them in every call.
    """

    implementation: str
    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None


_traits = cache(Traits)
