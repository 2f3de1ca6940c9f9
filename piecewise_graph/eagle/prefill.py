"""Prefill: prompts into both caches, batch by batch, up to the first token and the first draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import BatchBuffers, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable, device_ints, to_device

from .buffers import Buffers
from .forward import COMPILED, EAGER, PIECEWISE
from .models import Models
from .request import Request
from .sampling import FIRST, distribution, draw, uniforms

_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)


def prefill_sizes(most: int) -> list[int]:
    """Row counts that are captured where a prefill batch holds `most` tokens at most."""
    return [size for size in _SIZES if size <= most]


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

    def prepare(self) -> None:
        """Compile, and capture the piecewise tapes on a batch of padding alone, largest first; once."""
        # Those of rounds, too: a batch is padded to the next size, whatever that was made for.
        sizes = [size for size in self.models.target.sizes if size <= self.most]
        if all(self.models.target.is_prepared(self.way, rows) for rows in sizes):
            return
        for rows in sorted(sizes, reverse=True):
            # Of rows that are all alike nothing is proven about padding: tapes would serve exact sizes only.
            ids = torch.arange(rows, dtype=torch.int32, device=self.cache.device) % 2
            positions = ids.clone()
            _, features = self.models.target(
                self.way, self._padding(self.cache, rows), input_ids=ids[None], position_ids=positions[None]
            )
            if self.draft_cache is not None:
                batch = self._padding(self.draft_cache, rows)
                self._draft(batch, ids, positions, features.clone(), self.way)
            if self.way != PIECEWISE:
                return

    def run(self, requests: Sequence[Request]) -> list[int]:
        """The first token of every request, with the state set for its first round. Waits for the device."""
        self.place(requests)
        found = [(piece, self._chunk(piece)) for piece in pieces(requests, self.most)]
        chosen = {
            piece.request.slot: token
            for batch, tokens in found
            for piece, token in zip([p for p in batch if p.is_last], tokens.tolist(), strict=True)
        }
        return [chosen[request.slot] for request in requests]

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let the draft read the tokens of rounds that ran without it; the oldest may be lost."""
        late = [request for request in requests if request.drafted < request.length]
        if not late or self.draft_cache is None:
            return
        kept = self.state.gap.shape[1]
        spans = [(max(r.drafted, r.length - kept), r.length) for r in late]
        rows = [stop - start for start, stop in spans]
        slots = [request.slot for request in late]
        following = [
            t for r, (start, stop) in zip(late, spans, strict=True) for t in r.sequence(start + 1, stop + 1)
        ]
        batch, positions = make_batch(self.draft_cache, self.table, slots, rows, [r.length for r in late])
        owners = self._longs([slot for slot, count in zip(slots, rows, strict=True) for _ in range(count)])
        features = self.state.gap[owners, positions % kept]
        ids = device_ints(following, self.cache.device)
        hidden = self._draft(batch, ids, positions, features, self._any_rows)
        self._end(self._longs(slots), hidden[self._longs([end - 1 for end in accumulate(rows)])])
        for request in late:
            request.drafted = request.length

    def _end(self, slots: Tensor, hidden: Tensor) -> None:
        """Where the next drafts begin."""
        if not len(slots):  # no prompt ended in this chunk
            return
        assert self.models.head is not None
        self.state.hidden.index_copy_(0, slots, hidden)
        self.state.logits.index_copy_(0, slots, self.models.head(self._any_rows, None, hidden=hidden))

    @property
    def _any_rows(self) -> str:
        """How row counts run that nothing is captured for."""
        return EAGER if self.way == EAGER else COMPILED

    def place(self, requests: Sequence[Request]) -> None:
        """Tell the device where the next rounds of `requests` begin, and how they are sampled."""
        slots = self._longs([request.slot for request in requests])
        columns: dict[str, list[Any]] = {
            "seq_lens": [request.length for request in requests],
            "root": [request.tokens[-1] if request.tokens else 0 for request in requests],
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
            if self.way == PIECEWISE:  # the draft's tape overwrites what the target's has left
                features = features.clone()
            self._end(ending, self._draft(attention, ids, positions, features, self.way)[last])
        return chosen

    def _draft(self, attention: Any, ids: Tensor, positions: Tensor, features: Tensor, way: str) -> Tensor:
        assert self.models.extend is not None
        found: Tensor = self.models.extend(
            way, attention, input_ids=ids, positions=positions, features=features
        )
        return found

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
