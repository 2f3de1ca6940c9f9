"""Speculator: a target and its draft, generating for many requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import piecewise_graph as pg

from .errors import SpeculatorError
from .options import AUTO, COMPILED, FULL, PIECEWISE, DraftShape, EngineOptions, Sampling, as_shape, as_shapes
from .request import Request, per_request, token_ids
from .rounds.phases import GREEDY, RULES
from .rounds.prefill import Prefill
from .rounds.resources import Resources
from .rounds.synthetic import Synthetic
from .serving.engine import Engine
from .serving.model_checks import PHASES, check_kinds, check_models, check_options, graph_modes, make_limits
from .serving.round_store import GraphModes, RoundPolicy, RoundStore
from .serving.shape_planner import Planner
from .statistics import Statistics


class Speculator:
    """Generates with speculative decoding; the output is what the target alone would generate.

    Args:
        model: the target, a causal LM of transformers with our attention.
        draft: of `load_draft`; None = plain decoding only.
        shapes: that rounds may have, the first is the default: `DraftShape`s, or numbers of steps of chains.
        max_requests: requests that run at the same time; further ones wait.
        max_seq_len: tokens of one request, prompt and new ones; None = 1024, or the target's number of
            positions if that is smaller.
        page_size: of the caches, in tokens; trees need 1.
        num_pages: of the caches; None = enough for `max_requests` of `max_seq_len`.
        batch_sizes: numbers of requests that rounds are captured for; smaller batches are padded. None =
            powers of 2.
        graphs: graph mode of the phases: "full" (the phase is one graph), "piecewise" (its forwards are
            tapes), "compiled" (no graphs) or "eager". One for all, or a dict of "draft", "verify", "extend"
            and "prefill". Prefill cannot be "full", since its batches differ; by default it is "piecewise" on
            a GPU and "compiled" on a CPU, where capturing its sizes takes longer than most prompts.
        prefill_rows: tokens of prompts that one step takes at most.
        options, draft_options: of pg.compile for the target and for the draft's parts, such as
            `merge_linears=True` or `specialize=[4]`.

    Attributes:
        planner: chooses with `shape="auto"` among all `shapes`; its `latest` says what it chose and why.

    Raises:
        SpeculatorError: target, draft, shapes or graphs do not fit together.
        AttentionError: the target is no such model, or one that our attention cannot serve.
    """

    def __init__(
        self,
        model: Any,
        draft: Any = None,
        *,
        shapes: Sequence[DraftShape | int] = (3,),
        max_requests: int = 8,
        max_seq_len: int | None = None,
        page_size: int = 1,
        num_pages: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        graphs: str | Mapping[str, str] = FULL,
        prefill_rows: int = 512,
        options: Mapping[str, Any] | None = None,
        draft_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_kinds(model, draft)
        self.shapes = as_shapes(shapes)
        self.graphs = graph_modes(graphs, PIECEWISE if model.device.type == "cuda" else COMPILED)
        limits = make_limits(
            model, self.shapes, max_requests=max_requests, max_seq_len=max_seq_len, page_size=page_size,
            num_pages=num_pages, batch_sizes=batch_sizes, prefill_rows=prefill_rows,
        )  # fmt: skip
        self.max_requests, self.max_seq_len = limits.max_requests, limits.max_seq_len
        self.batch_sizes = limits.batch_sizes
        self.planner = Planner(self.shapes)
        options, draft_options = options or {}, draft_options or {}
        check_options(options)
        check_options(draft_options)
        with _own_modes(model.device.type):
            check_models(model, draft, self.shapes, page_size)
            if not any(shape.steps for shape in self.shapes):
                draft = None
            self._resources = Resources.make(model, draft, limits, options, draft_options)
        self._prefill = Prefill(self._resources, self.graphs["prefill"])
        self._rounds = RoundStore(self._prefill)
        self._latest: Engine | None = None
        self.device = self._resources.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prepare(self, rules: Sequence[str] = (GREEDY,)) -> None:
        """Compile and capture now what `generate` otherwise would on first use.

        Args:
            rules: "greedy", "sampled" (a temperature above 0), "filtered" (with top_k or top_p as well).

        Raises:
            SpeculatorError: there is no such rule.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        if isinstance(rules, str) or not set(rules) <= set(RULES):
            raise SpeculatorError.bad_rules(rules, ", ".join(RULES))
        modes = _by_phase(self.graphs)
        keys = [
            (shape, size, rule, modes, None)
            for size in reversed(self.batch_sizes)
            for shape in self.shapes
            for rule in rules
        ]
        self._resources.weights.check()
        with self._running():
            self._rounds.make(keys)
            self._prefill.prepare()
            for key in keys:
                self._rounds.get(*key).ensure_prepared()

    @property
    def ranks(self) -> pg.Ranks:
        """The processes that run the target together; this one alone unless it is tensor parallel."""
        return self._resources.ranks

    @property
    def failed_captures(self) -> tuple[str, ...]:
        """Phases that run compiled because their graphs could not be captured, each with the reason.

        Counted as `not_full:capture_failed`. `pg.reset()` lets the next round capture again.
        """
        return self._rounds.failures

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        return_stats: bool = False,
        **options: Any,
    ) -> Any:
        """New tokens for every prompt, in order.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: one for all or one per prompt.
            sampling: the same; None = greedy.
            stop: token ids that end a request; the stop token that ended it is kept as its last token.
            options: fields of `EngineOptions`: shape, graphs, synthetic, overlap.

        Returns:
            a list of token lists; with `return_stats`, (that list, `Statistics`).

        Raises:
            SpeculatorError: a request cannot be served; no request has run then.
            CacheError: one request alone needs more pages than there are.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        policy = self._policy(EngineOptions(**options))
        engine, requests = self._queued(prompts, max_new_tokens, sampling, stop, policy)
        try:
            while engine.unfinished:
                engine.step()
        finally:
            engine.close()
        tokens = [request.tokens for request in requests]
        if not return_stats:
            return tokens
        counts = tuple(request.counts for request in requests)
        return tokens, Statistics(counts, engine.synthetic_accept_length)

    def session(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        **options: Any,
    ) -> tuple[Engine, list[Request]]:
        """Like `generate`, but the caller steps the engine that these prompts wait in.

        Args:
            options: as in `generate`, but overlap is off by default: a step returns with its own results.

        Returns:
            (engine, requests in the order of the prompts).
        """
        policy = self._policy(EngineOptions(**{"overlap": False} | options))
        return self._queued(prompts, max_new_tokens, sampling, stop, policy)

    def engine(self, **options: Any) -> Engine:
        """Continuous batching: requests join and leave while others run. One engine at a time has requests.

        Args:
            options: fields of `EngineOptions`: shape, graphs, synthetic, overlap.

        Raises:
            SpeculatorError: another engine of this speculator has unfinished requests.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        return self._open(self._make_engine(self._policy(EngineOptions(**options))))

    def close(self) -> None:
        """End an engine that was left open, and take its slots and pages back."""
        if self._latest is not None:
            self._latest.close()

    def _policy(self, options: EngineOptions) -> RoundPolicy:
        planned: DraftShape | Planner = self.planner
        if options.shape != AUTO:
            planned = self.shapes[0] if options.shape is None else as_shape(options.shape)
            if planned not in self.shapes:
                raise SpeculatorError.unprepared(planned, self.shapes)
        is_planner = isinstance(planned, Planner)
        shapes = self.shapes if isinstance(planned, Planner) else (planned,)
        synthetic: dict[DraftShape, Synthetic] = {}
        if options.synthetic is not None:
            drafts = [shape for shape in shapes if shape.steps]
            synthetic = {
                shape: Synthetic.of(options.synthetic, shape.steps, clamped=is_planner) for shape in drafts
            }
            if is_planner:  # the shared planner must not learn from synthetic acceptance
                planned = Planner(self.shapes)
        overlap = self.device.type == "cuda" if options.overlap is None else options.overlap
        return RoundPolicy(planned, self._graph_modes(options.graphs), synthetic, overlap)

    def _graph_modes(self, graphs: str | Mapping[str, str] | None) -> GraphModes:
        if graphs is None or isinstance(graphs, Mapping):
            if graphs and "prefill" in graphs:
                raise SpeculatorError.prefill_is_fixed(graphs["prefill"], self.graphs["prefill"])
            graphs = {**self.graphs, **(graphs or {})}
        return _by_phase(graph_modes(graphs, self.graphs["prefill"]))

    def _queued(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        sampling: Sampling | Sequence[Sampling] | None,
        stop: Sequence[int],
        policy: RoundPolicy,
    ) -> tuple[Engine, list[Request]]:
        counts = per_request("max_new_tokens", max_new_tokens, len(prompts))
        samplings = per_request("sampling", sampling, len(prompts))
        stop = token_ids(0, "stop", stop)  # the first request would use an iterator up
        engine = self._make_engine(policy)
        requests = [
            engine.make_request(prompt, count, how, stop)
            for prompt, how, count in zip(prompts, samplings, counts, strict=True)
        ]
        self._open(engine)
        for request in requests:
            engine.add(request)
        return engine, requests

    def _make_engine(self, policy: RoundPolicy) -> Engine:
        return Engine(self._rounds, policy, context=self._running, claim=self._claim)

    def _open(self, engine: Engine) -> Engine:
        self._claim(engine)
        self._resources.weights.check()
        self._prepare_prefill()
        return engine

    def _claim(self, engine: Engine) -> None:
        """Slots and pages are this engine's from now on."""
        latest = self._latest
        if latest is engine:
            return
        if latest is not None and latest.unfinished:
            raise SpeculatorError.engine_open(latest.unfinished)
        if self._resources.table.open_slots:  # left by an engine whose step was ended by an exception
            self._resources.table.clear()
        self._latest = engine

    def _prepare_prefill(self) -> None:
        with self._running():
            self._prefill.prepare()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Our own modes, and a stream of our own: graphs follow each other faster there."""
        with _own_modes(self.device.type):
            if self._stream is None:
                yield
                return
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)


def _by_phase(graphs: Mapping[str, str]) -> GraphModes:
    return tuple((phase, graphs[phase]) for phase in PHASES)


@contextmanager
def _own_modes(device: str) -> Iterator[None]:
    """No gradients, no autocast, and tensors that may be written outside of a caller's inference mode, too.

    Caches, buffers and graphs are for all calls, and the callers' modes may differ.
    """
    is_cast = torch.is_autocast_enabled(device)  # asked, since leaving it costs more in every step
    autocast = torch.autocast(device, enabled=False) if is_cast else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), autocast:  # the first turns gradients on
        yield
