"""An engine under load: what overlap scheduling, graphs and speculation are worth to a server.

    python -m benchmarks.bench_serving

Llamas with random weights in bf16 and an EAGLE-1 head, a chain of 3 steps, SYNTHETIC acceptance of 2.5 tokens
per round; then the repository's trained pair (`byte-eagle1`, `byte-eagle3`), where acceptance is real. One
speculator per shape, so that everything is compiled once; sides take turns in one process, on the same
requests:

    as given          overlap on, draft, verify and draft-extend one graph each
    overlap=off       the host reads a round's result before it launches the next round
    extend=eager      draft-extend as plain PyTorch
    graphs=piecewise  forwards are tapes, attention between the graphs
    steps=0           plain decoding
    steps=auto        a planner chooses the chain or plain decoding for every round

on two loads:

    serving  two requests per user, prompts and answers in the same steps: what users see
    decode   one request per user, short prompts and long answers: hardly anything but rounds

A few more rounds of the decode load, with overlap and without, are timed on the host, without what it waits
(host_time.py), and others traced for the share of time in which the device idles (idle_time.py). Rows of
earlier runs on the same machine stay in the results file until they are measured again, so shapes and parts
can be measured one by one.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import RESULTS, table, without_out
from benchmarks.eagle_pair import HEADS, heldout_prompts, load_pair
from benchmarks.host_time import host_us
from benchmarks.idle_time import IdleTime, idle_time, read_events
from benchmarks.llama import SHAPES, random_draft, random_model
from benchmarks.serving_results import Results
from piecewise_graph.bench.drive import take_turns
from piecewise_graph.bench.load import Load, arrivals
from piecewise_graph.bench.metrics import COLUMNS, Metrics, acceptance, ratios
from piecewise_graph.bench.setting import Setting, wholes
from piecewise_graph.bench.trace import steady, trace
from piecewise_graph.eagle import Speculator

STEPS, ACCEPT_LENGTH = 3, 2.5
PAIRS = {f"byte-{kind}": kind for kind in HEADS}
GIVEN = "as given"
PLAIN = "steps=0"
COMPARED = {"overlap": (GIVEN, "overlap=off"), "extend": (GIVEN, "extend=eager"),
            "graphs": (GIVEN, "graphs=piecewise"), "speculation": (GIVEN, PLAIN),
            "auto": ("steps=auto", PLAIN)}  # fmt: skip
DECODED = (COMPARED["overlap"], COMPARED["speculation"])
PARTS = (*COMPARED, "decode", "idle")
DECODE_PROMPT = 16  # tokens: those of 32 requests fit into one step
TRACED = (1, 16)  # requests
Row = dict[str, Any]


class Subject:
    """A target, its head and their speculator.

    Attributes:
        base: the setting that all others differ from.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        began = time.perf_counter()
        self.name, self._options = name, options
        target, draft = load_pair(PAIRS[name]) if name in PAIRS else _random(name)
        synthetic = None if name in PAIRS else ACCEPT_LENGTH
        self.base = Setting.of(steps=STEPS, overlap=True, synthetic_accept_length=synthetic)
        self._vocabulary = target.get_input_embeddings().weight.shape[0]
        compiled: dict[str, Any] = {
            "compiler": options.compiler,
            "specialize": options.specialize,
            "merge_linears": True,
        }
        self.speculator = Speculator(
            target,
            draft,
            shapes=[STEPS, 0],
            max_requests=max(options.users),
            max_seq_len=options.input_len + options.output_len,
            page_size=16,
            batch_sizes=options.users,
            graphs={"prefill": options.prefill} if options.prefill else {},
            options=compiled,
            draft_options=compiled,
        )
        self.base.engine(self.speculator).close()  # which compiles and captures prefill
        self.start_seconds = time.perf_counter() - began

    def load(self, kind: str) -> Load:
        """Of one kind, for any number of requests."""
        options = self._options
        most, total = options.input_len, options.input_len + options.output_len
        if kind == "decode":
            most = min(DECODE_PROMPT, most)
        texts = heldout_prompts(64) if self.name in PAIRS else None
        answer = total - most if kind == "decode" else options.output_len
        return Load(most, answer, vocab_size=self._vocabulary, texts=texts)


def _random(shape: str) -> tuple[Any, Any]:
    pg.register_attention()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = random_model(SHAPES[shape], device, "piecewise")
    return target, random_draft(target, "eagle1")


def bench(subject: Subject, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of one subject, part by part."""
    yield [{"kind": "start", "shape": subject.name, "start_s": subject.start_seconds}]
    for users in options.users:
        compared = [pair for part, pair in COMPARED.items() if part in options.parts]
        if compared:
            yield measured(subject, "serving", users, compared, options)
        if "decode" in options.parts:
            yield measured(subject, "decode", users, DECODED, options)
        if "idle" in options.parts and users in TRACED:
            yield [idle_row(subject, users, overlap, options.rounds) for overlap in (True, False)]


def measured(
    subject: Subject, kind: str, users: int, pairs: Sequence[tuple[str, str]], options: argparse.Namespace
) -> list[Row]:
    """A row per side, medians over its turns, and a row per ratio of the sides of a pair."""
    base, names = subject.base, dict.fromkeys(side for pair in pairs for side in pair)
    sides = {name: base if name == GIVEN else base.but(name, has_draft=True) for name in names}
    count = users * (options.requests_per_user if kind == "serving" else 1)
    load = subject.load(kind)
    found = take_turns(subject.speculator, sides, arrivals(load, count), users, turns=options.turns)
    place = {"shape": subject.name, "load": kind}
    rows: list[Row] = [
        {"kind": "side", **place, "side": side, "input_len": load.input_len, "output_len": load.output_len,
         **Metrics.median_of(turns).to_dict()}
        for side, turns in found.items()
    ]  # fmt: skip
    return rows + [
        {"kind": "ratio", **place, "max_concurrency": users, "requests": count,
         "ratio": f"{first} / {second}",
         "acceptance": acceptance(found[first][0].synthetic), **asdict(ratio)}
        for first, second in pairs
        for ratio in ratios(found[first], found[second])
    ]  # fmt: skip


def idle_row(subject: Subject, users: int, overlap: bool, rounds: int) -> Row:
    """How long the device idles and what the host takes, in some rounds of the decode load.

    Idle shares are None on a CPU. The host is timed in rounds without the profiler, which slows it.
    """
    load = arrivals(subject.load("decode"), users)
    setting = Setting.of(**subject.base.values | {"overlap": overlap})
    with steady(subject.speculator, setting, load, rounds) as engine:
        host = host_us(engine.step, rounds)
        assert engine.unfinished == users, "a request ended while the host was timed: ask for fewer rounds"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        steps = trace(subject.speculator, setting, load, file, steps=rounds)
        found = idle_time(read_events(file))
    shares = dict.fromkeys(IdleTime.__annotations__) if found is None else asdict(found)
    place = {"shape": subject.name, "max_concurrency": users, "overlap": overlap}
    label = acceptance(setting.values["synthetic_accept_length"])
    return {"kind": "idle", **place, "acceptance": label, "steps": steps, "host_us": host, **shares}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    options = _options(given)
    command = " ".join(["python -m benchmarks.bench_serving", *without_out(given)])
    results = Results(options.out, command)
    for name in filter(None, options.shapes.split(",")):
        for more in bench(Subject(name, options), options):
            results.add(more)
            _show(more)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    results.finish()
    return 0


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = {
        "side": ("shape", "load", "side", "acceptance", *COLUMNS),
        "ratio": (
            "shape",
            "load",
            "ratio",
            "acceptance",
            "max_concurrency",
            "column",
            "value",
            "low",
            "high",
        ),
        "idle": (
            "shape",
            "max_concurrency",
            "overlap",
            "acceptance",
            "nothing_runs",
            "between_launches",
            "host_us",
        ),
        "start": ("shape", "start_s"),
    }
    for kind, names in columns.items():
        own = [row for row in rows if row["kind"] == kind]
        if own:
            print(table(own, names), end="\n\n", flush=True)


def _options(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(["1b", "8b", *PAIRS]), help="of " + ", ".join(SHAPES))
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure")
    parser.add_argument(
        "--concurrency", dest="users", type=wholes(1, fewest=1), default="1,4,16,32",
        help="users, who wait for their answers",
    )  # fmt: skip
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--requests-per-user", type=int, default=2, help="of the serving load")
    parser.add_argument("--rounds", type=int, default=16, help="that are traced")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--prefill", choices=("piecewise", "compiled", "eager"), help="how prompts run")
    parser.add_argument(
        "--specialize", type=wholes(1), default=f"1,{STEPS + 1}", help="row counts with code of their own"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_serving.json")
    options = parser.parse_args(given)
    options.parts = options.parts.split(",")
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
