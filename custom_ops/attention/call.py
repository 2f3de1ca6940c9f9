"""AttentionCall: one attention call of a model, as every implementation gets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import AttentionError


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
        for what, remedy in self._faults():
            raise AttentionError.bad_call(what, remedy)
        heads, head_dim = self.q.shape[1:]
        kv_heads = self.k.shape[1]
        traits = _traits(
            self.implementation, self.q.device.type, self.q.dtype, heads, kv_heads, head_dim,
            self.window, self.softcap,
        )  # fmt: skip
        object.__setattr__(self, "traits", traits)
        rows = self.q.shape[0]
        object.__setattr__(self, "rows", (rows, rows if self.live is None else self.live))

    def _faults(self) -> Iterator[tuple[str, str]]:
        q, k, v = self.q, self.k, self.v
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}"
        if not q.dim() == k.dim() == 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
            yield shapes, "pass q, k and v of the same new tokens, [rows, heads, head_dim]; v shaped as k"
        elif k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            yield shapes, "make the heads of q a multiple of those of k and v"
        if not q.dtype == k.dtype == v.dtype:
            yield f"q is {q.dtype}, k {k.dtype}, v {v.dtype}", "convert them to one dtype first"
        if self.window is not None and self.window < 1:
            yield f"window={self.window}", "pass how many tokens a row sees, itself included; None = all"
        if self.softcap is not None and not self.softcap > 0:
            yield f"softcap={self.softcap}", "pass the positive bound of the scores; None = unbounded"


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
