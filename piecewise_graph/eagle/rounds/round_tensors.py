"""RoundTensors: metadata, attention batches and buffers of one batch size and draft shape."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from piecewise_graph.custom_ops import metadata as md
from piecewise_graph.custom_ops.attention import AttentionBatch

from ..options import DraftShape
from .resources import Resources
from .round_buffers import DRAFT_PROBS, FEATURES, ROUND, Buffers, allocate


@dataclass(frozen=True)
class RoundTensors:
    """Everything that the phases of a round read and write; allocated once, filled in every round.

    Attributes:
        buffers: `ROUND` of round_buffers.py.
        batch: requests and their lengths before the round.
        steps, branches: of the draft; branches None for a chain, both without a draft.
        tree, accepted: of verify and draft-extend.
        draft_batches: of the S - 1 draft forwards.
        verify_batch: of the target's forward.
        extend_batch: of draft-extend; None without a draft.
    """

    shape: DraftShape
    size: int
    buffers: Buffers
    batch: md.Batch
    tree: md.Tree
    accepted: md.Accepted
    steps: md.DraftSteps | None
    branches: md.Branches | None
    draft_batches: tuple[AttentionBatch, ...]
    verify_batch: AttentionBatch
    extend_batch: AttentionBatch | None

    @classmethod
    def make(cls, resources: Resources, shape: DraftShape, size: int, *, sampled: bool) -> RoundTensors:
        """Allocate a round of `size` requests, all of them padding.

        Args:
            sampled: keep the distributions that a chain is drawn from.
        """
        table, target, cache = resources.table, resources.target, resources.cache
        letters = {
            "B": size, "BN": size * shape.nodes, "S": shape.steps, "S+2": shape.steps + 2,
            "P": table.block_table.shape[1], "F": target.feature_size, "V": target.vocab_size,
        }  # fmt: skip
        fields = ROUND + (FEATURES if shape.steps else ())
        fields += DRAFT_PROBS if sampled and not shape.is_tree else ()
        buffers = allocate(fields, letters, dtype=cache.dtype, device=cache.device)
        batch = md.Batch(buffers.requests, buffers.seq_lens, table.block_table, table.page_size)
        tree = md.Tree.allocate(batch, nodes=shape.nodes)
        accepted = md.Accepted.allocate(batch, nodes=shape.nodes, steps=shape.steps)
        verify = AttentionBatch(
            cache,
            block_table=buffers.block_table,
            seq_lens=tree.seq_lens,
            qo_indptr=tree.qo_indptr,
            slot_mapping=tree.slot_mapping,
            max_query_len=shape.nodes,
            max_seq_len=resources.limits.table_tokens,
            query_len=shape.nodes,
            tree_mask=tree.mask if shape.is_tree else None,
        )
        extend = None
        if resources.draft_cache is not None and shape.steps:
            # The same rows, in order: accepted tokens are a chain again.
            extend = replace(
                verify, kv_cache=resources.draft_cache, slot_mapping=accepted.slot_mapping, tree_mask=None
            )
        steps = md.DraftSteps.allocate(batch, steps=shape.steps, topk=shape.topk) if shape.steps else None
        branches = md.Branches.allocate(batch, steps=shape.steps, topk=shape.topk) if shape.is_tree else None
        drafts = _draft_batches(resources, shape, verify, steps, branches)
        return cls(shape, size, buffers, batch, tree, accepted, steps, branches, drafts, verify, extend)

    @property
    def attention_batches(self) -> tuple[AttentionBatch, ...]:
        """Of all forwards."""
        return (*self.draft_batches, self.verify_batch, *filter(None, [self.extend_batch]))

    @property
    def gathered(self) -> md.Gathered:
        """What a round reads of its requests first."""
        return md.Gathered(self.buffers.seq_lens, self.buffers.root, self.buffers.block_table)

    @property
    def mask(self) -> Tensor | None:
        """The tree's mask; None for a chain."""
        return self.tree.mask if self.shape.is_tree else None


def _draft_batches(
    resources: Resources,
    shape: DraftShape,
    verify: AttentionBatch,
    steps: md.DraftSteps | None,
    branches: md.Branches | None,
) -> tuple[AttentionBatch, ...]:
    """Each forward appends k rows to every request; a row of a tree sees its own branch only."""
    cache = resources.draft_cache
    if steps is None or cache is None:
        return ()
    rows = torch.arange(len(verify.seq_lens) + 1, dtype=torch.int32, device=cache.device) * shape.topk
    return tuple(
        replace(
            verify,
            kv_cache=cache,
            seq_lens=steps.seq_lens[step],
            qo_indptr=rows,
            slot_mapping=steps.slot_mapping[step],
            max_query_len=shape.topk,
            query_len=shape.topk,
            tree_mask=branches.mask[:, :, : (step + 1) * shape.topk] if branches else None,
        )
        for step in range(shape.steps - 1)
    )
