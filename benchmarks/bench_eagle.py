"""A speculative round of a Llama with an EAGLE head: what it takes, and what each phase's graph is worth.

    python -m benchmarks.bench_eagle

Random weights in bf16, a chain of 3 steps, 128 tokens of context per request. No option of `pg.compile` is
set, unless asked for. Acceptance is SYNTHETIC, with a mean of 1 (nothing is accepted) and of 2.5 tokens per
round. It changes the time per token and hardly the time per round. In one process, on the same requests,
these take turns:

    full            draft, verify and draft-extend are one graph each
    piecewise       their forwards are tapes, attention between the graphs
    NAME eager      one phase runs as plain PyTorch, the others as graphs
    extend compiled draft-extend as compiled code without a graph
    plain           no draft: one token per round, as one graph

The floor of a round is the time that reading its weights takes: the target's once, and the head's S times.
Then the planner generates with a draft that is always rejected, in turns with plain decoding. Last
comes a trained pair, the repository's byte-level model and its heads, with real acceptance.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, Timing, alternate, read_bandwidth, table, without_out, write
from benchmarks.eagle_pair import bench_pair, decode_seconds
from benchmarks.llama import SHAPES, random_draft, random_model
from benchmarks.paged import read_bytes
from piecewise_graph.bench.setting import wholes
from piecewise_graph.eagle import Speculator

CONTEXT, STEPS, NEW = 128, 3, 256
ROUND_LIMITS = {("8b", 1): 1.17, ("8b", 32): 1.40, ("1b", 1): 1.50}  # of the floor, with an EAGLE-1 head
AUTO_LIMIT = 1.02  # of plain decoding, where nothing is accepted
EXTEND_GAIN = {1: 0.11, 32: 0.05}  # throughput, against an eager draft-extend: 1B
VARIANTS = {
    "full": "full",
    "piecewise": "piecewise",
    "draft eager": {"draft": "eager"},
    "verify eager": {"verify": "eager"},
    "extend eager": {"extend": "eager"},
    "extend compiled": {"extend": "compiled"},
}
Row = dict[str, Any]


class Pair:
    """A target of a known shape and a head, both with random weights."""

    def __init__(self, shape: str, kind: str, batches: Sequence[int], options: argparse.Namespace) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pg.register_attention()
        self.target = random_model(SHAPES[shape], device, "piecewise")
        self.draft = random_draft(self.target, kind)
        self.target_bytes = read_bytes(self.target)
        looked_up = {id(self.draft.embed_tokens.weight)} - {id(self.draft.lm_head.weight)}
        self.draft_bytes = sum(p.nbytes for p in self.draft.parameters() if id(p) not in looked_up)
        began = time.perf_counter()
        compiled = {"compiler": options.compiler}
        self.speculator = Speculator(
            self.target,
            self.draft,
            shapes=[STEPS, 0],
            max_requests=max(batches),
            max_seq_len=CONTEXT + NEW,
            batch_sizes=batches,
            page_size=16,
            graphs={"prefill": "compiled"},
            options={**compiled, "specialize": options.specialize},
            draft_options={**compiled, "specialize": options.draft_specialize},
        )
        first = self.run(1, "full", 1.0)
        self.start_seconds = time.perf_counter() - began
        first.close()  # type: ignore[attr-defined]

    def prompts(self, batch: int) -> list[list[int]]:
        vocabulary = self.target.config.vocab_size
        return [[(7 * i + j) % vocabulary for j in range(CONTEXT)] for i in range(batch)]

    def run(self, batch: int, graphs: Any, accept_length: float, shape: int = STEPS) -> Callable[[], None]:
        """One round of `batch` requests that begin at the same length every few rounds."""
        engine, requests = self.speculator.session(
            self.prompts(batch),
            max_new_tokens=NEW,
            shape=shape,
            graphs=graphs,
            synthetic=accept_length if shape else None,
            overlap=None,
        )
        while not all(request.tokens for request in requests):
            engine.step()
        engine.rewind()
        engine.step()  # the first round of its kind is captured
        rounds = 0

        def step() -> None:
            nonlocal rounds
            rounds += 1
            if (rounds + 3) * (STEPS + 1) > NEW:
                engine.rewind()
                rounds = 0
            engine.step()

        step.close = engine.close  # type: ignore[attr-defined]
        return step


@torch.no_grad()
def bench(shape: str, kind: str, options: argparse.Namespace) -> Iterator[tuple[list[Row], list[Mark]]]:
    """Rows and marks, batch size by batch size."""
    pair = Pair(shape, kind, options.batches, options)
    bandwidth = options.bandwidth or read_bandwidth(pair.speculator.device)
    floor = (pair.target_bytes + STEPS * pair.draft_bytes) / bandwidth
    start: Row = {
        "shape": shape, "head": kind, "start_s": pair.start_seconds, "floor_ms": floor * 1e3,
        "plain_floor_ms": pair.target_bytes / bandwidth * 1e3, "bandwidth_TBps": bandwidth / 1e12,
    }  # fmt: skip
    yield [start], []
    for batch in options.batches:
        for accept_length in (1.0, 2.5):
            times = measure(pair, batch, accept_length, options)
            rows = [_row(shape, kind, batch, accept_length, *each, floor) for each in times.items()]
            yield rows, _marks(shape, kind, batch, accept_length, times, floor)
        row = always_wrong(pair, batch, options.turns)
        name = f"{shape} {kind}, {batch} requests: planner, draft always wrong / plain decoding"
        yield (
            [{"shape": shape, "head": kind, "requests": batch, **row}],
            [Mark(name, row["ratio"], AUTO_LIMIT)],
        )


def measure(pair: Pair, batch: int, accept_length: float, options: argparse.Namespace) -> dict[str, Timing]:
    """Seconds per round of every variant; each has requests of its own."""
    names = options.variants.split(",") if accept_length == 1.0 else ["full"]
    sides = {}
    for name in names:
        make = partial(pair.run, batch, VARIANTS[name], accept_length)
        sides[name] = make
    sides["plain"] = partial(pair.run, batch, "full", accept_length, 0)
    # All requests of all sides would not fit side by side: a side's are made anew for its turns.
    found: dict[str, list[Timing]] = {name: [] for name in sides}
    for _ in range(options.turns):
        for name, make in sides.items():
            step = make()
            found[name].append(alternate({name: step}, rounds=options.rounds, repeat=5)[name])
            step.close()  # type: ignore[attr-defined]
    return {
        name: sorted(turns, key=lambda timing: timing.median)[len(turns) // 2]
        for name, turns in found.items()
    }


def always_wrong(pair: Pair, batch: int, turns: int) -> Row:
    """Whole answers of the planner with a draft that is always rejected, in turns with plain decoding.

    Each side is one engine, as in a server: what the planner has learned lasts.
    """
    asked: dict[str, Any] = {"auto": {"shape": "auto", "synthetic": 1.0}, "plain": {"shape": 0}}
    engines = {name: pair.speculator.engine(**options) for name, options in asked.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(turns + 1):  # in the first one the planner measures the phases, and learns
        for name, engine in engines.items():
            prompts = pair.prompts(batch)
            requests = [engine.add_request(prompt, max_new_tokens=NEW) for prompt in prompts]
            seconds[name].append(decode_seconds(engine, requests))
    ratios = [auto / plain for auto, plain in zip(seconds["auto"], seconds["plain"], strict=True)]
    return {
        "synthetic_accept_length": 1.0,
        **{f"{name}_token_ms": statistics.median(taken[1:]) * 1e3 for name, taken in seconds.items()},
        "first": ratios[0], "ratio": statistics.median(ratios[1:]), "low": min(ratios[1:]),
        "high": max(ratios[1:]),
    }  # fmt: skip


def _row(
    shape: str, kind: str, batch: int, accept_length: float, name: str, timing: Timing, floor: float
) -> Row:
    tokens = 1.0 if name == "plain" else accept_length
    return {
        "shape": shape, "head": kind, "requests": batch, "graphs": name, "synthetic_accept_length": tokens,
        "round_ms": timing.median * 1e3, "low_ms": timing.low * 1e3, "high_ms": timing.high * 1e3,
        "token_ms": timing.median * 1e3 / tokens,
        "over_floor": timing.median / floor if name != "plain" else None,
    }  # fmt: skip


def _marks(
    shape: str, kind: str, batch: int, accept_length: float, times: dict[str, Timing], floor: float
) -> list[Mark]:
    marks = []
    limit = ROUND_LIMITS.get((shape, batch)) if kind == "eagle1" and accept_length == 1.0 else None
    if limit is not None:
        asked = f"{batch} request{'s' if batch > 1 else ''}"
        name = f"{shape} round of {STEPS} steps, EAGLE-1 head, {asked}, times the floor"
        marks.append(Mark(name, times["full"].median / floor, limit))
    gain = EXTEND_GAIN.get(batch)
    if shape == "1b" and gain is not None and "extend eager" in times:
        name = f"1b {kind}, {batch} requests: round with a graph of draft-extend / with an eager one"
        marks.append(Mark(name, times["full"].median / times["extend eager"].median, 1 / (1 + gain)))
    return marks


_COLUMNS = ("shape", "head", "requests", "graphs", "synthetic_accept_length", "round_ms", "low_ms", "high_ms",
            "token_ms", "over_floor")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _options(given)
    rows: list[Row] = []
    marks: list[Mark] = []
    command = " ".join(["python -m benchmarks.bench_eagle", *without_out(given)])
    for shape in filter(None, options.shapes.split(",")):
        for kind in options.heads.split(","):
            for more, met in bench(shape, kind, options):
                rows, marks = rows + more, marks + met
                write(options.out, command, rows, marks, report=False)
            torch._dynamo.reset()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if not options.no_pair:
        rows += bench_pair(options)
    write(options.out, command, rows, marks)
    print(table([row for row in rows if "graphs" in row], _COLUMNS))
    return 0


def _options(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--heads", default="eagle1,eagle3")
    parser.add_argument("--batches", type=wholes(1, fewest=1), default="1,4,16,32")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5, help="measurements of a turn, 5 rounds each")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--bandwidth", type=float, help="bytes per second, None = as in common.py")
    parser.add_argument("--compiler", default="inductor")
    own = {"type": wholes(1), "default": ""}
    parser.add_argument("--specialize", **own, help="row counts with code of their own; empty = none")
    parser.add_argument("--draft-specialize", **own, help="the same of the head")
    parser.add_argument("--no-pair", action="store_true", help="leave out the trained pair")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_eagle.json")
    return parser.parse_args(given)


if __name__ == "__main__":
    raise SystemExit(main())
