"""Continuous batching in its smallest form, for tests of the paged op and of full graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention import BatchBuffers, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable


@dataclass
class Request:
    prompt: list[int]
    slot: int
    arrives: int  # round in which it joins
    tokens: list[int] = field(default_factory=list)
    cached: int = 0  # tokens whose K and V are in the cache

    @property
    def pending(self) -> list[int]:
        return (self.prompt + self.tokens)[self.cached :]


class Generator:
    """Greedy generation of several requests on one paged cache; a model call per round.

    Args:
        model: takes `input_ids`, `position_ids` `[1, tokens]` and returns `.logits`.
        full: rounds in which every request decodes run as full graphs, padded to `buckets`.
        chunk: most prompt tokens of one request per round.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        config: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        page_size: int = 16,
        max_requests: int = 8,
        max_seq_len: int = 256,
        full: bool = False,
        buckets: Sequence[int] = (1, 2, 4, 8),
        chunk: int = 1000,
    ) -> None:
        num_pages = 1 + max_requests * -(-max_seq_len // page_size)
        self.model, self.device, self.full, self.chunk = model, device, full, chunk
        self.cache = PagedKVCache.for_model(
            config, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device
        )
        self.table = RequestTable.for_cache(self.cache, max_requests=max_requests, max_seq_len=max_seq_len)
        self.static = {
            bucket: BatchBuffers(
                self.cache, self.table, num_requests=bucket, num_tokens=bucket, max_query_len=1, uniform=True
            )
            for bucket in buckets
        }

    def run(
        self, prompts: Sequence[list[int]], new_tokens: Sequence[int], stagger: int = 0
    ) -> list[list[int]]:
        requests = [
            Request(prompt, self.table.open(), arrives=index * stagger)
            for index, prompt in enumerate(prompts)
        ]
        wanted = dict(zip(map(id, requests), new_tokens, strict=True))
        active, round_number = list(requests), 0
        while active:
            here = [request for request in active if request.arrives <= round_number]
            if here:
                self.step(here)
            for request in [r for r in here if len(r.tokens) >= wanted[id(r)]]:
                active.remove(request)
                self.table.close(request.slot)
            round_number += 1
        return [request.tokens for request in requests]

    def step(self, requests: Sequence[Request]) -> None:
        work = [request.pending[: self.chunk] for request in requests]
        counts, totals = (
            [len(w) for w in work],
            [r.cached + len(w) for r, w in zip(requests, work, strict=True)],
        )
        slots = [request.slot for request in requests]
        self.table.reserve(dict(zip(slots, totals, strict=True)))
        ids = torch.tensor([[token for tokens in work for token in tokens]], device=self.device)
        if self.full and set(counts) == {1}:
            bucket = min(size for size in self.static if size >= len(slots))
            positions = self.static[bucket].fill(slots, counts, totals)[: len(slots)]
            context = {"attention": self.static[bucket].batch, "full_graph": True, "graph_key": "decode"}
        else:
            batch, positions = make_batch(self.cache, self.table, slots, counts, totals)
            context = {"attention": batch}
        best = self.call(ids, positions, context)
        last = torch.tensor(counts).cumsum(0) - 1
        for request, count, row in zip(requests, counts, last.tolist(), strict=True):
            request.cached += count
            if not request.pending:
                request.tokens.append(best[row])

    def call(self, ids: Tensor, positions: Tensor, context: dict[str, Any]) -> list[int]:
        with pg.forward_context(**context):
            logits = self.model(input_ids=ids, position_ids=positions[None].long(), use_cache=False).logits
        return logits[0].argmax(-1).tolist()


@dataclass(frozen=True)
class Alone:
    """Greedy tokens of one request in eager transformers, and how far each was ahead of the second best."""

    tokens: list[int]
    gaps: list[float]

    def first_difference(self, found: list[int]) -> int | None:
        different = [i for i, (a, b) in enumerate(zip(self.tokens, found, strict=True)) if a != b]
        return different[0] if different else None


def alone(model: Callable[..., Any], prompt: list[int], new_tokens: int, device: torch.device) -> Alone:
    """Generate without any cache."""
    ids, gaps = torch.tensor([prompt], device=device), []
    for _ in range(new_tokens):
        best = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2)
        gaps.append(float(best.values[0] - best.values[1]))
        ids = torch.cat([ids, best.indices[:1].view(1, 1)], 1)
    return Alone(ids[0, len(prompt) :].tolist(), gaps)
