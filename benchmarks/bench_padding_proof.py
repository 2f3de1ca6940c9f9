"""How much of transformers' language models is proved to bear padding, as tiny models.

    python -m benchmarks.bench_padding_proof                 # every model of tests/tiny_models.py
    python -m benchmarks.bench_padding_proof llama gpt2      # some of them
    python -m benchmarks.bench_padding_proof --attention eager --limit-seconds 60

`pg.compile` traces each model, and what its compiler's prove_padding answers is counted. Where something is
not proved, it is asked again with `unproved="tried"`, which tells the structures before any cut. Each
structure of a trace's segments counts once:

    proved    it is padded as it is
    cut       it is not proved as it is: regions are cut out to run on live rows, and the rest is padded
    refused   its trace is never padded, so that all of its nodes run on live rows

Each model is called with two sizes. Traces of fixed shapes that the second call replaces, behind a graph
break, are left out. A model that is not traced within --limit-seconds has no figures; its row says so.
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import GraphModule

import piecewise_graph as pg
from benchmarks.common import RESULTS, without_out, write
from piecewise_graph.compiler import build_program
from piecewise_graph.compiler.prove_padding import ProvedGraph, Unproved, prove_padding

sys.path.append(str(Path(__file__).parents[1] / "tests"))

TOKENS = (13, 9)
SIZES = [8, 16, 64]
_COUNTS = (
    *("structures", "proved", "cut", "refused", "traces", "refused_traces"),
    *("nodes", "nodes_on_live_rows", "regions"),
)


class Judged:
    """What prove_padding says of one trace: before any cut, and in the end."""

    def __init__(self, whole: ProvedGraph, final: ProvedGraph, seconds: float) -> None:
        self.whole, self.final, self.seconds = whole, final, seconds

    def counts(self) -> Counter[str]:
        """The figures of the trace, named as in _COUNTS."""
        keys = {index: key.digest for index, key in self.whole.keys.items()}
        computing = {digest for digest in keys.values() if self.whole.facts[digest].computes}
        unproved = {keys[index] for index in self.whole.unproved} & computing
        refused = self.refusal() is not None
        found = Counter(traces=1, structures=len(computing))
        if refused:
            found.update(refused_traces=1, refused=len(computing))
        else:
            found.update(proved=len(computing - unproved), cut=len(unproved))
        for step in self.final.split.segments:
            nodes = sum(node.op.startswith("call_") for node in step.gm.graph.nodes)
            found.update(nodes=nodes, nodes_on_live_rows=nodes if refused or not step.padded else 0)
            found["regions"] += not step.padded
        return found

    def _never(self) -> str | None:
        """Why no replay of the trace could be padded, whatever its segments compute."""
        sizes = len(self.whole.split.symbols)
        if sizes != 1:
            return "fixed shapes" if sizes == 0 else "several dynamic sizes"
        facts = self.whole.facts.values()
        if any(fact.random for fact in facts):
            return "random numbers"
        return "reads a value back to the host" if any(fact.host_sync for fact in facts) else None

    def refusal(self) -> str | None:
        """Why the trace is never padded, or None."""
        return self._never() or self.final.unpaddable

    def reasons(self) -> list[str]:
        """The first causes that prove_padding names in each structure."""
        texts = {self.whole.keys[index].digest: text for index, text in self.whole.unproved.items()}
        return [f"{op}: {why}" for text in texts.values() for op, why in re.findall(r"(\S+) \((.*?)\)", text)]


class Looking:
    """Stands where build_program calls prove_padding, and keeps what it says in each call of the model."""

    def __init__(self) -> None:
        self.calls: list[list[Judged]] = []

    def __call__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        compiler: str,
        largest: int,
        *,
        unproved: Unproved,
        uncapturable: Mapping[str, str],
    ) -> ProvedGraph:
        began = time.perf_counter()
        cut = {"uncapturable": uncapturable}
        final = prove_padding(gm, inputs, compiler, largest, unproved=unproved, **cut)
        took = time.perf_counter() - began
        is_whole = not final.unproved and final.unpaddable is None
        whole = final if is_whole else prove_padding(gm, inputs, compiler, largest, unproved="tried", **cut)
        self.calls[-1].append(Judged(whole, final, took))
        return final

    def lasting(self) -> list[Judged]:
        """The traces that serve later calls."""
        first, second = self.calls
        return [judged for judged in first if judged.whole.split.symbols or not second] + second


def model_row(name: str, attention: str, limit: int) -> dict[str, Any]:
    """The figures of one model, or why there are none."""

    def too_long(*_: Any) -> None:
        raise TimeoutError(f"more than {limit} s")

    looking = Looking()
    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(limit)
    try:
        _trace(name, attention, looking)
    except Exception as problem:
        return {"model": name, "error": f"{type(problem).__name__}: {str(problem)[:200]}"}
    finally:
        signal.alarm(0)
        torch._dynamo.reset()
        pg.reset()
    traces = looking.lasting()
    counts = sum((judged.counts() for judged in traces), Counter[str]())
    return {
        "model": name,
        **{count: counts[count] for count in _COUNTS},
        "reasons": [reason for judged in traces for reason in judged.reasons()],
        "refusals": [why for judged in traces if (why := judged.refusal()) is not None],
        "proof_ms": round(1000 * sum(judged.seconds for judged in traces), 1),
    }


def _trace(name: str, attention: str, looking: Looking) -> None:
    """Call a compiled model, so that it is traced for all sizes."""
    import tiny_models

    model = tiny_models.build(name, attention)
    compiled = pg.compile(
        model, compiler="eager", capture="explicit", capture_sizes=SIZES, max_tokens=max(SIZES)
    )
    with torch.no_grad(), patch.object(build_program, "prove_padding", looking):
        for tokens in TOKENS:
            looking.calls.append([])
            compiled(**tiny_models.call(name, tiny_models.random_ids(tokens)))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of all models together."""
    good = [row for row in rows if "error" not in row]
    reasons = Counter(reason for row in good for reason in dict.fromkeys(row["reasons"]))
    refusals = Counter(why for row in good for why in row["refusals"])
    errors = Counter(row["error"].partition(":")[0] for row in rows if "error" in row)
    took = sorted(row["proof_ms"] for row in good)
    return {
        "model": "all",
        "models": len(good),
        "models_without_figures": dict(errors.most_common()),
        "models_all_proved": sum(row["proved"] == row["structures"] for row in good),
        "models_cut": sum(row["cut"] > 0 for row in good),
        "models_with_a_refused_trace": sum(row["refused_traces"] > 0 for row in good),
        **{count: sum(row[count] for row in good) for count in _COUNTS},
        "models_by_reason": dict(reasons.most_common()),
        "traces_by_refusal": dict(refusals.most_common()),
        "proof_ms_median": took[len(took) // 2] if took else None,
    }


def main(arguments: list[str] | None = None) -> int:
    import tiny_models

    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="model", help="of tests/tiny_models.py; default: all")
    parser.add_argument("--attention", default="sdpa")
    parser.add_argument("--limit-seconds", type=int, default=120)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_padding_proof.json")
    options = parser.parse_args(given)
    rows = []
    for name in options.names or tiny_models.NAMES:
        rows.append(model_row(name, options.attention, options.limit_seconds))
        print(rows[-1], flush=True)
    total = summary(rows)
    command = " ".join(["python -m benchmarks.bench_padding_proof", *without_out(given)])
    write(options.out, command, [*rows, total], ())
    for kind in ("models_by_reason", "traces_by_refusal"):
        for reason, count in total[kind].items():
            print(f"{count:5d} {kind.split('_')[0]} {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
