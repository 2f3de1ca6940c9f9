"""The three phases of a round: draft, verify, draft-extend. A newcomer should be able to check them by eye.

    draft    guess the next S tokens of every request, from the hidden state that draft-extend left
    verify   let the target compute all guesses at once; keep those that it would have chosen itself
    extend   let the draft read what the target computed, and end where the next draft begins

Each runs on the device from the first line to the last, and so may be one CUDA graph. B requests, N rows of
each in the target's forward, k branches, S steps (round_buffers.py has the letters).

Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840); draft-extend with a fixed number
of rows: sglang#6606.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.token_choice import largest, uniforms

from .round import Round
from .round_buffers import Buffers
from .round_models import Models
from .sampling import ACCEPT, DRAFT, SYNTHETIC, distribution, draw
from .synthetic import Synthetic

GREEDY, SAMPLED, FILTERED = RULES = ("greedy", "sampled", "filtered")


@dataclass(frozen=True)
class Phases:
    """What the phases of one round need.

    Attributes:
        state: what requests carry from round to round, by their row in the request table.
        rule: how tokens are chosen: all greedy, some sampled, some of these from the top k or p only.
        last_position: of the longest request that there can be.
        synthetic: acceptance that is decreed, not found; None = the target decides.
    """

    models: Models
    round: Round
    state: Buffers
    rule: str
    last_position: int
    synthetic: Synthetic | None = None

    def draft(self, way: str) -> None:
        """Guess, and lay the guesses out for the target. Without steps the root alone is laid out."""
        round, buffers = self.round, self.round.buffers
        _begin(round, self.state)
        if round.branches is not None:
            self._draft_tree(way, round.branches)
            branches = round.branches
            listed = {"scores": branches.all_scores, "parents": branches.all_parents}
            md.build_tree(round.batch, buffers.root, branches.all_tokens, round.tree, **listed)
        else:
            if round.steps is not None:
                self._draft_chain(way, round.steps)
            md.build_tree(round.batch, buffers.root, buffers.drafts, round.tree)

    def verify(self, way: str) -> None:
        """The target's forward over the guesses, what is accepted of them, and the lengths that follow."""
        ids, positions = self.guesses()
        batch = self.round.verify_batch
        self.accept(*self.models.target(way, batch, input_ids=ids[None], position_ids=positions[None]))

    def extend(self, way: str) -> None:
        """The draft over what was accepted: its K and V become those of the target's features."""
        assert self.models.extend is not None
        ids, positions, features = self.accepted_rows()
        batch = self.round.extend_batch
        hidden = self.models.extend(way, batch, input_ids=ids, positions=positions, features=features)
        self.leave(way, hidden)

    def guesses(self) -> tuple[Tensor, Tensor]:
        """(ids, positions) int32 `[B*N]` for the target."""
        # Rows past the end of the longest request are never emitted, but a table may end there.
        return self.round.tree.tokens, self.round.tree.positions.clamp(max=self.last_position)

    def accept(self, logits: Tensor, features: Tensor) -> None:
        """Keep of the guesses what the target's `logits [B*N, V]` agree with, and where requests are then."""
        round, accepted = self.round, self.round.accepted
        round.buffers.features.copy_(features)
        self._accept(logits)
        requests = round.buffers.requests.long()
        if not round.shape.steps and "gap" in self.state:
            gap = self.state.gap
            gap[requests, round.buffers.seq_lens % gap.shape[1]] = features
        self.state.seq_lens.index_copy_(0, requests, accepted.new_seq_lens)
        self.state.root.index_copy_(0, requests, accepted.bonus)
        torch.cat([accepted.out_tokens, accepted.accept_length[:, None]], 1, out=round.buffers.result)

    def accepted_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, positions int32 `[B*N]`, features `[B*N, F]`) for the draft: N rows of every request."""
        accepted, features = self.round.accepted, self.round.buffers.features
        if self.round.shape.is_tree:  # the path's rows lie apart, and accepting has permuted its slots
            _look_up_pages(self.round)
            features = features[accepted.hidden_index]
        return accepted.input_ids, accepted.positions, features

    def leave(self, way: str, hidden: Tensor) -> None:
        """Keep where the next draft begins, of `hidden [B*N, H]`."""
        assert self.models.head is not None
        hidden = hidden[self.round.accepted.select_index]
        requests = self.round.buffers.requests.long()
        self.state.hidden.index_copy_(0, requests, hidden)
        self.state.logits.index_copy_(0, requests, self.models.head(way, None, hidden=hidden))

    def _draft_chain(self, way: str, steps: md.DraftSteps) -> None:
        round, models = self.round, self.models
        assert models.step is not None and models.head is not None
        hidden, logits = self._left_by_extend()
        md.draft_steps(round.batch, steps)
        for step in range(round.shape.steps):
            token = self._guess(logits, step)
            round.buffers.drafts[:, step] = token
            if step < round.shape.steps - 1:
                batch, positions = round.draft_batches[step], steps.positions[step]
                hidden = models.step(way, batch, input_ids=token, positions=positions, hidden=hidden)
                logits = models.head(way, None, hidden=hidden)

    def _guess(self, logits: Tensor, step: int) -> Tensor:
        """int32 `[B]`, of the target's vocabulary; kept with their distribution where they are drawn."""
        draft, round = self.models.draft, self.round
        if self.rule == GREEDY:
            return draft.to_target(largest(logits))
        probs = self._distribution(logits)
        target_ids = draft.to_target(torch.arange(probs.shape[-1], device=probs.device))
        spread = torch.zeros_like(round.buffers.draft_probs[:, step])
        probs = spread.index_add_(1, target_ids, probs)
        round.buffers.draft_probs[:, step] = probs
        return draw(probs, self._uniforms(torch.full_like(round.batch.seq_lens, DRAFT + step))).int()

    def _draft_tree(self, way: str, branches: md.Branches) -> None:
        round, models = self.round, self.models
        assert round.steps is not None and models.step is not None and models.head is not None
        hidden, logits = self._left_by_extend()
        md.draft_steps(round.batch, round.steps)
        for level in range(round.shape.steps):
            probs, tokens = self._children(logits)
            md.select_branches(round.batch.requests, level, probs, tokens, branches)
            if level < round.shape.steps - 1:
                hidden = models.step(
                    way,
                    round.draft_batches[level],
                    input_ids=branches.tokens.flatten(),
                    positions=round.steps.positions[level],
                    hidden=hidden[branches.hidden_index],
                )
                logits = models.head(way, None, hidden=hidden)

    def _children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k most likely next tokens of every branch, `[B, 1, k]` of the root and `[B, k, k]` below it."""
        topk = self.round.shape.topk
        logits = logits.float()
        best = logits.topk(topk, -1)
        probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        tokens = self.models.draft.to_target(best.indices)
        shape = self.round.size, -1, topk
        return probs.view(shape), tokens.view(shape)

    def _accept(self, logits: Tensor) -> None:
        round, tree, accepted = self.round, self.round.tree, self.round.accepted
        size, nodes = round.size, round.shape.nodes
        if self.synthetic is not None:
            number = self._uniforms(SYNTHETIC + self.state.place[round.buffers.requests])
            chosen = self.synthetic.choices(tree.tokens.view(size, nodes), round.mask, number)
            md.accept_greedy(round.batch, tree.tokens, chosen, accepted, mask=round.mask)
        elif self.rule == GREEDY:
            md.accept_greedy(round.batch, tree.tokens, largest(logits), accepted, mask=round.mask)
        else:
            probs = self._distribution(logits.view(size, nodes, -1))
            use = torch.arange(ACCEPT, ACCEPT + nodes, device=probs.device)
            uniform = self._uniforms(use.expand(size, -1))
            if round.shape.is_tree or not round.shape.steps:
                md.accept_tree(round.batch, tree.tokens, probs, uniform, accepted, mask=round.mask)
            else:
                drawn = round.buffers.draft_probs
                md.accept_chain(round.batch, tree.tokens, probs, drawn, uniform, accepted)

    def _distribution(self, logits: Tensor) -> Tensor:
        """What each request draws from; `logits [B, ..., V]`."""
        more = [1] * (logits.dim() - 2)
        names = ("temperature", "top_k", "top_p") if self.rule == FILTERED else ("temperature",)
        requests = self.round.buffers.requests
        return distribution(logits, *(self.state[name][requests].view(-1, *more) for name in names))

    def _uniforms(self, use: Tensor) -> Tensor:
        """One number per request and use, `use [B]` or `[B, n]`."""
        more = [1] * (use.dim() - 1)
        seed = self.state.seed[self.round.buffers.requests].view(-1, *more)
        return uniforms(seed, self.round.batch.seq_lens.view(-1, *more), use)

    def _left_by_extend(self) -> tuple[Tensor, Tensor]:
        requests = self.round.buffers.requests
        return self.state.hidden[requests], self.state.logits[requests]


def _begin(round: Round, state: Buffers) -> None:
    """Where the round's requests are now."""
    buffers = round.buffers
    torch.index_select(state.seq_lens, 0, buffers.requests, out=buffers.seq_lens)
    torch.index_select(state.root, 0, buffers.requests, out=buffers.root)
    _look_up_pages(round)


def _look_up_pages(round: Round) -> None:
    buffers: Any = round.buffers
    torch.index_select(round.batch.table, 0, buffers.requests, out=buffers.block_table)
