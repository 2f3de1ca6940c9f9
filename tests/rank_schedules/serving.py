"""What one rank does with a schedule: it serves the requests, and tells what came of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from eagle_cases import TIE, all_free
from paged_generation import Alone, alone
from test_tensor_parallel import MODELS, OPTIONS, model
from torch import distributed

import piecewise_graph as pg
from piecewise_graph.eagle import Engine, Request, Speculator, load_draft
from piecewise_graph.eagle.rounds.round_launch import Launch
from rank_schedules.schedules import LONGEST, LOOPS, NEW_TOKENS, Asked, Schedule

_MOST_STEPS = 2000
_OPTIONS = OPTIONS | {"rank_timeout": 30.0}


@dataclass(frozen=True)
class Outcome:
    """What a rank tells of a schedule.

    Attributes:
        tokens: of every request.
        counters: what the schedule has counted.
        plan: the planner's choices and the times behind them.
        wrong: what this rank found wrong by itself.
    """

    tokens: tuple[tuple[int, ...], ...]
    counters: tuple[tuple[str, int], ...]
    preemptions: int
    steps: int
    plan: str
    wrong: tuple[str, ...] = ()


class Raised(Exception):
    """What a callback raises."""


def text(number: int) -> list[int]:
    """Tokens of Python source text."""
    source = Path(__file__).read_text(encoding="utf-8")
    return [byte + 3 for byte in source[600 * number :][:LONGEST].encode()]


class Rank:
    """Speculators of this rank, made when a schedule first asks for them."""

    @cached_property
    def _target(self) -> Any:
        pg.register_attention()
        return model(tp=True, attention="piecewise")

    @cached_property
    def _draft(self) -> Any:
        return load_draft(str(MODELS / "byte-llama-eagle1"), self._target)

    @cache  # noqa: B019, one of these lives as long as its process
    def loop(self, name: str) -> Speculator:
        """The speculator of this name."""
        draft = None if name == "plain" else self._draft
        made = {"max_seq_len": LONGEST, "prefill_rows": 16, "options": _OPTIONS, "draft_options": _OPTIONS}
        return Speculator(self._target, draft, **{**made, **LOOPS[name]})

    def __call__(self, schedule: Schedule) -> Outcome:
        """Serve a schedule. How long things take, and when results arrive, differs between the ranks."""
        rank, loop = distributed.get_rank(), self.loop(schedule.loop)
        own = Random(schedule.seed * 1000 + rank)
        before = pg.counters.snapshot()
        with mock.patch.object(Launch, "has_arrived", property(lambda _: own.random() < 0.5)):
            engine = loop.engine(**schedule.options)
            requests, steps = _serve(engine, schedule, rank)
        counters = pg.counters.snapshot()
        moved = {name: count - before.get(name, 0) for name, count in counters.items()}
        wrong = [] if all_free(loop) else ["a request has kept a slot or pages"]
        if rank == 0:
            wrong += _wrong_tokens(schedule, requests)
        return Outcome(
            tuple(tuple(request.tokens) for request in requests),
            tuple(sorted(moved.items())),
            engine.preemptions,
            steps,
            str(loop.planner),
            tuple(wrong),
        )


def _serve(engine: Engine, schedule: Schedule, rank: int) -> tuple[list[Request], int]:
    """The requests, when all have ended, and how many steps that took."""
    waiting, requests = list(schedule.requests), list[Request]()
    for step in range(_MOST_STEPS):
        while waiting and waiting[0].arrives <= step:
            requests.append(_added(engine, waiting.pop(0)))
        for asked, request in zip(schedule.requests, requests, strict=False):
            if asked.aborted_before == step:
                engine.abort(request)
        if step == schedule.reset_before:
            pg.reset()
        time.sleep(schedule.sleeps.get((step, rank), 0.0))
        if not waiting and not engine.unfinished:
            return requests, step
        with suppress(Raised):  # the next step goes on from there
            engine.step()
    raise AssertionError(f"{engine.unfinished} requests are unfinished after {_MOST_STEPS} steps")


def _added(engine: Engine, asked: Asked) -> Request:
    raised: list[int] = []

    def on_tokens(request: Request, new: list[int]) -> None:
        if asked.aborts_after is not None and len(request.tokens) >= asked.aborts_after:
            engine.abort(request)
        if asked.raises_after is not None and len(request.tokens) >= asked.raises_after and not raised:
            raised.append(len(new))
            raise Raised

    return engine.add_request(
        text(asked.text)[: asked.length],
        max_new_tokens=asked.new_tokens,
        sampling=asked.sampling,
        stop=asked.stop,
        on_tokens=on_tokens,
    )


def _wrong_tokens(schedule: Schedule, requests: Sequence[Request]) -> list[str]:
    """Greedy requests whose tokens are not those of one process, and requests of a wrong length."""
    found = []
    for index, (asked, request) in enumerate(zip(schedule.requests, requests, strict=True)):
        tokens = request.tokens
        ended = len(tokens) == asked.new_tokens or bool(tokens and tokens[-1] in asked.stop)
        if not (ended or request.aborted) or len(tokens) > asked.new_tokens:
            found.append(f"request {index} has ended with {len(tokens)} of {asked.new_tokens} tokens")
        if any(token in asked.stop for token in tokens[:-1]):
            found.append(f"request {index} goes on behind a stop token: {tokens}")
        if asked.sampling.greedy:
            wanted = _one_process(asked.text, asked.length)
            pairs = enumerate(zip(tokens, wanted.tokens, strict=False))
            at = next((place for place, (mine, other) in pairs if mine != other), None)
            if at is not None and wanted.gaps[at] > TIE:
                found.append(f"request {index}, token {at} of {tokens} is not that of {wanted.tokens}")
    return found


@cache
def _one_process(number: int, length: int) -> Alone:
    return alone(_whole(), text(number)[:length], NEW_TOKENS, torch.device("cpu"))


@cache
def _whole() -> Any:
    return model(tp=False)
