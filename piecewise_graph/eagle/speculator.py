"""Speculator: a target and its draft, generating for many requests, round by round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.custom_ops.attention.transformers import is_ours
from piecewise_graph.custom_ops.kv_cache import PagedKVCache, RequestTable

from .buffers import STATE, allocate
from .errors import SpeculatorError
from .forward import FULL, PIECEWISE, WAYS
from .models import Models
from .phases import FILTERED, GREEDY, SAMPLED, Phases
from .prefill import Prefill
from .ready import ReadyRound
from .request import Request, check_request, per_request
from .round import Round, Sizes
from .runner import PhaseRunner
from .shapes import DraftShape, Sampling, as_shape
from .statistics import Statistics
from .synthetic import Synthetic
from .target import TargetModel

PHASES = ("draft", "verify", "extend")
_PREFILL_SIZES = (1, 8, 16, 32, 64, 128, 256, 512)


class Speculator:
    """Generates with speculative decoding; what comes out is what the target alone would say.

    Args:
        model: the target, a causal LM of transformers on our attention.
        draft: of `load_draft`; None = plain decoding only.
        shapes: what rounds may look like, the first of them the default: `DraftShape`s, or numbers of steps
            of chains.
        max_requests: that run at the same time; further prompts wait for one to finish.
        max_seq_len: prompt and new tokens of one request together.
        page_size: of the caches; trees need 1.
        num_pages: of the caches; None = enough for `max_requests` of `max_seq_len`.
        batch_sizes: requests that a round is made for, smaller batches are padded; None = powers of 2.
        graphs: how phases run, "full" (the phase is one graph), "piecewise" (its forwards are tapes),
            "compiled" (no graphs) or "eager"; one for all, or a dict of the phases "draft", "verify",
            "extend" and of "prefill", which can be all but "full".
        prefill_rows: tokens that one prefill batch holds at most.
        options, draft_options: of pg.compile for the target and for the draft's parts, such as
            `merge_linears=True` or `specialize=[4]`.
        synthetic: decree acceptance, for models with random weights: a mean accept length or rates per
            position (synthetic.py).

    Raises:
        SpeculatorError: target, draft, shapes or graphs do not fit together.
    """

    def __init__(
        self,
        model: Any,
        draft: Any = None,
        *,
        shapes: Sequence[DraftShape | int] = (3,),
        max_requests: int = 8,
        max_seq_len: int = 1024,
        page_size: int = 1,
        num_pages: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        graphs: str | Mapping[str, str] = "full",
        prefill_rows: int = 512,
        options: Mapping[str, Any] | None = None,
        draft_options: Mapping[str, Any] | None = None,
        synthetic: float | Sequence[float] | None = None,
    ) -> None:
        self.shapes = tuple(dict.fromkeys(map(as_shape, shapes)))
        self.graphs = _ways(graphs)
        self.batch_sizes = _batch_sizes(batch_sizes, max_requests)
        self.max_requests, self.max_seq_len = max_requests, max_seq_len
        self._decreed = {
            shape: Synthetic.of(synthetic, shape.steps)
            for shape in self.shapes
            if shape.steps and synthetic is not None
        }
        _check_models(model, draft, self.shapes, page_size)
        self._drafts = draft is not None and any(shape.steps for shape in self.shapes)
        draft = draft if self._drafts else None
        target = TargetModel(model, draft.config.feature_layers if draft is not None else None)
        self.device, self.vocab_size = model.device, target.vocab_size
        dtype = next(model.parameters()).dtype
        room = max(shape.room for shape in self.shapes)
        hidden, draft_vocab = (draft.config.hidden_size, draft.config.draft_vocab_size) if draft else (1, 1)
        self._sizes = Sizes(
            hidden,
            target.feature_size,
            target.vocab_size,
            draft_vocab,
            max_seq_len + room,
            dtype,
            self.device,
        )
        pages = 1 + max_requests * -(-(max_seq_len + room) // page_size) if num_pages is None else num_pages
        paged: dict[str, Any] = {
            "num_pages": pages, "page_size": page_size, "dtype": dtype, "device": self.device,
        }  # fmt: skip
        self._cache = PagedKVCache.for_model(model.config, **paged)
        self._draft_cache = None
        if draft is not None:
            self._draft_cache = PagedKVCache(
                num_layers=draft.config.num_layers,
                kv_heads=draft.config.num_key_value_heads,
                head_dim=draft.config.head_dim,
                **paged,
            )
        self._table = RequestTable.for_cache(
            self._cache, max_requests=max_requests, max_seq_len=max_seq_len + room
        )
        letters = {"R": max_requests + 1, "H": hidden, "D": draft_vocab}
        self._state = allocate(STATE, letters, dtype=dtype, device=self.device)
        self._pool = pg.GraphPool()
        rows = _row_counts(self.shapes, self.batch_sizes, [n for n in _PREFILL_SIZES if n <= prefill_rows])
        pool = {"pool": self._pool}
        self._models = Models.make(
            target, draft, rows, {**(options or {}), **pool}, {**(draft_options or {}), **pool}
        )
        self._prefill = Prefill(
            self._models, self._state, self._table, self._cache, self._draft_cache,
            prefill_rows, self.graphs["prefill"],
        )  # fmt: skip
        self._prefill_sizes = rows["prefill"]
        self._rounds: dict[tuple[int, DraftShape, str], ReadyRound] = {}
        self._prefill_ready = False
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prepare(self, rules: Sequence[str] = (GREEDY,)) -> None:
        """Compile and capture now what `generate` would when it first needs it.

        Args:
            rules: "greedy", "sampled" (a temperature above 0), "filtered" (top_k or top_p, too).
        """
        with self._running():
            for size in reversed(self.batch_sizes):
                for shape in self.shapes:
                    for rule in rules:
                        self._round(size, shape, rule)
            self._prepare_prefill()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        shape: DraftShape | int | None = None,
        return_stats: bool = False,
    ) -> Any:
        """New tokens for every prompt, in order.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: one for all or one per prompt.
            sampling: the same; None = greedy.
            stop: token ids that end a request; the one that did is kept as its last token.
            shape: one of the speculator's; None = the first.

        Returns:
            a list of token lists, and with `return_stats` a `Statistics` beside it.

        Raises:
            SpeculatorError: a request that cannot be served, before any is.
            CacheError: one request alone needs more pages than there are.
        """
        chosen = self.shapes[0] if shape is None else as_shape(shape)
        if chosen not in self.shapes:
            raise SpeculatorError.unprepared(chosen, self.shapes)
        requests = self._requests(prompts, max_new_tokens, sampling, stop)
        with self._running():
            self._serve(requests, chosen)
        tokens = [request.tokens for request in requests]
        if not return_stats:
            return tokens
        decreed = self._decreed.get(chosen)
        counts = tuple(request.counts for request in requests)
        return tokens, Statistics(counts, decreed.accept_length if decreed is not None else None)

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        stop: Sequence[int],
    ) -> list[Request]:
        counts: Any = per_request("max_new_tokens", max_new_tokens, len(prompts))
        samplings: Any = per_request("sampling", sampling or Sampling(), len(prompts))
        requests = [
            Request(index, tuple(int(t) for t in prompt), how, count, frozenset(stop))
            for index, (prompt, how, count) in enumerate(zip(prompts, samplings, counts, strict=True))
        ]
        for request in requests:
            check_request(request, self.vocab_size, self.max_seq_len)
        return requests

    def _serve(self, requests: Sequence[Request], shape: DraftShape) -> None:
        """Rounds until every request is finished; those that find no room wait."""
        waiting, running = deque(requests), list[Request]()
        try:
            while waiting or running:
                self._admit(waiting, running)
                rule = _rule(running)
                ready = self._round(self._size_for(len(running)), shape, rule)
                for request, tokens in zip(running, ready.run(running), strict=True):
                    request.counts.add_round(shape.steps, shape.nodes - 1, len(tokens))
                    request.take(tokens)
                self._let_go(running)
        finally:
            for request in running:
                self._table.close(request.slot)

    def _admit(self, waiting: deque[Request], running: list[Request]) -> None:
        """Start the requests that there are slots and pages for, with all pages that they will need."""
        started: list[Request] = []
        while waiting and len(running) + len(started) < self.max_requests:
            tokens = len(waiting[0].prompt) + waiting[0].max_new_tokens + self._room
            if (running or started) and -(-tokens // self._table.page_size) > self._table.free_pages:
                break
            slot = self._table.open()
            try:
                self._table.reserve({slot: tokens})
            except Exception:
                self._table.close(slot)
                raise
            waiting[0].slot = slot
            started.append(waiting.popleft())
        running += started
        if started:
            self._prepare_prefill()
            for request, token in zip(started, self._prefill.run(started), strict=True):
                request.take([token])
            self._let_go(running)
            if not running and waiting:
                self._admit(waiting, running)

    @property
    def _room(self) -> int:
        return max(shape.room for shape in self.shapes)

    def _let_go(self, running: list[Request]) -> None:
        for request in [request for request in running if request.finished]:
            self._table.close(request.slot)
            running.remove(request)

    def _size_for(self, requests: int) -> int:
        return next(size for size in self.batch_sizes if size >= requests)

    def _round(self, size: int, shape: DraftShape, rule: str) -> ReadyRound:
        key = size, shape, rule
        if key not in self._rounds:
            self._rounds[key] = self._make_round(size, shape, rule)
        return self._rounds[key]

    def _make_round(self, size: int, shape: DraftShape, rule: str) -> ReadyRound:
        sampled = rule != GREEDY
        made = Round.make(
            shape, size, self._sizes, self._table, self._cache, self._draft_cache, sampled=sampled
        )
        phases = Phases(self._models, made, self._state, rule, self._decreed.get(shape))
        bodies: dict[str, Callable[[str], None]] = {"draft": phases.draft, "verify": phases.verify}
        if shape.steps:
            bodies["extend"] = phases.extend
        runners = [PhaseRunner(name, body, self.graphs[name], self._pool) for name, body in bodies.items()]
        for runner in runners:
            runner.prepare(self.device)
        return ReadyRound(made, runners, self._table)

    def _prepare_prefill(self) -> None:
        if not self._prefill_ready:
            self._prefill.prepare(self._prefill_sizes)
            self._prefill_ready = True

    @contextmanager
    def _running(self) -> Iterator[None]:
        """No gradients, and a stream of our own: graphs follow each other faster there."""
        with torch.no_grad():
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)


def _ways(graphs: str | Mapping[str, str]) -> dict[str, str]:
    """How each phase runs, from one way for all or some of them by name."""
    names = (*PHASES, "prefill")
    if isinstance(graphs, str):
        given = dict.fromkeys(PHASES, graphs) | {"prefill": PIECEWISE if graphs == FULL else graphs}
    else:
        given = dict.fromkeys(PHASES, FULL) | {"prefill": PIECEWISE} | dict(graphs)
    for phase, way in given.items():
        if phase not in names or way not in WAYS or (phase == "prefill" and way == FULL):
            raise SpeculatorError.bad_graphs(phase, way, names, WAYS)
    return given


def _batch_sizes(given: Sequence[int] | None, max_requests: int) -> tuple[int, ...]:
    """Ascending, the last of them enough for every request."""
    if max_requests < 1 or any(size < 1 for size in given or ()):
        what = f"max_requests={max_requests}, batch_sizes={given}"
        raise SpeculatorError.bad_shape(what, "serve at least one request at a time.")
    powers = [2**i for i in range(max_requests.bit_length()) if 2**i < max_requests]
    below = [size for size in given or powers if size < max_requests]
    return (*sorted(set(below)), max_requests)


def _check_models(model: Any, draft: Any, shapes: Sequence[DraftShape], page_size: int) -> None:
    attention = model.config.get_text_config()._attn_implementation
    if not is_ours(attention):
        raise SpeculatorError.wrong_attention(attention)
    for shape in shapes:
        if shape.steps and draft is None:
            raise SpeculatorError.no_draft(shape)
        if shape.is_tree and page_size != 1:
            what = f"{shape}, with pages of {page_size} tokens"
            raise SpeculatorError.bad_shape(
                what, "pass page_size=1: a tree's commit reorders slots, not pages."
            )


def _row_counts(
    shapes: Sequence[DraftShape], batches: Sequence[int], prefill: Sequence[int]
) -> dict[str, list[int]]:
    """Row counts of each model's forwards that may be captured."""
    verified = {size * shape.nodes for shape in shapes for size in batches}
    branches = {size * shape.topk for shape in shapes for size in batches}
    return {
        "prefill": sorted(prefill),
        "target": sorted({*verified, *prefill}),
        "extend": sorted({*verified, *prefill}),
        "step": sorted(branches),
        "head": sorted({*branches, *batches}),
    }


def _rule(requests: Sequence[Request]) -> str:
    """The cheapest rule that serves these requests; a greedy one among sampled ones stays greedy."""
    if any(request.sampling.filtered for request in requests):
        return FILTERED
    return GREEDY if all(request.sampling.greedy for request in requests) else SAMPLED
