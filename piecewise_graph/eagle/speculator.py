"""Speculator: a target and its draft, generating for many requests, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .errors import SpeculatorError
from .options import AUTO, COMPILED, FULL, PIECEWISE, DraftShape, Sampling, as_shape, as_shapes
from .request import Request, per_request
from .rounds.phases import GREEDY
from .rounds.prefill import Prefill
from .rounds.synthetic import Synthetic
from .serving.engine import Engine
from .serving.model_checks import (
    PHASES,
    check_models,
    check_options,
    check_rules,
    longest,
    padded_sizes,
    ways,
)
from .serving.round_choice import RoundChoice
from .serving.shape_planner import Planner
from .serving.workshop import RoundKey, Workshop
from .statistics import Statistics


class Speculator:
    """Generates with speculative decoding; what comes out is what the target alone would say.

    Args:
        model: the target, a causal LM of transformers on our attention.
        draft: of `load_draft`; None = plain decoding only.
        shapes: what rounds may look like, the first of them the default: `DraftShape`s, or numbers of steps
            of chains.
        max_requests: that run at the same time; further prompts wait for one to finish.
        max_seq_len: prompt and new tokens of one request together; None = 1024, or the target's positions
            where these are fewer.
        page_size: of the caches; trees need 1.
        num_pages: of the caches; None = enough for `max_requests` of `max_seq_len`.
        batch_sizes: requests that a round is made for, smaller batches are padded; None = powers of 2.
        graphs: how phases run, "full" (the phase is one graph), "piecewise" (its forwards are tapes),
            "compiled" (no graphs) or "eager"; one for all, or a dict of the phases "draft", "verify",
            "extend" and of "prefill", which can be all but "full": batches differ. Prefill is "piecewise" by
            default, on a CPU "compiled": capturing its sizes takes longer than most prompts there.
        prefill_rows: tokens that one prefill batch holds at most.
        options, draft_options: of pg.compile for the target and for the draft's parts, such as
            `merge_linears=True` or `specialize=[4]`.

    Attributes:
        planner: what chooses with `shape="auto"`, of all of `shapes`; `latest` says what it chose and why.

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
        max_seq_len: int | None = None,
        page_size: int = 1,
        num_pages: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        graphs: str | Mapping[str, str] = FULL,
        prefill_rows: int = 512,
        options: Mapping[str, Any] | None = None,
        draft_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.shapes = as_shapes(shapes)
        self.graphs = ways(graphs, PIECEWISE if model.device.type == "cuda" else COMPILED)
        self.batch_sizes = padded_sizes(batch_sizes, max_requests)
        self.max_requests = max_requests
        if prefill_rows < 1:
            raise SpeculatorError.bad_shape(f"{prefill_rows=}", "prefill at least one token at a time.")
        self.planner = Planner(self.shapes)
        self._latest: Engine | None = None
        check_models(model, draft, self.shapes, page_size)
        self.max_seq_len = longest(model, max_seq_len, page_size, num_pages)
        check_options(options or {})
        check_options(draft_options or {})
        if not any(shape.steps for shape in self.shapes):
            draft = None
        self._room = max(shape.room for shape in self.shapes)
        # With overlap, a request that reached its end runs one round more.
        margin = self._room + max(shape.steps for shape in self.shapes) + 1
        each = -(-(self.max_seq_len + self._room) // page_size)
        paging = {
            "max_requests": max_requests, "max_seq_len": self.max_seq_len + margin, "margin": margin,
            "page_size": page_size, "num_pages": 1 + max_requests * each if num_pages is None else num_pages,
        }  # fmt: skip
        self._workshop = Workshop.make(
            model,
            draft,
            self.shapes,
            self.batch_sizes,
            paging,
            options or {},
            draft_options or {},
            prefill_rows,
        )
        made = self._workshop
        self._prefill = Prefill(
            made.models, made.state, made.table, made.cache, made.draft_cache, prefill_rows,
            self.graphs["prefill"],
        )  # fmt: skip
        self.device = made.sizes.device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def prepare(self, rules: Sequence[str] = (GREEDY,)) -> None:
        """Compile and capture now what `generate` would when it first needs it.

        Args:
            rules: "greedy", "sampled" (a temperature above 0), "filtered" (top_k or top_p, too).

        Raises:
            SpeculatorError: there is no such rule.
        """
        check_rules(rules)
        self._prepare_prefill()
        with self._running():
            for size in reversed(self.batch_sizes):
                for shape in self.shapes:
                    for rule in rules:
                        self._workshop.round_for(RoundKey(size, shape, rule, _phases(self.graphs)))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        shape: DraftShape | int | str | None = None,
        graphs: str | Mapping[str, str] | None = None,
        synthetic: float | Sequence[float] | None = None,
        overlap: bool | None = None,
        return_stats: bool = False,
    ) -> Any:
        """New tokens for every prompt, in order.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: one for all or one per prompt.
            sampling: the same; None = greedy.
            stop: token ids that end a request; the one that did is kept as its last token.
            shape: one of the speculator's, "auto" = the planner's choice in every round; None = the first.
            graphs: how phases run, where it shall differ from the speculator's; prompts run as it says.
            synthetic: decree acceptance, for models with random weights: a mean accept length, or rates per
                position. The tokens mean nothing then, and the statistics say so.
            overlap: as in `engine`.

        Returns:
            a list of token lists, and with `return_stats` a `Statistics` beside it.

        Raises:
            SpeculatorError: a request that cannot be served, before any is.
            CacheError: one request alone needs more pages than there are.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        engine, requests = self.session(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, shape=shape, graphs=graphs,
            synthetic=synthetic, overlap=overlap,
        )  # fmt: skip
        try:
            while engine.unfinished:
                engine.step()
        finally:
            engine.close()
        tokens = [request.tokens for request in requests]
        if not return_stats:
            return tokens
        return tokens, Statistics(tuple(request.counts for request in requests), engine.decreed)

    def session(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        sampling: Sampling | Sequence[Sampling] | None = None,
        stop: Sequence[int] = (),
        shape: DraftShape | int | str | None = None,
        graphs: str | Mapping[str, str] | None = None,
        synthetic: float | Sequence[float] | None = None,
        overlap: bool | None = False,
    ) -> tuple[Engine, list[Request]]:
        """The same, to be stepped by the caller: an engine that these prompts wait in.

        Args:
            overlap: as in `engine`; by default without, so that what a step found is there when it returns.

        Returns:
            (engine, requests in the order of the prompts).
        """
        counts: Any = per_request("max_new_tokens", max_new_tokens, len(prompts))
        samplings: Any = per_request("sampling", Sampling() if sampling is None else sampling, len(prompts))
        engine = self._engine(shape, graphs, synthetic, overlap)
        requests = [
            engine.make_request(prompt, count, how, stop)
            for prompt, how, count in zip(prompts, samplings, counts, strict=True)
        ]
        self._open(engine)
        for request in requests:
            engine.add(request)
        return engine, requests

    def engine(
        self,
        *,
        shape: DraftShape | int | str | None = None,
        graphs: str | Mapping[str, str] | None = None,
        synthetic: float | Sequence[float] | None = None,
        overlap: bool | None = None,
    ) -> Engine:
        """Continuous batching: requests join and leave while others run; one engine at a time has any.

        Args:
            shape, graphs, synthetic: of all rounds, as in `generate`.
            overlap: launch a round before the result of the one before is read, so that the device never
                waits for the host; the tokens are the same. None = on a GPU.

        Raises:
            SpeculatorError: another engine of this speculator has unfinished requests.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        engine = self._engine(shape, graphs, synthetic, overlap)
        self._open(engine)
        return engine

    def _engine(
        self,
        shape: DraftShape | int | str | None,
        graphs: str | Mapping[str, str] | None,
        synthetic: float | Sequence[float] | None,
        overlap: bool | None,
    ) -> Engine:
        chosen = self._shape(shape)
        if synthetic is not None:
            for each in chosen.shapes if isinstance(chosen, Planner) else (chosen,):
                if each.steps:
                    Synthetic.of(synthetic, each.steps, clamped=isinstance(chosen, Planner))
            if isinstance(chosen, Planner):  # what is decreed must teach nobody
                chosen = Planner(self.shapes)
        return Engine(
            self._workshop,
            self._prefill,
            RoundChoice(chosen, _phases(self._ways(graphs)), self.batch_sizes, synthetic),
            room=self._room,
            max_seq_len=self.max_seq_len,
            overlap=self.device.type == "cuda" if overlap is None else overlap,
            context=self._running,
            claim=self._claim,
        )

    def _open(self, engine: Engine) -> None:
        self._claim(engine)
        self._workshop.weights.check()
        self._prepare_prefill()

    def _claim(self, engine: Engine) -> None:
        """Slots and pages are this engine's from now on."""
        latest = self._latest
        if latest is engine:
            return
        if latest is not None and latest.unfinished:
            raise SpeculatorError.engine_open(latest.unfinished)
        if self._workshop.table.open_slots:  # left by an engine whose step was ended by an exception
            self._workshop.table.clear()
        self._latest = engine

    def _ways(self, graphs: str | Mapping[str, str] | None) -> dict[str, str]:
        if graphs is None or not isinstance(graphs, str):
            if graphs and "prefill" in graphs:
                raise SpeculatorError.prefill_is_fixed(graphs["prefill"], self.graphs["prefill"])
            graphs = {**self.graphs, **(graphs or {})}
        return ways(graphs, self.graphs["prefill"])

    def close(self) -> None:
        """End an engine that was left open, and give back what it holds."""
        if self._latest is not None:
            self._latest.close()

    def _shape(self, shape: DraftShape | int | str | None) -> DraftShape | Planner:
        if shape == AUTO:
            return self.planner
        chosen = self.shapes[0] if shape is None else as_shape(shape)
        if chosen not in self.shapes:
            raise SpeculatorError.unprepared(chosen, self.shapes)
        return chosen

    def _prepare_prefill(self) -> None:
        with self._running():
            self._prefill.prepare()

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


def _phases(graphs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((phase, graphs[phase]) for phase in PHASES)
