"""vLLM's server loop: this backend beside vLLM's own graphs, on both of its runners.

    python -m benchmarks.bench_vllm                                  # all parts, all shapes
    python -m benchmarks.bench_vllm --parts load,decode --shapes 1b --users 1,32
    python -m benchmarks.bench_vllm --report                         # tables of results that are there

vLLM has to be installed, and this project beside it, not only its folder: vLLM finds plugins by entry points.
Run it outside of the project's root, which would hide the installed package.

load: random weights; 1 to 32 users, each sends a prompt of 128 tokens, waits for 64, and sends the next one;
on demand again with lengths uniform from half of these up (`--ratios 1,0.5`). Sides: vLLM's first runner (v1)
and its second one (v2) as they are by default, this backend in vLLM (piecewise), and on demand this project's
own engine (own), all on the same requests. Each side has a process of its own, all on one GPU. They start one
after the other, compiling into empty caches (`engine_s` is the time of making the engine, `ready_s` counts
from the start of the process and includes the imports, which the first side reads from the disk), and take
turns in serving.

decode: in the same processes, steps that nothing joins or leaves: wall time, host time of the model's call,
the device's idle share under torch's profiler, and what Python's time goes to under cProfile.

eagle: the same steps with an EAGLE head of one layer and three drafted tokens: the time of a round.

answers: 64 prompts of the repository's model in bf16, greedy. Sides: vLLM without graphs or compiling
(eager), v1, v2, and this backend. Where a side's tokens leave eager's, the gap of eager's two largest logits
is listed.

features: the same prompts with an fp8 KV cache, cached prefixes, chunked prefill, too few KV blocks (requests
are preempted), every second request aborted, the repository's EAGLE-1 and EAGLE-3 heads, and after a sleep.

http: `vllm serve` as eager, v1 and with this backend, the engine in a process of its own, and a client that
streams.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks import vllm_http
from benchmarks.common import RESULTS, table, without_out, write
from benchmarks.eagle_greedy import differences
from benchmarks.eagle_pair import prompts_of_all_lengths
from benchmarks.vllm_engine import Engine, EngineError, Row
from benchmarks.vllm_models import (
    FEATURES,
    LLAMA,
    WAYS,
    model_folder,
    random_weights,
    trained_model,
    with_feature,
)
from benchmarks.vllm_report import marks_of, matrix
from benchmarks.vllm_sides import OWN, SEVERAL_GPUS, SIDES, caches_of
from piecewise_graph.bench.load import Load, arrivals

Key = TypeVar("Key", bound=Hashable)  # of an engine
PROMPT, NEW_TOKENS, WARM_UP = 128, 64, 2  # tokens, tokens, requests per user of a turn that is not counted
PATIENCE = 300  # seconds until an engine is ready
EAGLE_SIDES = ("v1", "piecewise")


@contextmanager
def engines(
    starts: Mapping[Key, tuple[str, Row]], at_once: bool = False
) -> Iterator[tuple[dict[Key, Engine], dict[Key, Row]]]:
    """Those that became ready, and a row about the start of each, or why it failed.

    Args:
        starts: the side and the settings of each.
        at_once: start them side by side, not one after the other.
    """
    started = {key: Engine(*start) for key, start in starts.items()} if at_once else {}
    rows = dict[Key, Row]()
    try:
        for key, start in starts.items():
            if key not in started:
                started[key] = Engine(*start)
            try:
                rows[key] = started[key].ready(PATIENCE)
            except EngineError as error:
                started.pop(key).close()
                rows[key] = {"side": start[0], "error": str(error)}
            print(key, rows[key], flush=True)
        yield started, rows
    finally:
        for engine in started.values():
            engine.close()


# --- parts --------------------------------------------------------------------------------------------


def load_and_decode(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    sides, parts = options.sides.split(","), options.parts.split(",")
    for side in sides:
        shutil.rmtree(caches_of(side), ignore_errors=True)
    settings = random_weights(shape, len(sides))
    with engines({side: (side, settings) for side in sides}) as (ready, started):
        yield from ({"part": "start", "shape": shape, **row} for row in started.values())
        for users in map(int, options.users.split(",")):
            common = {"shape": shape, "users": users}
            for ratio in options.ratios if "load" in parts else ():
                for side, turns in served_in_turns(ready, users, ratio, options).items():
                    found = {"side": side, "ratio": ratio, **middle(turns, "tok_s")}
                    yield {"part": "load", **common, **found}
            if "decode" in parts:
                theirs = {side: engine for side, engine in ready.items() if side != OWN}
                yield from ({"part": "decode", **common, **row} for row in decoded(theirs, users, options))


def in_turns(ready: Mapping[str, Engine], turns: int, name: str, **asked: Any) -> dict[str, list[Row]]:
    """What each side answers, side by side: a machine's host is faster and slower from second to second."""
    taken: dict[str, list[Row]] = {side: [] for side in ready}
    for _, (side, engine) in itertools.product(range(turns), ready.items()):
        taken[side].append(engine.ask(name, **asked))
    return taken


def served_in_turns(
    ready: Mapping[str, Engine], users: int, ratio: float, options: argparse.Namespace
) -> dict[str, list[Row]]:
    load = Load(PROMPT, NEW_TOKENS, ratio, vocab_size=LLAMA["vocab_size"])
    in_turns(ready, 1, "load", users=users, requests=arrivals(load, users * WARM_UP))
    requests = arrivals(load, users * options.per_user)
    return in_turns(ready, options.turns, "load", users=users, requests=requests)


def decoded(ready: Mapping[str, Engine], users: int, options: argparse.Namespace) -> Iterator[Row]:
    """A row per side: the median of its turns, and the profile of one more."""
    asked = {"users": users, "prompt": PROMPT}
    for side, turns in in_turns(ready, options.turns, "decode", steps=60, **asked).items():
        profile = ready[side].ask("decode", steps=1, profiled=20, **asked)
        kernels, host = profile["idle"].pop("kernels", []), profile["host"]
        print_profile(f"{side}, {users} users", host, kernels)
        per_step = sum(each["calls"] for each in kernels)
        told = {"idle": profile["idle"], "kernels": per_step, "host": host[:12]}
        yield {"side": side, **middle(turns, "step_ms"), **told}


def middle(turns: Sequence[Row], column: str) -> Row:
    """The turn with the median of a column, the lowest and highest of it, and sums of what was counted."""
    ranked = sorted(turns, key=lambda turn: float(turn[column]))
    sums = {
        name: sum(turn[name] for turn in turns) for name, value in ranked[0].items() if isinstance(value, int)
    }
    return {**ranked[len(ranked) // 2], **sums, "low": ranked[0][column], "high": ranked[-1][column]}


def eagle(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    head = model_folder(shape, num_hidden_layers=1)
    settings = random_weights(shape, len(EAGLE_SIDES)) | {
        "speculative_config": {"method": "eagle", "model": head, "num_speculative_tokens": 3},
        "kv_cache_memory_bytes": 2**31,  # engines start side by side: memory is not measured
    }
    starts = {side: (side, settings) for side in EAGLE_SIDES}
    with engines(starts, at_once=True) as (ready, started):
        yield from ({"part": "eagle start", "shape": shape, **row} for row in started.values())
        for users in map(int, options.users.split(",")):
            taken = in_turns(ready, options.turns, "decode", users=users, prompt=PROMPT, steps=40)
            for side, turns in taken.items():
                row = {"part": "eagle", "shape": shape, "users": users, "side": side}
                found = middle(turns, "step_ms")  # a step is a round
                row |= {"round_ms": found["step_ms"], "low": found["low"], "high": found["high"]}
                yield row | {"tokens_per_round": found["tokens_per_step"]}


def answers(options: argparse.Namespace) -> Iterator[Row]:
    sides = [side for side in SIDES if side not in (OWN, SEVERAL_GPUS)]
    for row in compared({"": trained_model()}, sides, options):
        yield {"part": "answers", **row}


def features(options: argparse.Namespace) -> Iterator[Row]:
    """Eager, v1 and this backend with one setting each; LoRA is refused before weights are loaded."""
    wanted = {name: with_feature(name) for name in options.features.split(",")}
    for row in compared(wanted, ("eager", "v1", "piecewise"), options):
        yield {"part": "features", **row}
    with engines({"LoRA": ("piecewise", trained_model() | {"enable_lora": True})}) as (_, started):
        (row,) = started.values()
    yield {"part": "features", "feature": "LoRA", "side": "piecewise", "refused": row.get("error", "no")}


def compared(settings: Mapping[str, Row], sides: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """A row per feature and side. All engines start side by side; one that fails is a row with an error.

    Args:
        settings: of vllm.LLM, by feature.
    """
    starts = {(name, side): (side, given) for name, given in settings.items() for side in sides}
    with engines(starts, at_once=True) as (ready, started):
        for name in settings:
            common = {"feature": name} if name else {}
            yield from (common | started[name, side] for side in sides if (name, side) not in ready)
            there = {side: ready[name, side] for side in sides if (name, side) in ready}
            try:
                found = {side: answered(engine, name, options) for side, engine in there.items()}
            except EngineError as error:
                yield common | {"error": str(error)}
                continue
            yield from (common | row for row in beside_eager(found))


def answered(engine: Engine, feature: str, options: argparse.Namespace) -> Row:
    """The last of the answers that a feature asks for."""
    asked = {"prompts": prompts_of_all_lengths(options.prompts), "new_tokens": NEW_TOKENS}
    found: Row = [engine.ask(way, **asked) for way in WAYS.get(feature, ("answers",))][-1]
    return found


def beside_eager(found: Mapping[str, Row]) -> Iterator[Row]:
    """A row per side: how many answers left eager's, where, and the gap of eager's logits there."""
    wanted = found.get("eager")
    for side, answer in found.items():
        counts = {name: value for name, value in answer.items() if name not in ("tokens", "gaps")}
        row = {"side": side, "prompts": len(answer["tokens"]), **counts}
        if wanted is not None:
            gaps = wanted.get("gaps") or [[None] * len(each) for each in wanted["tokens"]]
            others = differences(answer["tokens"], wanted["tokens"], gaps)
            row |= {"differ": len(others), "differences": others}
        yield row


def http(options: argparse.Namespace) -> Iterator[Row]:
    for row in vllm_http.streamed(prompts_of_all_lengths(options.prompts)[8:16], NEW_TOKENS):
        yield {"part": "http", **row}


PARTS = ("load", "decode", "eagle", "answers", "features", "http")


def calls(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    parts, shapes = options.parts.split(","), options.shapes.split(",")
    for shape in shapes if {"load", "decode"} & set(parts) else ():
        yield f"load {shape}", partial(load_and_decode, shape, options)
    for shape in shapes if "eagle" in parts else ():
        yield f"eagle {shape}", partial(eagle, shape, options)
    if "answers" in parts:
        yield "answers", partial(answers, options)
    if "features" in parts:
        yield "features", partial(features, options)
    if "http" in parts:
        yield "http", partial(http, options)


def print_profile(what: str, host: Sequence[Row], kernels: Sequence[Row]) -> None:
    print(f"a decode step of {what}: host")
    print(table(host, ("function", "calls", "own_us", "all_us")))
    print(f"a decode step of {what}: device")
    print(table(kernels, ("kernel", "calls", "us")), flush=True)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--sides", default="v1,v2,piecewise", help="of load and decode")
    parser.add_argument("--shapes", default="1b,8b")
    parser.add_argument("--users", default="1,4,16,32")
    parser.add_argument("--ratios", type=_numbers, default="1", help="of the shortest lengths to the longest")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--per-user", type=int, default=8, help="requests of a user per turn")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--features", default=",".join(FEATURES))
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_vllm.json")
    parser.add_argument("--report", action="store_true", help="tables of results that are there")
    options = parser.parse_args(given)
    if options.report:
        print(matrix(json.loads(options.out.read_text())["rows"]))
        return 0
    command, rows = " ".join(["python -m benchmarks.bench_vllm", *without_out(given)]), list[Row]()
    for name, call in calls(options):
        try:
            for row in call():
                rows.append(row)
                write(options.out, command, rows, marks_of(rows), report=False)
        except (EngineError, vllm_http.ServerError) as error:
            rows.append({"part": name, "error": str(error)})
        print(name, "done", flush=True)
    write(options.out, command, rows, marks_of(rows))
    print(matrix(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
