"""Resources: what all rounds of a speculator share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

from ..head.draft import DraftModel
from ..options import PREFILL_SIZES, Limits
from .round_buffers import FEATURE_RING, STATE, Buffers, allocate, allocate_requests
from .round_models import Models
from .target import TargetModel
from .weights import Weights

RING_TOKENS = 64  # features of plain rounds that are kept, for a draft that has to catch up


@dataclass(frozen=True)
class Resources:
    """Models, caches, the request table, and what requests carry from round to round.

    Attributes:
        target: the module behind `models.target`.
        draft_cache: None without a draft.
        state: `REQUEST` and `STATE` of round_buffers.py, by row of the request table.
        pool: memory and stream of all graphs.
        ranks: who runs the target together.
    """

    limits: Limits
    target: TargetModel
    models: Models
    cache: PagedKVCache
    draft_cache: PagedKVCache | None
    table: RequestTable
    state: Buffers
    pool: pg.GraphPool
    weights: Weights
    ranks: pg.Ranks

    @classmethod
    def make(
        cls,
        model: Any,
        draft: Any,
        limits: Limits,
        options: Mapping[str, Any],
        draft_options: Mapping[str, Any],
    ) -> Resources:
        """Allocate everything that does not depend on a round; nothing is compiled yet."""
        config = None if draft is None else draft.config
        target = TargetModel(model, None if config is None else config.feature_layers)
        dtype, device = next(model.parameters()).dtype, torch.device(model.device)
        paged: dict[str, Any] = {
            "num_pages": limits.num_pages, "page_size": limits.page_size, "dtype": dtype, "device": device,
        }  # fmt: skip
        cache = PagedKVCache.for_model(model, **paged)
        draft_cache = None if draft is None else PagedKVCache.for_model(draft, **paged)
        table = RequestTable.for_cache(
            cache, max_requests=limits.max_requests, max_seq_len=limits.table_tokens
        )
        letters = {"R": limits.max_requests + 1, "F": target.feature_size, "G": RING_TOKENS}
        letters["H"] = config.hidden_size if config else 1
        may_fall_behind = draft is not None and any(not shape.steps for shape in limits.shapes)
        fields = STATE + (FEATURE_RING if may_fall_behind else ())
        state = Buffers(
            allocate(fields, letters, dtype=dtype, device=device) | allocate_requests(letters["R"], device)
        )
        pool = pg.GraphPool()
        # pg.compile trusts models of transformers, and does not see one through TargetModel and its taps.
        # Our own drafts do the same with one row as with several, too.
        trusted, is_theirs = {"one_token": "trusted"}, type(model).__module__.startswith("transformers.")
        target_options = {**(trusted if is_theirs else {}), **options, "pool": pool}
        draft_options = {**(trusted if isinstance(draft, DraftModel) else {}), **draft_options, "pool": pool}
        weights = Weights(target, draft)
        models = Models.make(target, draft, _row_counts(limits), target_options, draft_options, weights.hold)
        pool.join(device, weights)
        ranks = pg.ranks_of(model, pg.PiecewiseConfig.from_options(target_options).rank_timeout)
        return cls(limits, target, models, cache, draft_cache, table, state, pool, weights, ranks)

    @property
    def device(self) -> torch.device:
        return self.cache.device


def _row_counts(limits: Limits) -> dict[str, list[int]]:
    """Row counts of each model's forwards that may be captured."""
    prefill = [size for size in PREFILL_SIZES if size <= limits.prefill_rows]
    verified = {size * shape.nodes for shape in limits.shapes for size in limits.batch_sizes}
    branches = {size * shape.topk for shape in limits.shapes for size in limits.batch_sizes}
    target = sorted({*verified, *prefill, *limits.mixed_rows})
    # Rows that ask for logits beside prompts: those of a round, and the last one of every prompt.
    asked = max(verified) + limits.max_requests
    return {
        "target": target,
        "target_head": sorted({*verified, *target[: bisect_left(target, asked) + 1]}),
        "extend": target,
        "step": sorted(branches),
        "head": sorted({*branches, *limits.batch_sizes}),
    }
