"""Workshop: what a speculator's rounds are made of, and the rounds that were made so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

from ..options import DraftShape
from ..rounds.phase_runner import PhaseRunner
from ..rounds.phases import GREEDY, Phases
from ..rounds.prefill import prefill_sizes
from ..rounds.prepared_round import ReadyRound
from ..rounds.round import Round, Sizes
from ..rounds.round_buffers import GAP, STATE, Buffers, allocate
from ..rounds.round_models import Models
from ..rounds.synthetic import Synthetic
from ..rounds.target import TargetModel
from ..rounds.weights import Weights

GAP_TOKENS = 64  # features that are kept of plain rounds, for a draft that has to catch up


@dataclass(frozen=True)
class RoundKey:
    """What tells rounds apart.

    Attributes:
        size: requests, padding included.
        rule: how tokens are chosen, of `phases.RULES`.
        graphs: (phase, way) of each.
        rates: of synthetic acceptance; None = the target decides.
    """

    size: int
    shape: DraftShape
    rule: str
    graphs: tuple[tuple[str, str], ...]
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Workshop:
    """What all rounds share: models, caches, the table of requests and what they carry along.

    Attributes:
        draft_cache: None without a draft.
        made: the rounds so far; `round_for` makes those that are missing.
    """

    models: Models
    sizes: Sizes
    cache: PagedKVCache
    draft_cache: PagedKVCache | None
    table: RequestTable
    state: Buffers
    pool: pg.GraphPool
    weights: Weights
    made: dict[RoundKey, ReadyRound]

    @classmethod
    def make(
        cls,
        model: Any,
        draft: Any,
        shapes: Sequence[DraftShape],
        batch_sizes: Sequence[int],
        paging: Mapping[str, Any],
        options: Mapping[str, Any],
        draft_options: Mapping[str, Any],
        prefill_rows: int,
    ) -> Workshop:
        """Allocate everything that does not depend on a round; nothing is compiled yet.

        Args:
            paging: `max_requests`, `max_seq_len` (with a `margin` that no request gets to keep),
                `page_size`, `num_pages`.
        """
        target = TargetModel(model, draft.config.feature_layers if draft is not None else None)
        sizes = _sizes(model, target, draft, paging["max_seq_len"], paging["margin"])
        paged: dict[str, Any] = {
            "num_pages": paging["num_pages"], "page_size": paging["page_size"],
            "dtype": sizes.dtype, "device": sizes.device,
        }  # fmt: skip
        cache = PagedKVCache.for_model(model.config, **paged)
        draft_cache = None
        if draft is not None:
            config = draft.config
            draft_cache = PagedKVCache(
                num_layers=config.num_layers, kv_heads=config.kv_heads, head_dim=config.head_dim, **paged
            )
        requests = paging["max_requests"]
        table = RequestTable.for_cache(cache, max_requests=requests, max_seq_len=paging["max_seq_len"])
        letters = {
            "R": requests + 1, "H": sizes.hidden, "D": sizes.draft_vocab, "F": sizes.features,
            "G": GAP_TOKENS,
        }  # fmt: skip
        resumes = draft is not None and any(not shape.steps for shape in shapes)
        fields = STATE + (GAP if resumes else ())
        state = allocate(fields, letters, dtype=sizes.dtype, device=sizes.device)
        pool = pg.GraphPool()
        rows = _row_counts(shapes, batch_sizes, prefill_sizes(prefill_rows))
        pooled = {"pool": pool}
        models = Models.make(target, draft, rows, {**options, **pooled}, {**draft_options, **pooled})
        weights = Weights({"target": target} | ({} if draft is None else {"draft": draft}))
        pool.join(sizes.device, weights)
        return cls(models, sizes, cache, draft_cache, table, state, pool, weights, {})

    def round_for(self, key: RoundKey) -> ReadyRound:
        """The round, made and captured where it is asked for the first time."""
        if key not in self.made:
            self.made[key] = self._make(key)
        return self.made[key]

    def _make(self, key: RoundKey) -> ReadyRound:
        shape = key.shape
        made = Round.make(
            shape,
            key.size,
            self.sizes,
            self.table,
            self.cache,
            self.draft_cache,
            sampled=key.rule != GREEDY,
        )
        decreed = None if key.rates is None else Synthetic(key.rates)
        phases = Phases(self.models, made, self.state, key.rule, self.sizes.last_position, decreed)
        bodies: dict[str, Callable[[str], None]] = {"draft": phases.draft, "verify": phases.verify}
        if shape.steps:
            bodies["extend"] = phases.extend
        ways = dict(key.graphs)
        runners = [PhaseRunner(name, body, ways[name], self.pool) for name, body in bodies.items()]
        ready = ReadyRound(phases, runners, self.table, self.weights)
        ready.prepare()
        return ready


def _sizes(model: Any, target: TargetModel, draft: Any, max_seq_len: int, margin: int) -> Sizes:
    config = None if draft is None else draft.config
    return Sizes(
        last_position=max_seq_len - margin - 1,
        hidden=config.hidden_size if config else 1,
        features=target.feature_size,
        vocab=target.vocab_size,
        draft_vocab=config.draft_vocab_size if config else 1,
        max_seq_len=max_seq_len,
        dtype=next(model.parameters()).dtype,
        device=torch.device(model.device),
    )


def _row_counts(
    shapes: Sequence[DraftShape], batches: Sequence[int], prefill: Sequence[int]
) -> dict[str, list[int]]:
    """Row counts of each model's forwards that may be captured."""
    verified = {size * shape.nodes for shape in shapes for size in batches}
    branches = {size * shape.topk for shape in shapes for size in batches}
    return {
        "target": sorted({*verified, *prefill}),
        "extend": sorted({*verified, *prefill}),
        "step": sorted(branches),
        "head": sorted({*branches, *batches}),
    }
