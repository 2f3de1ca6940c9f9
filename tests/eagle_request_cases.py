"""The small loop, not compiled, that tests of requests and of refusals share."""

from __future__ import annotations

from typing import Any

from eagle_cases import CHAINS, TREES, greedy, small_pair

from piecewise_graph.eagle import DraftShape, Speculator

PLAIN = DraftShape(0)
SHAPES = [CHAINS[4], TREES[2], PLAIN]
LENGTH = 40  # max_seq_len
LOOKAHEAD = max(shape.lookahead for shape in SHAPES)


def make(kind: str = "twin", **asked: Any) -> Speculator:
    """A loop that is not compiled; what is refused is refused there too."""
    target, _, draft = small_pair(kind)
    options = {"shapes": SHAPES, "max_requests": 4, "max_seq_len": LENGTH, "graphs": "eager"}
    return Speculator(target, draft, **(options | asked))


def answers(prompts: list[list[int]], count: int) -> list[list[int]]:
    """What plain greedy decoding of the twin's target says."""
    return [each.tokens for each in greedy(small_pair("twin")[1], prompts, count)]
