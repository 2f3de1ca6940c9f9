"""Speculator: a target and its draft, generating for many requests, round by round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from piecewise_graph.custom_ops.attention.transformers import is_ours

from .errors import SpeculatorError
from .forward import COMPILED, FULL, PIECEWISE, WAYS
from .phases import GREEDY
from .planner import Planner
from .prefill import Prefill
from .request import Request, check_request, per_request
from .session import Session
from .shapes import DraftShape, Sampling, as_shape
from .statistics import Statistics
from .synthetic import Synthetic
from .workshop import RoundKey, Workshop

PHASES = ("draft", "verify", "extend")
AUTO = "auto"


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
        max_seq_len: int = 1024,
        page_size: int = 1,
        num_pages: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        graphs: str | Mapping[str, str] = FULL,
        prefill_rows: int = 512,
        options: Mapping[str, Any] | None = None,
        draft_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.shapes = tuple(dict.fromkeys(map(as_shape, shapes)))
        self.graphs = ways(graphs, PIECEWISE if model.device.type == "cuda" else COMPILED)
        self.batch_sizes = _batch_sizes(batch_sizes, max_requests)
        self.max_requests, self.max_seq_len = max_requests, max_seq_len
        if not self.shapes:
            raise SpeculatorError.bad_shape("shapes names none", "name at least one; 0 = plain decoding.")
        if prefill_rows < 1:
            raise SpeculatorError.bad_shape(f"{prefill_rows=}", "prefill at least one token at a time.")
        self.planner = Planner(self.shapes)
        self._session: Session | None = None
        _check_models(model, draft, self.shapes, page_size)
        _check_options(options or {})
        _check_options(draft_options or {})
        if not any(shape.steps for shape in self.shapes):
            draft = None
        self._room = max(shape.room for shape in self.shapes)
        longest = max_seq_len + self._room
        pages = 1 + max_requests * -(-longest // page_size) if num_pages is None else num_pages
        paging = {
            "max_requests": max_requests, "max_seq_len": longest, "room": self._room,
            "page_size": page_size, "num_pages": pages,
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
        """
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
        return_stats: bool = False,
    ) -> Any:
        """New tokens for every prompt, in order.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: one for all or one per prompt.
            sampling: the same; None = greedy.
            stop: token ids that end a request; the one that did is kept as its last token.
            shape: one of the speculator's, "auto" = the planner's choice in every round; None = the first.
            graphs: how phases run, where it shall differ from the speculator's.
            synthetic: decree acceptance, for models with random weights: a mean accept length, or rates per
                position. The tokens mean nothing then, and the statistics say so.

        Returns:
            a list of token lists, and with `return_stats` a `Statistics` beside it.

        Raises:
            SpeculatorError: a request that cannot be served, before any is.
            CacheError: one request alone needs more pages than there are.
            AddressMovedError: a weight moved since the graphs that read it were captured.
        """
        session, requests = self.session(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop, shape=shape, graphs=graphs,
            synthetic=synthetic,
        )  # fmt: skip
        try:
            while session.unfinished:
                session.step()
        finally:
            session.close()
        tokens = [request.tokens for request in requests]
        if not return_stats:
            return tokens
        return tokens, Statistics(tuple(request.counts for request in requests), session.decreed)

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
    ) -> tuple[Session, list[Request]]:
        """The same, to be stepped by the caller round by round; one session at a time.

        Returns:
            (session, requests in the order of the prompts).
        """
        counts: Any = per_request("max_new_tokens", max_new_tokens, len(prompts))
        samplings: Any = per_request("sampling", Sampling() if sampling is None else sampling, len(prompts))
        requests = [
            Request(index, tuple(int(t) for t in prompt), how, count, frozenset(stop))
            for index, (prompt, how, count) in enumerate(zip(prompts, samplings, counts, strict=True))
        ]
        for request in requests:
            check_request(request, self._workshop.sizes.vocab, self.max_seq_len)
        chosen = self._shape(shape)
        if synthetic is not None:
            for each in chosen.shapes if isinstance(chosen, Planner) else (chosen,):
                if each.steps:
                    Synthetic.of(synthetic, each.steps, clamped=isinstance(chosen, Planner))
            if isinstance(chosen, Planner):  # what is decreed must teach nobody
                chosen = Planner(self.shapes)
        if self._session is not None and self._session.running:
            raise SpeculatorError.session_open(len(self._session.running))
        self._workshop.weights.check()
        self._prepare_prefill()
        session = Session(
            self._workshop, self._prefill, requests, shape=chosen, room=self._room,
            batch_sizes=self.batch_sizes, graphs=_phases(self._ways(graphs)), synthetic=synthetic,
            context=self._running,
        )  # fmt: skip
        self._session = session
        return session, requests

    def _ways(self, graphs: str | Mapping[str, str] | None) -> dict[str, str]:
        if graphs is None or not isinstance(graphs, str):
            graphs = {**self.graphs, **(graphs or {})}
        return ways(graphs, self.graphs["prefill"])

    def close(self) -> None:
        """End a session that was left open, and give back what it holds."""
        if self._session is not None:
            self._session.close()

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


def ways(graphs: str | Mapping[str, str], prefill: str) -> dict[str, str]:
    """How each phase runs, from one way for all, or from some of them by name; prefill's own default."""
    names = (*PHASES, "prefill")
    if isinstance(graphs, str):
        given = dict.fromkeys(PHASES, graphs) | {"prefill": prefill if graphs == FULL else graphs}
    else:
        given = dict.fromkeys(PHASES, FULL) | {"prefill": prefill} | dict(graphs)
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
    if draft is not None:
        ours, theirs = next(draft.parameters()), next(model.parameters())
        if ours.dtype != theirs.dtype:
            raise SpeculatorError.unlike("dtype", ours.dtype, theirs.dtype)
        if ours.device != theirs.device:
            raise SpeculatorError.unlike("device", ours.device, theirs.device)
        _check_sizes(model, draft, shapes)
    for shape in shapes:
        if shape.steps and draft is None:
            raise SpeculatorError.no_draft(shape)
        if shape.is_tree and page_size != 1:
            what = f"{shape}, with pages of {page_size} tokens"
            raise SpeculatorError.bad_shape(
                what, "pass page_size=1: a tree's commit reorders slots, not pages."
            )


def _check_options(options: Mapping[str, Any]) -> None:
    own = {"pool", "outputs", "capture", "capture_sizes", "max_tokens", "token_dim"} & options.keys()
    if own:
        raise SpeculatorError.fixed_option(min(own))


def _check_sizes(model: Any, draft: Any, shapes: Sequence[DraftShape]) -> None:
    config, target = draft.config, model.config.get_text_config()
    if config.target_hidden_size != target.hidden_size:
        raise SpeculatorError.unlike("hidden size of features", config.target_hidden_size, target.hidden_size)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if config.vocab_size != vocabulary:
        raise SpeculatorError.unlike("vocabulary", config.vocab_size, vocabulary)
    widest = max(shape.topk for shape in shapes)
    if widest > config.draft_vocab_size:
        what = f"top-k {widest} of a draft with {config.draft_vocab_size} tokens"
        raise SpeculatorError.bad_shape(what, "choose a smaller topk.")


def _phases(graphs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((phase, graphs[phase]) for phase in PHASES)
