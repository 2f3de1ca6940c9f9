"""Prefill: prompts into both caches, chunk by chunk, up to the first token and the first draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch, BatchBuffers, compile_ahead, make_batch
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, device_columns, device_ints
from piecewise_graph.custom_ops.token_choice import argmax, uniforms

from ..options import PIECEWISE
from ..request import Request
from .compiled_forward import Forward
from .resources import Resources
from .round_buffers import send_requests
from .round_launch import Launch
from .sampling import FIRST, distribution, draw

_HOTTEST = torch.finfo(torch.float32).max  # all that is hotter draws alike, and cannot be packed


@dataclass(frozen=True)
class Piece:
    """Tokens `start` to `stop - 1` of a request that are prefilled together.

    They are tokens of its prompt. A preempted request prefills the tokens that it has generated as well, all
    but the last, and goes on from that one: `root`.
    """

    request: Request
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Nothing is left to prefill after it."""
        return self.stop == self.request.length

    @property
    def root(self) -> int | None:
        """The token after the last piece, if it is known already."""
        return self.request.tokens[-1] if self.request.tokens else None


@dataclass(frozen=True)
class Chunk:
    """Pieces as the device sees them, one row per token.

    Attributes:
        ids, positions: int32 `[rows]`.
        following: int32 `[rows]`, the token after each row; 0 where it is not chosen yet.
        attention: over the target's cache.
        ends: int64 `[n]`, last rows of the pieces that are the last of their requests.
        slots: int64 `[n]`, rows of the request table of these requests.
        done: these pieces.
    """

    ids: Tensor
    positions: Tensor
    following: Tensor
    attention: AttentionBatch
    ends: Tensor
    slots: Tensor
    done: tuple[Piece, ...]

    @property
    def started(self) -> tuple[Request | None, ...]:
        """Requests whose first tokens the chunk chooses; None where the next token is known."""
        return tuple(piece.request if piece.root is None else None for piece in self.done)

    def draft_ids(self, chosen: Tensor) -> Tensor:
        """int32 `[rows]`: the tokens that the draft reads, `chosen [n]` those after the prompts."""
        return self.following.index_copy(0, self.ends, chosen)


@dataclass(frozen=True)
class Prefill:
    """Runs prompts through target and draft.

    Attributes:
        mode: graph mode; any but full, since batches differ.
    """

    resources: Resources
    mode: str

    def prepare(self) -> None:
        """Compile, and capture the piecewise tapes on padded rows only, largest first; once."""
        models = self.resources.models
        caches = list(filter(None, [self.resources.cache, self.resources.draft_cache]))
        sizes, asked_sizes = (self._sizes(each) for each in (models.target, models.target_head))
        if all(models.target.is_prepared(self.mode, rows) for rows in sizes):
            return
        foreseen = [batch for cache in caches for rows in sizes for batch in self._foreseen(cache, rows)]
        for batch in foreseen:
            compile_ahead(batch)
        for requests in (1, self.resources.limits.max_requests):
            self._padding(caches[0], 1, requests).compile_ahead()
        if self.mode != PIECEWISE:  # one call compiles for all; one row may want a trace of its own
            sizes, asked_sizes = (sorted({each[0], 1}, reverse=True) for each in (sizes, asked_sizes))
        for rows in sizes:
            # Equal rows would prove nothing about padding, and tapes would serve exact sizes only.
            ids = torch.arange(rows, dtype=torch.int32, device=self.resources.device) % 2
            target, *drafts = (self._padding(cache, rows) for cache in caches)
            hidden, features = models.target(
                self.mode, target.batch, input_ids=ids[None], position_ids=ids.clone()[None]
            )
            for draft in drafts:
                self._draft(draft.batch, ids, ids.clone(), features)
            if rows == sizes[0]:
                for asked in asked_sizes:
                    models.target_head(self.mode, None, hidden=hidden[:asked])

    def padded(self, rows: int) -> int:
        """Rows that the tape of so many has; as many where there is none."""
        return next((size for size in self.resources.models.target.sizes if size >= rows), rows)

    def lay_out(self, pieces: Sequence[Piece]) -> Chunk:
        """Send pieces to the device; their pages are reserved. Waits for nothing."""
        table, device = self.resources.table, self.resources.device
        slots = [piece.request.slot for piece in pieces]
        rows, lengths = [p.stop - p.start for p in pieces], [p.stop for p in pieces]
        attention, positions = make_batch(self.resources.cache, table, slots, rows, lengths)
        tokens = [piece.request.sequence(piece.start, piece.stop + 1) for piece in pieces]
        done = tuple(piece for piece in pieces if piece.is_last)
        ends = [end - 1 for piece, end in zip(pieces, accumulate(rows), strict=True) if piece.is_last]
        ids, following, indices = device_columns(
            [
                [token for more, count in zip(tokens, rows, strict=True) for token in more[:count]],
                [token for more, count in zip(tokens, rows, strict=True) for token in [*more[1:], 0][:count]],
                [*ends, *(piece.request.slot for piece in done)],
            ],
            device,
        )
        last_rows, done_slots = indices.long().view(2, len(done))
        return Chunk(ids, positions, following, attention, last_rows, done_slots, done)

    def launch(self, chunk: Chunk) -> Launch:
        """Start a batch of prompts alone. Waits for nothing."""
        models = self.resources.models
        hidden, features = models.target(
            self.mode, chunk.attention, input_ids=chunk.ids[None], position_ids=chunk.positions[None]
        )
        # A chunk that ends no prompt asks for no logits.
        logits = models.target_head(self.mode, None, hidden=hidden[chunk.ends]) if chunk.done else hidden[:0]
        first = self.choose(chunk, logits)
        launch = Launch(None, first, started=chunk.started)
        self.extend(chunk, features, first)
        return launch

    def choose(self, chunk: Chunk, logits: Tensor) -> Tensor:
        """int32 `[n]`: the tokens after the prompts that end here, from their `logits [n, V]`."""
        chosen = self._choose(logits, chunk)
        known = [piece.root for piece in chunk.done]
        if any(token is not None for token in known):
            given = device_ints([-1 if token is None else token for token in known], self.resources.device)
            chosen = torch.where(given < 0, chosen, given)
        self.resources.state.root.index_copy_(0, chunk.slots, chosen)
        return chosen

    def extend(self, chunk: Chunk, features: Tensor, chosen: Tensor) -> None:
        """Let the draft read the same rows, `features [rows, F]`."""
        cache = self.resources.draft_cache
        if cache is not None:
            ids, attention = chunk.draft_ids(chosen), chunk.attention.over(cache)
            hidden = self._draft(attention, ids, chunk.positions, features)
            self.keep(chunk.slots, hidden[chunk.ends])

    def keep(self, slots: Tensor, hidden: Tensor) -> None:
        """Keep the state that the next drafts of `slots [n]` start from, `hidden [n, H]`."""
        self.resources.state.hidden.index_copy_(0, slots, hidden)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """Let the draft read the tokens of plain rounds; those that the feature ring has lost are skipped."""
        late = [request for request in requests if request.progress.num_drafted < request.length]
        if late:
            self._draft_missed(late)
        for request in requests:
            request.progress.caught_up(request.length)

    def send_state(self, requests: Sequence[Request]) -> None:
        """Tell the device where the next rounds of `requests` start, and how they are sampled."""
        if not requests:
            return
        send_requests(self.resources.state, {request.slot: _sent(request) for request in requests})

    def _draft_missed(self, late: Sequence[Request]) -> None:
        cache, table, ring = (
            self.resources.draft_cache,
            self.resources.table,
            self.resources.state.feature_ring,
        )
        assert cache is not None
        kept = ring.shape[1]
        spans = [(max(r.progress.num_drafted, r.length - kept), r.length) for r in late]
        rows = [stop - start for start, stop in spans]
        slots = [request.slot for request in late]
        following = [
            t for r, (start, stop) in zip(late, spans, strict=True) for t in r.sequence(start + 1, stop + 1)
        ]
        batch, positions = make_batch(cache, table, slots, rows, [r.length for r in late])
        ends = [end - 1 for end in accumulate(rows)]
        every_row = [slot for slot, count in zip(slots, rows, strict=True) for _ in range(count)]
        ids, owners, done, last_rows = device_columns([following, every_row, slots, ends], cache.device)
        hidden = self._draft(batch, ids, positions, ring[owners, positions % kept])
        self.keep(done.long(), hidden[last_rows])

    def _draft(self, attention: Any, ids: Tensor, positions: Tensor, features: Tensor) -> Tensor:
        extend = self.resources.models.extend
        assert extend is not None
        found: Tensor = extend(self.mode, attention, input_ids=ids, positions=positions, features=features)
        return found

    def _choose(self, logits: Tensor, chunk: Chunk) -> Tensor:
        """int32 `[n]` tokens after the prompts of `chunk.done`, `logits [n, V]`."""
        samplings = [piece.request.sampling for piece in chunk.done]
        if all(sampling.greedy for sampling in samplings):
            return argmax(logits)
        state, slots = self.resources.state, chunk.slots
        filters = ("top_k", "top_p") if any(sampling.filtered for sampling in samplings) else ()
        probs = distribution(logits, *(state[name][slots] for name in ("temperature", *filters)))
        lengths = state.seq_lens[slots]
        return draw(probs, uniforms(state.seed[slots], lengths, torch.full_like(lengths, FIRST))).int()

    def _sizes(self, forward: Forward) -> list[int]:
        """Row counts of prompts, largest first.

        The round sizes as well: a prefill batch is padded to the next captured size of any phase.
        """
        limits = self.resources.limits
        most = max({limits.prefill_rows, *limits.mixed_rows})
        return sorted((n for n in forward.sizes if n <= most), reverse=True)

    def _padding(self, cache: PagedKVCache, rows: int, requests: int = 1) -> BatchBuffers:
        """A batch of `rows` rows whose requests are padding."""
        return BatchBuffers(
            cache, self.resources.table, num_requests=requests, num_tokens=rows, max_query_len=rows
        )

    def _foreseen(self, cache: PagedKVCache, rows: int) -> Iterator[AttentionBatch]:
        """Batches whose attention runs the kernels that any prompts of up to `rows` rows each may need.

        One prompt leaves most multiprocessors idle and many do not; short contexts are not split. Prompts
        beside a round need no others, up to 64 requests. Nothing is read, so one row stands for all.
        """
        limits, table = self.resources.limits, self.resources.table
        length = max(rows, limits.prefill_rows) + limits.max_requests
        zeros = torch.zeros(length, dtype=torch.int32, device=cache.device)
        for requests, tokens in ((1, rows), (limits.max_requests, limits.prefill_rows)):
            for longest in (rows, table.max_pages * cache.page_size):
                yield AttentionBatch(
                    cache,
                    block_table=table.block_table[:1].expand(requests, -1),
                    seq_lens=zeros[:requests],
                    qo_indptr=zeros[: requests + 1],
                    slot_mapping=zeros[:tokens],
                    max_query_len=rows,
                    max_seq_len=longest,
                )


def _sent(request: Request) -> dict[str, float]:
    """The fields of `REQUEST` in round_buffers.py."""
    how = request.sampling
    return {
        "seq_lens": request.length,
        "root": request.tokens[-1] if request.tokens else 0,
        "request_index": request.index,
        "temperature": min(how.temperature, _HOTTEST),
        "top_k": how.top_k,
        "top_p": how.top_p,
        "seed": how.seed,
    }
