"""Prompts on their way into both caches, chunk by chunk, up to the first token and the first draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch, BatchBuffers, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable, device_ints, to_device
from piecewise_graph.custom_ops.token_choice import argmax, uniforms

from ..options import COMPILED, EAGER, PIECEWISE
from ..request import Request
from .results import Result
from .round_buffers import Buffers
from .round_models import Models
from .sampling import FIRST, distribution, draw

_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)


def prefill_sizes(most: int) -> list[int]:
    """Row counts that are captured where a prefill batch holds `most` tokens at most."""
    return [size for size in _SIZES if size <= most]


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop - 1` of what a request's K and V are computed from.

    That is its prompt; for a request that had to give its pages back, also the tokens that it had by then,
    of which the last one is where it goes on: `root`.

    Attributes:
        is_last: nothing is left to prefill after it.
    """

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        return self.stop == self.request.length

    @property
    def root(self) -> int | None:
        """The token after the last piece, where it is known already."""
        return self.request.tokens[-1] if self.request.tokens else None


@dataclass(frozen=True)
class Chunk:
    """Pieces as the device sees them, one row per token.

    Attributes:
        ids, positions: int32 `[rows]`.
        following: int32 `[rows]`, the token after each; 0 where it is not chosen yet.
        attention, draft_attention: over the target's cache and the draft's.
        ends: int64 `[n]`, last rows of the pieces that are the last of their requests.
        slots: int64 `[n]`, where these requests stand.
        done: these requests.
    """

    ids: Tensor
    positions: Tensor
    following: Tensor
    attention: AttentionBatch
    draft_attention: AttentionBatch | None
    ends: Tensor
    slots: Tensor
    done: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return self.ids.shape[0]


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

    def lay_out(self, pieces: Sequence[Piece]) -> Chunk:
        """Send pieces to the device; their pages are reserved. Waits for nothing."""
        slots = [piece.request.slot for piece in pieces]
        rows, lengths = [p.stop - p.start for p in pieces], [p.stop for p in pieces]
        attention, positions = make_batch(self.cache, self.table, slots, rows, lengths)
        draft_attention = None
        if self.draft_cache is not None:
            draft_attention, _ = make_batch(self.draft_cache, self.table, slots, rows, lengths)
        tokens = [piece.request.sequence(piece.start, piece.stop + 1) for piece in pieces]
        following = [[*more[1:], 0][:count] for more, count in zip(tokens, rows, strict=True)]
        device = self.cache.device
        return Chunk(
            device_ints([t for more, n in zip(tokens, rows, strict=True) for t in more[:n]], device),
            positions,
            device_ints([t for more in following for t in more], device),
            attention,
            draft_attention,
            self._longs([end - 1 for p, end in zip(pieces, accumulate(rows), strict=True) if p.is_last]),
            self._longs([piece.request.slot for piece in pieces if piece.is_last]),
            tuple(piece for piece in pieces if piece.is_last),
        )

    def launch(self, chunk: Chunk) -> Result:
        """A batch of prompts alone. What is found is under way when this returns."""
        logits, features = self.models.target(
            self.way, chunk.attention, input_ids=chunk.ids[None], position_ids=chunk.positions[None]
        )
        if self.draft_cache is not None and self.way == PIECEWISE:
            features = features.clone()  # the draft's tape overwrites what the target's has left
        chosen = self.choose(chunk, logits)
        result = Result.of(None, chosen)
        self.extend(chunk, features, chosen)
        return result

    def choose(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """int32 `[n]`: the tokens after the prompts that end here, from `logits [rows, V]`."""
        chosen = self._choose(logits[chunk.ends], chunk)
        known = [piece.root for piece in chunk.done]
        if any(token is not None for token in known):
            given = device_ints([-1 if token is None else token for token in known], self.cache.device)
            chosen = torch.where(given < 0, chosen, given)
        self.state.root.index_copy_(0, chunk.slots, chosen)
        return chosen

    def extend(self, chunk: Chunk, features: Tensor, chosen: Tensor) -> None:
        """Let the draft read the same rows, `features [rows, F]`."""
        if chunk.draft_attention is None:
            return
        ids = self.draft_ids(chunk, chosen)
        self.end(chunk, self._draft(chunk.draft_attention, ids, chunk.positions, features, self.way))

    def draft_ids(self, chunk: Chunk, chosen: Tensor) -> Tensor:
        """int32 `[rows]`: what the draft reads in each row."""
        return chunk.following.index_copy(0, chunk.ends, chosen)

    def end(self, chunk: Chunk, hidden: Tensor) -> None:
        """Keep where the first drafts begin, of `hidden [rows, H]`."""
        self._end(chunk.slots, hidden[chunk.ends])

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
        hidden = self._draft(batch, ids, positions, features, self.any_rows)
        self._end(self._longs(slots), hidden[self._longs([end - 1 for end in accumulate(rows)])])
        for request in late:
            request.drafted = request.length

    def _end(self, slots: Tensor, hidden: Tensor) -> None:
        """Where the next drafts begin."""
        if not len(slots):  # no prompt ended in this chunk
            return
        assert self.models.head is not None
        self.state.hidden.index_copy_(0, slots, hidden)
        self.state.logits.index_copy_(0, slots, self.models.head(self.any_rows, None, hidden=hidden))

    @property
    def any_rows(self) -> str:
        """How row counts run that nothing is captured for."""
        return EAGER if self.way == EAGER else COMPILED

    def place(self, requests: Sequence[Request]) -> None:
        """Tell the device where the next rounds of `requests` begin, and how they are sampled."""
        if not requests:
            return
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

    def _draft(self, attention: Any, ids: Tensor, positions: Tensor, features: Tensor, way: str) -> Tensor:
        assert self.models.extend is not None
        found: Tensor = self.models.extend(
            way, attention, input_ids=ids, positions=positions, features=features
        )
        return found

    def _choose(self, logits: Tensor, chunk: Chunk) -> Tensor:
        """int32 `[n]` tokens after the prompts of `chunk.done`, `logits [n, V]`."""
        samplings = [piece.request.sampling for piece in chunk.done]
        if all(sampling.greedy for sampling in samplings):
            return argmax(logits)
        filters = ("top_k", "top_p") if any(sampling.filtered for sampling in samplings) else ()
        probs = distribution(logits, *(self.state[name][chunk.slots] for name in ("temperature", *filters)))
        lengths = self.state.seq_lens[chunk.slots]
        return draw(
            probs, uniforms(self.state.seed[chunk.slots], lengths, torch.full_like(lengths, FIRST))
        ).int()

    def _longs(self, values: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.cache.device)

    def _padding(self, cache: PagedKVCache, rows: int) -> Any:
        """A batch of `rows` rows without a request."""
        buffers = BatchBuffers(cache, self.table, num_requests=1, num_tokens=rows, max_query_len=rows)
        buffers.fill([], [], [], padded=True)
        return buffers.batch
