"""Builders for tests of the engine, and what a request gets in a run of its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from eagle_cases import (
    CHAINS,
    QUICK,
    TREES,
    small_pair,
)

from piecewise_graph.eagle import DraftShape, Engine, Request, Sampling, Speculator

PLAIN, CHAIN, TREE = DraftShape(0), CHAINS[2], TREES[2]
SHAPES = [CHAIN, TREE, PLAIN]
LENGTH = 40  # max_seq_len
LOOKAHEAD = max(shape.lookahead for shape in SHAPES)
HOW = [Sampling(), Sampling(temperature=20.0, seed=3), Sampling(temperature=9.0, top_k=5, top_p=0.9, seed=4)]


def make(**asked: Any) -> Speculator:
    target, _, draft = small_pair("twin")
    options = {"shapes": SHAPES, "max_requests": 4, "max_seq_len": LENGTH, "graphs": "eager"}
    return Speculator(target, draft, **(options | asked))


def prepared() -> Speculator:
    """Everything captured before the first request."""
    made = make(graphs="full", batch_sizes=[4], **QUICK)
    made.prepare()
    return made


@cache
def _alone() -> Speculator:
    return make(max_requests=1, max_seq_len=LENGTH)


@cache
def lone_tokens(prompt: tuple[int, ...], how: Sampling, shape: DraftShape, count: int) -> list[int]:
    asked: Any = {"max_new_tokens": count, "sampling": how, "shape": shape, "overlap": False}
    [tokens] = _alone().generate([prompt], **asked)
    return list(tokens)


def lone(request: Request, shape: DraftShape) -> list[int]:
    """What a run of this request alone, in eager mode, gives."""
    how = request.sampling
    count = min(14 if request.max_new_tokens <= 14 else LENGTH, LENGTH - len(request.prompt))
    shape = PLAIN if how.greedy else shape
    tokens = lone_tokens(request.prompt, how, shape, count)[: request.max_new_tokens]
    ends = [place + 1 for place, token in enumerate(tokens) if token in request.stop]
    return tokens[: min(ends, default=len(tokens))]


def run(engine: Engine, max_steps: int = 2000) -> None:
    for _ in range(max_steps):
        if not engine.unfinished:
            return
        engine.step()
    raise AssertionError(f"{engine.unfinished} requests are unfinished after {max_steps} steps")
