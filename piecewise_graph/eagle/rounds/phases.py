"""The three phases of a round: draft, verify, draft-extend.

    draft    propose the next S tokens of every request, from the hidden state that draft-extend left
    verify   let the target compute all draft tokens at once, and accept those that it would have chosen
    extend   let the draft read what the target computed, and keep the state that the next draft starts from

Each phase runs on the device from the first line to the last, so it can be one CUDA graph. B requests, N rows
of each in the target's forward, k branches, S steps (round_buffers.py lists the letters).

Source: EAGLE (arXiv 2401.15077), EAGLE-2 (2406.16858), EAGLE-3 (2503.01840); draft-extend with a fixed number
of rows: sglang#6606.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.token_choice import argmax, compile_argmax_ahead, uniforms

from .resources import RING_TOKENS, Resources
from .round_buffers import Buffers
from .round_tensors import RoundTensors
from .sampling import ACCEPT, DRAFT, SYNTHETIC, distribution, draw
from .synthetic import Synthetic

GREEDY, SAMPLED, FILTERED = RULES = ("greedy", "sampled", "filtered")


@dataclass(frozen=True)
class Phases:
    """The phases of one round, as methods of a graph mode.

    `accept`, `accepted_rows` and `keep` are public because prompts may share the forwards of verify and
    draft-extend: round.py then calls them around a forward of its own.

    Attributes:
        rule: how tokens are chosen: all greedy, some sampled, some of these with top_k or top_p.
        synthetic: synthetic acceptance; None = the target decides.
    """

    resources: Resources
    tensors: RoundTensors
    rule: str
    synthetic: Synthetic | None = None

    def draft(self, mode: str) -> None:
        """Propose tokens, and lay them out for the target. Without steps there is only the root."""
        tensors, buffers = self.tensors, self.tensors.buffers
        md.gather_requests(buffers.requests, tensors.batch.table, self._carried, tensors.gathered)
        if tensors.branches is not None:
            self._draft_tree(mode, tensors.branches)
        elif tensors.steps is not None:
            self._draft_chain(mode, tensors.steps)
        tokens, listed = self._drafted
        md.build_tree(tensors.batch, buffers.root, tokens, tensors.tree, **listed)

    def verify(self, mode: str) -> None:
        """The target's forward over the draft tokens, their acceptance, and the new lengths."""
        tree, batch, models = self.tensors.tree, self.tensors.verify_batch, self.resources.models
        given = {"input_ids": tree.tokens[None], "position_ids": tree.positions[None]}
        hidden, features = models.target(mode, batch, **given)
        self.accept(models.target_head(mode, None, hidden=hidden), features)

    def extend(self, mode: str) -> None:
        """The draft over the accepted tokens: it computes their K and V from the target's features."""
        extend = self.resources.models.extend
        assert extend is not None
        ids, positions, features = self.accepted_rows()
        batch = self.tensors.extend_batch
        self.keep(extend(mode, batch, input_ids=ids, positions=positions, features=features))

    def compile_ahead(self) -> None:
        """Have kernels compiled in other threads: those that lay drafts out, choose and accept greedily.

        Of a tree's that is all but `select_branches`.
        """
        tensors, tree, shape = self.tensors, self.tensors.tree, self.tensors.shape
        batch, (tokens, listed) = tensors.batch, self._drafted
        buffers, accepted = tensors.buffers, tensors.accepted
        md.gather_requests.compile_ahead(buffers.requests, batch.table, self._carried, tensors.gathered)
        md.scatter_accepted.compile_ahead(buffers.requests, accepted, buffers.result, self._carried)
        if tensors.steps is not None:
            md.draft_steps.compile_ahead(batch, tensors.steps)
        md.build_tree.compile_ahead(batch, buffers.root, tokens, tree, **listed)
        if self.rule == GREEDY:
            cache, vocabularies = self.resources.cache, [self.resources.target.vocab_size]
            if shape.steps and not shape.is_tree:
                vocabularies.append(self.resources.models.draft.config.draft_vocab_size)
            for size in vocabularies:
                compile_argmax_ahead(torch.empty(1, size, dtype=cache.dtype, device=cache.device))
            md.accept_greedy.compile_ahead(batch, tree.tokens, tree.tokens, accepted, mask=tensors.mask)

    def accept(self, logits: Tensor, features: Tensor) -> None:
        """Accept the draft tokens that `logits [B*N, V]` of the target agree with; keep `features`."""
        buffers, state = self.tensors.buffers, self._state
        self._accept(logits)
        if self.tensors.shape.steps:
            buffers.features.copy_(features)
        elif "feature_ring" in state:  # for a draft that catches up
            state.feature_ring[buffers.requests.long(), buffers.seq_lens % RING_TOKENS] = features
        md.scatter_accepted(buffers.requests, self.tensors.accepted, buffers.result, self._carried)

    def accepted_rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """(ids, positions int32 `[B*N]`, features `[B*N, F]`) for the draft: N rows of every request."""
        accepted, features = self.tensors.accepted, self.tensors.buffers.features
        if self.tensors.shape.is_tree:  # the path's rows lie apart, and accepting has permuted its slots
            buffers, table = self.tensors.buffers, self.tensors.batch.table
            torch.index_select(table, 0, buffers.requests, out=buffers.block_table)
            features = features[accepted.hidden_index]
        return accepted.input_ids, accepted.positions, features

    def keep(self, hidden: Tensor) -> None:
        """Keep the state that the next draft starts from, of `hidden [B*N, H]`."""
        kept = hidden[self.tensors.accepted.select_index]
        self._state.hidden.index_copy_(0, self.tensors.buffers.requests.long(), kept)

    @property
    def _drafted(self) -> tuple[Tensor, dict[str, Any]]:
        """The tokens that the draft proposes, and how they become the target's inputs."""
        branches = self.tensors.branches
        # Rows past the end of the longest request are never emitted, but a table of positions may end there.
        bound = {"max_position": self.resources.limits.max_seq_len - 1}
        if branches is None:
            return self.tensors.buffers.drafts, bound
        return branches.all_tokens, {"scores": branches.all_scores, "parents": branches.all_parents, **bound}

    @property
    def _state(self) -> Buffers:
        return self.resources.state

    @property
    def _carried(self) -> md.RequestState:
        return md.RequestState(self._state.seq_lens, self._state.root)

    def _draft_chain(self, mode: str, steps: md.DraftSteps) -> None:
        tensors, models = self.tensors, self.resources.models
        assert models.step is not None and models.head is not None
        hidden, logits = self._draft_start(mode)
        md.draft_steps(tensors.batch, steps)
        for step in range(tensors.shape.steps):
            token = self._propose(logits, step)
            tensors.buffers.drafts[:, step] = token
            if step < tensors.shape.steps - 1:
                batch, positions = tensors.draft_batches[step], steps.positions[step]
                hidden = models.step(mode, batch, input_ids=token, positions=positions, hidden=hidden)
                logits = models.head(mode, None, hidden=hidden)

    def _propose(self, logits: Tensor, step: int) -> Tensor:
        """int32 `[B]`, of the target's vocabulary. Keeps the distribution that a token is drawn from."""
        draft, buffers = self.resources.models.draft, self.tensors.buffers
        if self.rule == GREEDY:
            return draft.to_target(argmax(logits))
        probs = self._distribution(logits)
        target_ids = draft.to_target(torch.arange(probs.shape[-1], device=probs.device))
        spread = torch.zeros_like(buffers.draft_probs[:, step])
        probs = spread.index_add_(1, target_ids, probs)
        buffers.draft_probs[:, step] = probs
        return draw(probs, self._uniforms(torch.full_like(buffers.seq_lens, DRAFT + step))).int()

    def _draft_tree(self, mode: str, branches: md.Branches) -> None:
        tensors, models, steps = self.tensors, self.resources.models, self.tensors.steps
        assert steps is not None and models.step is not None and models.head is not None
        hidden, logits = self._draft_start(mode)
        md.draft_steps(tensors.batch, steps)
        for level in range(tensors.shape.steps):
            probs, tokens = self._children(logits)
            md.select_branches(tensors.batch.requests, level, probs, tokens, branches)
            if level < tensors.shape.steps - 1:
                hidden = models.step(
                    mode,
                    tensors.draft_batches[level],
                    input_ids=branches.tokens.flatten(),
                    positions=steps.positions[level],
                    hidden=hidden[branches.hidden_index],
                )
                logits = models.head(mode, None, hidden=hidden)

    def _children(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k most likely next tokens of every branch, `[B, 1, k]` of the root and `[B, k, k]` below it."""
        size, topk = self.tensors.size, self.tensors.shape.topk
        logits = logits.float()
        best = logits.topk(topk, -1)
        # Scores are compared by their bits: a NaN of the draft must not be one.
        probs = (best.values - logits.logsumexp(-1, keepdim=True)).exp().nan_to_num(0.0)
        tokens = self.resources.models.draft.to_target(best.indices)
        shape = size, -1, topk
        return probs.view(shape), tokens.view(shape)

    def _accept(self, logits: Tensor) -> None:
        tensors, tree, accepted = self.tensors, self.tensors.tree, self.tensors.accepted
        batch, mask, size, nodes = tensors.batch, tensors.mask, tensors.size, tensors.shape.nodes
        if self.synthetic is not None:
            uniform = self._uniforms(SYNTHETIC + self._state.request_index[tensors.buffers.requests])
            chosen = self.synthetic.choices(tree.tokens.view(size, nodes), mask, uniform)
            md.accept_greedy(batch, tree.tokens, chosen, accepted, mask=mask)
        elif self.rule == GREEDY:
            md.accept_greedy(batch, tree.tokens, argmax(logits), accepted, mask=mask)
        else:
            probs = self._distribution(logits.view(size, nodes, -1))
            use = torch.arange(ACCEPT, ACCEPT + nodes, device=probs.device)
            uniform = self._uniforms(use.expand(size, -1))
            if tensors.shape.is_tree or not tensors.shape.steps:
                md.accept_tree(batch, tree.tokens, probs, uniform, accepted, mask=mask)
            else:
                drawn_from = tensors.buffers.draft_probs
                md.accept_chain(batch, tree.tokens, probs, drawn_from, uniform, accepted)

    def _distribution(self, logits: Tensor) -> Tensor:
        """The distribution that each request draws from; `logits [B, ..., V]`."""
        more = [1] * (logits.dim() - 2)
        names = ("temperature", "top_k", "top_p") if self.rule == FILTERED else ("temperature",)
        requests = self.tensors.buffers.requests
        return distribution(logits, *(self._state[name][requests].view(-1, *more) for name in names))

    def _uniforms(self, use: Tensor) -> Tensor:
        """One number per request and use, `use [B]` or `[B, n]`."""
        more, buffers = [1] * (use.dim() - 1), self.tensors.buffers
        seed = self._state.seed[buffers.requests].view(-1, *more)
        return uniforms(seed, buffers.seq_lens.view(-1, *more), use)

    def _draft_start(self, mode: str) -> tuple[Tensor, Tensor]:
        """The hidden states `[B, H]` that draft-extend left, and the draft's logits of them."""
        hidden, head = self._state.hidden[self.tensors.buffers.requests], self.resources.models.head
        assert head is not None
        return hidden, head(mode, None, hidden=hidden)
