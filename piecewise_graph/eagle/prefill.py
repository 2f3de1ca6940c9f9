"""Prefill: prompts into both caches, batch by batch, up to the first token and the first draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import BatchBuffers, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable, device_ints, to_device

from .buffers import Buffers
from .forward import COMPILED, PIECEWISE
from .models import Models
from .request import Request
from .sampling import FIRST, distribution, draw, uniforms


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop - 1` of a request's prompt."""

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.request.prompt)


def pieces(requests: Sequence[Request], most: int) -> Iterator[list[Piece]]:
    """Batches of at most `most` tokens; a prompt that does not fit goes on in the next."""
    batch: list[Piece] = []
    room = most
    for request in requests:
        start = 0
        while start < len(request.prompt):
            stop = min(start + room, len(request.prompt))
            batch.append(Piece(request, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], most
    if batch:
        yield batch


@dataclass(frozen=True)
class Prefill:
    """Runs prompts through target and draft.

    Attributes:
        draft_cache: None without a draft.
        most: rows of one batch.
        way: one of `forward.WAYS` but full: batches differ.
    """

    models: Models
    state: Buffers
    table: RequestTable
    cache: PagedKVCache
    draft_cache: PagedKVCache | None
    most: int
    way: str

    def prepare(self, sizes: Sequence[int]) -> None:
        """Compile, and capture the piecewise tapes of `sizes` on a batch of padding alone, largest first."""
        for rows in sorted(sizes, reverse=True):
            ids = torch.zeros(rows, dtype=torch.int32, device=self.cache.device)
            positions = ids.clone()
            _, features = self.models.target(
                self.way, self._padding(self.cache, rows), input_ids=ids[None], position_ids=positions[None]
            )
            if self.draft_cache is not None:
                self._draft(self._padding(self.draft_cache, rows), ids, positions, features)
            if self.way != PIECEWISE:
                return

    def run(self, requests: Sequence[Request]) -> list[int]:
        """The first token of every request, with the state set for its first round. Waits for the device."""
        self._begin(requests)
        found = [(piece, self._chunk(piece)) for piece in pieces(requests, self.most)]
        chosen = {
            piece.request.slot: token
            for batch, tokens in found
            for piece, token in zip([p for p in batch if p.is_last], tokens.tolist(), strict=True)
        }
        return [chosen[request.slot] for request in requests]

    def _begin(self, requests: Sequence[Request]) -> None:
        """Where rounds will begin, and how requests are sampled."""
        slots = self._longs([request.slot for request in requests])
        columns: dict[str, list[Any]] = {
            "seq_lens": [len(request.prompt) for request in requests],
            "temperature": [request.sampling.temperature for request in requests],
            "top_k": [request.sampling.top_k for request in requests],
            "top_p": [request.sampling.top_p for request in requests],
            "seed": [request.sampling.seed for request in requests],
            "place": [request.index for request in requests],
        }
        for name, values in columns.items():
            column = torch.tensor(values, dtype=self.state[name].dtype)
            self.state[name].index_copy_(0, slots, to_device(column, self.cache.device))

    def _chunk(self, batch: list[Piece]) -> Tensor:
        """First tokens of the requests whose prompts end here."""
        device = self.cache.device
        slots = [piece.request.slot for piece in batch]
        rows, lengths = [p.stop - p.start for p in batch], [p.stop for p in batch]
        tokens = device_ints([t for p in batch for t in p.request.prompt[p.start : p.stop]], device)
        attention, positions = make_batch(self.cache, self.table, slots, rows, lengths)
        logits, features = self.models.target(
            self.way, attention, input_ids=tokens[None], position_ids=positions[None]
        )
        ends = torch.tensor(rows).cumsum(0)[[p.is_last for p in batch]] - 1
        last = self._longs(ends.tolist())
        done = [piece.request for piece in batch if piece.is_last]
        chosen = self._choose(logits[last], done)
        ending = self._longs([request.slot for request in done])
        self.state.root.index_copy_(0, ending, chosen)
        if self.draft_cache is not None:
            following = [
                t for p in batch for t in (*p.request.prompt[p.start + 1 : p.stop + 1], 0)[: p.stop - p.start]
            ]
            ids = device_ints(following, device).index_copy_(0, last, chosen)
            attention, _ = make_batch(self.draft_cache, self.table, slots, rows, lengths)
            hidden = self._draft(attention, ids, positions, features)[last]
            self.state.hidden.index_copy_(0, ending, hidden)
            assert self.models.head is not None
            self.state.logits.index_copy_(0, ending, self.models.head(COMPILED, None, hidden=hidden))
        return chosen

    def _draft(self, attention: Any, ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        assert self.models.extend is not None
        hidden: Tensor = self.models.extend(
            self.way, attention, input_ids=ids, positions=positions, features=features
        )
        return hidden

    def _choose(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """int32 `[n]` tokens after the prompts of `requests`, `logits [n, V]`."""
        if all(request.sampling.greedy for request in requests):
            return logits.argmax(-1).int()
        slots = torch.tensor([request.slot for request in requests], device=logits.device)
        filters = ("top_k", "top_p") if any(r.sampling.filtered for r in requests) else ()
        probs = distribution(logits, *(self.state[name][slots] for name in ("temperature", *filters)))
        lengths = self.state.seq_lens[slots]
        return draw(probs, uniforms(self.state.seed[slots], lengths, torch.full_like(lengths, FIRST))).int()

    def _longs(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.cache.device)

    def _padding(self, cache: PagedKVCache, rows: int) -> Any:
        """A batch of `rows` rows without a request."""
        buffers = BatchBuffers(cache, self.table, num_requests=1, num_tokens=rows, max_query_len=rows)
        buffers.fill([], [], [], padded=True)
        return buffers.batch
