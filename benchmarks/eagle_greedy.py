"""Greedy speculation against plain greedy decoding in the GPU's own dtype: every difference, listed.

    python -m benchmarks.eagle_greedy

50 prompts through the repository's trained pair in bf16: chains of 1 to 5 and trees of 2, 4 and 8 branches,
in every way of running the phases. Forwards of other row counts sum in another order, so bf16 logits differ
in their last bits, and where the two largest are closer than that, another token may be the largest. Such a
difference is allowed where the target's gap is below `BOUND`: a bf16 logit from 8 to 16 has steps of 1/16,
and two logits that each moved by two steps have changed places. After it, the texts are two different ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import RESULTS, Mark, table, without_out, write
from benchmarks.eagle_pair import load_pair, load_target, prompts_of_all_lengths
from piecewise_graph.eagle import DraftShape, Speculator
from piecewise_graph.eagle.options import GRAPH_MODES as WAYS

BOUND = 0.25  # of the two largest logits' distance
CHAINS = [DraftShape(steps) for steps in (1, 2, 3, 4, 5)]
TREES = [
    DraftShape(2, 2),
    DraftShape(5, 2, 12),
    DraftShape(3, 4, 16),
    DraftShape(2, 8, 16),
    DraftShape(3, 8, 32),
]
Row = dict[str, Any]


@torch.no_grad()
def bench(head: str, options: argparse.Namespace) -> list[Row]:
    """A row per shape and way: how many prompts differ, and where."""
    target, draft = load_pair(head)
    prompts = prompts_of_all_lengths(options.prompts)
    wanted, gaps = greedy(load_target("sdpa"), prompts, options.new_tokens)
    compiled = {"compiler": options.compiler}
    speculator = Speculator(
        target, draft, shapes=CHAINS + TREES, max_requests=16,
        batch_sizes=[16], max_seq_len=4 * options.prompts + options.new_tokens,
        graphs={"prefill": "compiled"}, options=compiled, draft_options=compiled,
    )  # fmt: skip
    rows = []
    for shape in CHAINS + TREES:
        for way in WAYS:
            found = speculator.generate(prompts, max_new_tokens=options.new_tokens, shape=shape, graphs=way)
            rows.append({"head": head, "shape": str(shape), "graphs": way,
                         "differences": differences(found, wanted, gaps)})  # fmt: skip
    return rows


def differences(
    found: Sequence[list[int]], wanted: Sequence[list[int]], gaps: Sequence[list[float]]
) -> list[Row]:
    """The first token of each prompt that is not that of plain decoding, and the target's gap there."""
    listed = []
    for prompt, (tokens, others) in enumerate(zip(found, wanted, strict=True)):
        at = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), None)
        if at is not None:
            listed.append({"prompt": prompt, "token": at, "gap": gaps[prompt][at]})
    return listed


def greedy(
    model: Any, prompts: Sequence[list[int]], new_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """(tokens, distances of the two largest logits) of each prompt, by whole forwards without a cache."""
    tokens, gaps = [], []
    for prompt in prompts:
        ids, own = torch.tensor([prompt], device=model.device), list[Tensor]()
        for _ in range(new_tokens):
            best = model(input_ids=ids, use_cache=False).logits[0, -1].float().topk(2)
            own.append(best.values[0] - best.values[1])
            ids = torch.cat([ids, best.indices[:1].view(1, 1)], 1)
        tokens.append(ids[0, len(prompt) :].tolist())
        gaps.append(torch.stack(own).tolist())
    return tokens, gaps


def marks(rows: Sequence[Row], prompts: int) -> list[Mark]:
    """Over all shapes, ways and heads."""
    largest = max((each["gap"] for row in rows for each in row["differences"]), default=0.0)
    most = max(len(row["differences"]) for row in rows) / prompts
    return [
        Mark("largest gap of the two best logits where a token differs", largest, BOUND),
        Mark("largest share of prompts that differ anywhere", most, 0.25),
    ]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", default="eagle1,eagle3")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--out", type=Path, default=RESULTS / "eagle_greedy.json")
    options = parser.parse_args(given)
    rows = [row for head in options.heads.split(",") for row in bench(head, options)]
    command = " ".join(["python -m benchmarks.eagle_greedy", *without_out(given)])
    write(options.out, command, rows, marks(rows, options.prompts))
    shown = [row | {"differences": len(row["differences"])} for row in rows]
    print(table(shown, ("head", "shape", "graphs", "differences")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
