"""How many segment structures of tiny transformers models the padding proof shows clean, and what it takes.

    python -m benchmarks.bench_padding_proof                 # every model of tests/tiny_models.py
    python -m benchmarks.bench_padding_proof llama gpt2      # some of them
    python -m benchmarks.bench_padding_proof --attention eager --limit-seconds 60

A structure counts as proved where it has no findings and its outputs can be narrowed. Claims are threaded
from segment to segment; results of splitting ops start like inputs of a call.
The time is that of one analysis.
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.analysis import Claim, analyse, live_claim, stored_claim
from piecewise_graph.compiler.segment_key import structure_key
from piecewise_graph.splitter.split import split
from piecewise_graph.splitter.split_graph import Ref, SegmentStep

sys.path.append(str(Path(__file__).parents[1] / "tests"))


def main(arguments: Sequence[str] | None = None) -> None:
    import tiny_models

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--out", default="")
    parser.add_argument("--limit-seconds", type=int, default=120)
    chosen = parser.parse_args(arguments)
    rows = []
    for name in chosen.names or tiny_models.NAMES:
        row = model_row(name, chosen.attention, chosen.limit_seconds)
        rows.append(row)
        print(json.dumps(row), flush=True)
    good = [row for row in rows if "error" not in row]
    total, proved = sum(r["structures"] for r in good), sum(r["proved"] for r in good)
    seconds = sorted(s for r in good for s in r["milliseconds"])
    reasons = collections.Counter(reason for r in good for reason in r["findings"])
    middle = seconds[len(seconds) // 2] if seconds else None
    print(f"{proved} of {total} structures of {len(good)} models proved; median {middle} ms")
    for reason, count in reasons.most_common():
        print(f"{count:5d} {reason}")
    if chosen.out:
        Path(chosen.out).write_text(
            json.dumps({"models": rows, "proved": proved, "structures": total}, indent=1)
        )


def model_row(name: str, attention: str, limit: int) -> dict[str, Any]:
    """The figures of one model, or why there are none."""
    import tiny_models

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"more than {limit} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(limit)
    try:
        torch._dynamo.reset()
        model = tiny_models.build(name, attention)
        ids = tiny_models.random_ids(13)
        torch._dynamo.mark_dynamic(ids, 1)
        looked = Looking()
        with torch.no_grad():
            torch.compile(model, backend=looked)(**tiny_models.call(name, ids))
    except BaseException as problem:
        if isinstance(problem, KeyboardInterrupt):
            raise
        return {"model": name, "error": f"{type(problem).__name__}: {str(problem)[:200]}"}
    finally:
        signal.alarm(0)
    return {
        "model": name,
        "structures": len(looked.structures),
        "proved": sum(not findings for findings, _ in looked.structures.values()),
        "findings": [f for findings, _ in looked.structures.values() for f in findings],
        "milliseconds": [took for _, took in looked.structures.values()],
    }


class Looking:
    """A backend that judges the segments of each graph and runs it as it is."""

    def __init__(self) -> None:
        self.structures: dict[Any, tuple[list[str], float]] = {}

    def __call__(self, gm: GraphModule, inputs: Sequence[Any]) -> Any:
        graph = split(gm)
        symbols = {s for spec in graph.specs if spec for e in spec.shape for s in e.free_symbols}
        claims: dict[int, Claim | None] = {}
        for step in graph.steps:
            if isinstance(step, SegmentStep):
                nodes = [n for n in step.gm.graph.nodes if n.op == "placeholder"]
                fakes = [_torch.example_value(node) for node in nodes]
                given = [
                    claims.setdefault(item.slot, self._first(graph, item.slot, fake, symbols, inputs))
                    if isinstance(item, Ref) and isinstance(fake, Tensor)
                    else None
                    for item, fake in zip(step.inputs, fakes, strict=True)
                ]
                key = structure_key(step.gm, "eager").digest, tuple(given)
                began = time.perf_counter()
                proof = analyse(step.gm, fakes, given, symbols, largest=16)
                took = round(1000 * (time.perf_counter() - began), 1)
                found = list(dict.fromkeys(f"{f.op}: {f.why}" for f in proof.findings))
                for slot, claim in zip(step.outputs, proof.outputs, strict=True):
                    claims[slot] = claim
                    if claim is None or not claim.is_plain:
                        found.append("output of derived rows")
                if proof.facts.computes:
                    self.structures.setdefault(key, (found, took))
        return gm.forward

    @staticmethod
    def _first(graph: Any, slot: int, fake: Tensor, symbols: Any, inputs: Sequence[Any]) -> Claim | None:
        bound = slot < len(graph.inputs) and graph.inputs[slot].bound
        real = inputs[slot] if slot < len(inputs) else None
        return stored_claim(fake, real) if bound else live_claim(fake, symbols)


if __name__ == "__main__":
    main()
