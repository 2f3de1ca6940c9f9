"""Phases of a round whose forwards carry prompts along: one read of the weights serves both.

The rows of a chunk stand behind those of the round. Their number differs from step to step, so these phases
are no graphs of their own: their forwards are tapes, or compiled code (compiled_forward.py). Trees have a
mask for each of their rows, which prompts have not: they run side by side with a chunk, not together.

Source: chunked prefill, Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch

from .phases import Phases
from .prefill import Chunk, Prefill


@dataclass
class Mixed:
    """A round of chains, or of plain decoding, together with a chunk.

    Attributes:
        chosen: int32 `[n]`, first tokens of the prompts that end in the chunk; after `verify`.
    """

    phases: Phases
    prefill: Prefill
    chunk: Chunk
    chosen: Tensor | None = None
    _features: Tensor | None = None

    def verify(self) -> None:
        """The target over the guesses and the prompts, and what follows from it for both."""
        phases, chunk, batch = self.phases, self.chunk, self.phases.round.verify_batch
        ids, positions = phases.guesses()
        logits, features = phases.models.target(
            self.prefill.way,
            joined(batch, chunk.attention),
            input_ids=torch.cat([ids, chunk.ids])[None],
            position_ids=torch.cat([positions, chunk.positions])[None],
        )
        rows = batch.num_tokens
        phases.accept(logits[:rows], features[:rows])
        self._features = features[rows:].clone()  # the next tape overwrites the target's outputs
        self.chosen = self.prefill.choose(chunk, logits[rows:])

    def extend(self) -> None:
        """The draft over what was accepted and over the prompts."""
        phases, chunk, batch = self.phases, self.chunk, self.phases.round.extend_batch
        assert self._features is not None and self.chosen is not None
        if batch is None:  # plain decoding drafts nothing
            self.prefill.extend(chunk, self._features, self.chosen)
            return
        assert phases.models.extend is not None and chunk.draft_attention is not None
        ids, positions, features = phases.accepted_rows()
        hidden = phases.models.extend(
            self.prefill.way,
            joined(batch, chunk.draft_attention),
            input_ids=torch.cat([ids, self.prefill.draft_ids(chunk, self.chosen)]),
            positions=torch.cat([positions, chunk.positions]),
            features=torch.cat([features, self._features]),
        )
        rows = batch.num_tokens
        phases.leave(self.prefill.any_rows, hidden[:rows])
        self.prefill.end(chunk, hidden[rows:])


def joined(first: AttentionBatch, second: AttentionBatch) -> AttentionBatch:
    """The requests of both, over the cache of the first; lengths stay on the device."""
    return AttentionBatch(
        first.kv_cache,
        block_table=torch.cat([first.block_table, second.block_table]),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        qo_indptr=torch.cat([first.qo_indptr, second.qo_indptr[1:] + first.num_tokens]),
        slot_mapping=torch.cat([first.slot_mapping, second.slot_mapping]),
        max_query_len=max(first.max_query_len, second.max_query_len),
        max_seq_len=max(first.max_seq_len, second.max_seq_len),
    )
