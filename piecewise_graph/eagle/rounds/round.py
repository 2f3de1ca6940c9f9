"""Round: its three phases, prepared, and what the host does around them.

Prompts may share a round's forwards: the rows of a chunk of prompts stand behind those of the round, so that
one read of the weights serves both. Their number differs from step to step, so verify and draft-extend are no
graphs then. They run line by line, their forwards as tapes or compiled code (compiled_forward.py). A tree has
a mask for each of its rows, which prompts have not: they run beside a tree, not together with it.

Source: chunked prefill, Sarathi-Serve (arXiv 2403.02310).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from piecewise_graph.custom_ops.attention import AttentionBatch, compile_ahead, joined
from piecewise_graph.custom_ops.kv_cache import overwrite_ints

from ..options import FULL
from ..request import Request
from .phase_runner import PhaseRunner, named, seconds_of
from .phases import Phases
from .prefill import Chunk, Piece, Prefill
from .round_launch import Launch


class Round:
    """Runs rounds of one shape and batch size.

    Args:
        phases: what the runners run.
        runners: draft, verify, and draft-extend where there is a draft.
        prefill: of the prompts that may share the forwards.
    """

    def __init__(self, phases: Phases, runners: Sequence[PhaseRunner], prefill: Prefill) -> None:
        self.tensors, self.runners = phases.tensors, tuple(runners)
        self._phases, self._prefill, self._resources = phases, prefill, prefill.resources
        self._slots: list[int] = [0] * phases.tensors.size
        self._was_prepared = False

    @property
    def rows(self) -> int:
        """Rows of its target forward."""
        return self.tensors.verify_batch.num_tokens

    def launch(self, requests: Sequence[Request], pieces: Sequence[Piece] = ()) -> Launch:
        """Start a round, with these prompts in its forwards or without any. Waits for nothing."""
        self.ensure_prepared()
        self._fill([request.slot for request in requests])
        self._resources.table.flush()
        shape, result = self.tensors.shape, self.tensors.buffers.result
        draft, verify, *rest = self.runners
        draft()
        if pieces:
            chunk = self._prefill.lay_out(pieces)  # while the device drafts
            longest = max((request.length for request in requests), default=0)
            both = joined(self.tensors.verify_batch, chunk.attention, longest)
            with named("verify"):
                first, features = self._verify_with(chunk, both)
            launch = Launch(result, first, shape, requests, chunk.started)
            with named("extend"):
                self._extend_with(chunk, both, first, features)
            return launch
        verify()
        launch = Launch(result, None, shape, requests)
        for extend in rest:
            extend()
        return launch

    def compile_ahead(self) -> None:
        """Have its kernels compiled in other threads, those of its attention and of greedy phases."""
        self._phases.compile_ahead()
        captured = any(runner.mode == FULL for runner in self.runners)
        for batch in self.tensors.attention_batches:
            compile_ahead(batch, captured=captured)

    def prepare(self) -> None:
        """Compile and capture every phase, over padded requests only: no request's tokens change."""
        self._fill([])
        for runner in self.runners:
            runner.prepare(self._resources.device)
        if any(runner.mode == FULL for runner in self.runners):
            self._resources.weights.hold()
        self._was_prepared = True

    def ensure_prepared(self) -> None:
        """Prepare it where it never was, or where graphs were dropped (by pg.reset for instance)."""
        if not self._was_prepared or not all(runner.is_ready for runner in self.runners):
            self.prepare()

    def seconds(self) -> dict[str, float]:
        """Every phase's share of the median time of a round of padded requests, which changes no tokens.

        Timed alone, a phase includes a wait for the device, which takes as long as a small phase does.
        """
        self.ensure_prepared()
        self._fill([])
        device = self._resources.device
        alone = {runner.name: seconds_of([runner], device) for runner in self.runners}
        share = seconds_of(self.runners, device) / sum(alone.values())
        return {name: seconds * share for name, seconds in alone.items()}

    def _verify_with(self, chunk: Chunk, both: AttentionBatch) -> tuple[Tensor, Tensor]:
        """The target over the draft tokens and the prompts, whose requests are `both`.

        Returns:
            (first tokens of the prompts that end here int32 `[n]`, features of the prompts `[rows, F]`).
        """
        tree, models, mode = self.tensors.tree, self._resources.models, self._prefill.mode
        hidden, features = models.target(
            mode,
            both,
            input_ids=torch.cat([tree.tokens, chunk.ids])[None],
            position_ids=torch.cat([tree.positions, chunk.positions])[None],
        )
        rows = self.rows
        asked = torch.cat([hidden[:rows], hidden[rows:][chunk.ends]])
        logits = models.target_head(mode, None, hidden=asked)
        self._phases.accept(logits[:rows], features[:rows])
        # A copy, since kernels that choose are made ahead for logits that begin at a multiple of 16 bytes.
        return self._prefill.choose(chunk, logits[rows:].clone()), features[rows:]

    def _extend_with(self, chunk: Chunk, both: AttentionBatch, first: Tensor, features: Tensor) -> None:
        """The draft over the accepted tokens and the prompts, whose requests are `both`."""
        batch, extend = self.tensors.extend_batch, self._resources.models.extend
        if batch is None:  # plain decoding drafts nothing
            self._prefill.extend(chunk, features, first)
            return
        assert extend is not None
        ids, positions, accepted_features = self._phases.accepted_rows()
        hidden = extend(
            self._prefill.mode,
            both.over(batch.kv_cache),  # accepted tokens of a chain stay in their slots
            input_ids=torch.cat([ids, chunk.draft_ids(first)]),
            positions=torch.cat([positions, chunk.positions]),
            features=torch.cat([accepted_features, features]),
        )
        rows = batch.num_tokens
        self._phases.keep(hidden[:rows])
        self._prefill.keep(chunk.slots, hidden[rows:][chunk.ends])

    def _fill(self, slots: list[int]) -> None:
        """Send the batch's slots to the device, unless they are those of the round before."""
        slots = slots + [0] * (self.tensors.size - len(slots))
        if slots != self._slots:
            overwrite_ints(self.tensors.buffers.requests, slots)
            self._slots = slots
