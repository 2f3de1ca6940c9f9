"""AttentionCall: one attention call of a model, as every implementation gets it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
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
        memo: what depends on this call alone: what implementations keep, and the results of `of_rows`.

    In a captured model the same call object comes back with every batch.

    Raises:
        AttentionError: arguments that cannot belong together.
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
    memo: dict[Any, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        same_tokens = q.dim() == k.dim() == 3 and k.shape == v.shape and q.shape[::2] == k.shape[::2]
        if not same_tokens or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise AttentionError.wrong_shapes(q, k, v)
        if not q.dtype == k.dtype == v.dtype:
            raise AttentionError.mixed_dtypes(q, k, v)
        for name, bound in (("window", self.window), ("softcap", self.softcap)):
            if bound is not None and not bound > 0:
                raise AttentionError.not_positive(name, bound)

    @cached_property
    def rows(self) -> tuple[int, int]:
        """How many rows a batch may describe: with padding, and without."""
        rows = self.q.shape[0]
        return rows, rows if self.live is None else self.live

    def of_rows(self, start: int, stop: int | None) -> AttentionCall:
        """This call for rows `start` to `stop - 1`; None = to the end, padding included."""
        found: AttentionCall | None = self.memo.get((start, stop))
        if found is None:
            q, k, v, out = (tensor[start:stop] for tensor in (self.q, self.k, self.v, self.out))
            live = None if self.live is None or stop is not None else self.live - start
            found = replace(self, q=q, k=k, v=v, out=out, live=live)
            self.memo[start, stop] = found
        return found

    @cached_property
    def traits(self) -> Traits:
        return traits_of(self.q, self.k, self.window, self.softcap, self.implementation)


@dataclass(frozen=True, eq=False)
class Traits:
    """What decides whether an implementation can serve a call; the same object for most layers of a model.

    Traits are compared by identity, because every call looks its batch's step up by them.

    Attributes:
        device: its type.
        group: query heads per KV head.
        deterministic: what a row's sums are made of, and their order, may not depend on its batch.
    """

    implementation: str
    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    softcap: float | None
    deterministic: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def example(self, device: torch.device) -> AttentionCall:
        """A call of one row."""
        q, k = (
            torch.empty(1, heads, self.head_dim, dtype=self.dtype, device=device)
            for heads in (self.heads, self.kv_heads)
        )
        return AttentionCall(
            q, k, k.clone(), q.clone(), 0, 1.0, self.window, self.softcap, self.implementation
        )


def traits_of(q: Tensor, k: Tensor, window: int | None, softcap: float | None, implementation: str) -> Traits:
    """Of a call with these arguments; `q [rows, heads, head_dim]` and `k [rows, kv_heads, head_dim]`."""
    heads, head_dim = q.shape[1:]
    return _traits(
        implementation, q.device.type, q.dtype, heads, k.shape[1], head_dim, window, softcap,
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


_traits = cache(Traits)
