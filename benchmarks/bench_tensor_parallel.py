"""One model on several GPUs: the same tokens, decode steps, an engine under load and EAGLE rounds.

    python -m benchmarks.bench_tensor_parallel --ranks 2,4
    python -m benchmarks.bench_tensor_parallel --parts engine,vllm --out FILE

Each part runs in processes of its own, one per GPU. Random bf16 weights but for the tokens, which the
repository's model gives in float32. The floor is the time that reading a rank's part of the weights takes.
Our sums over ranks are compared with NCCL's and with torch's one-shot kernel over symmetric memory. What one
GPU does is measured at the same time as what two do, on a GPU of its own, where there are three. The part
`vllm` serves the engine's load with vLLM, which is not among the other parts because it wants its own machine
set up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench_vllm import NEW_TOKENS, PATIENCE, PROMPT
from benchmarks.common import RESULTS, Mark, table, without_out, write
from benchmarks.vllm_engine import Engine, EngineError
from benchmarks.vllm_models import LLAMA, random_weights
from benchmarks.vllm_sides import SEVERAL_GPUS
from piecewise_graph.bench.load import Load, arrivals

Row = dict[str, Any]
TIMED = ("decode", "engine", "eagle")
PARTS = ("tokens", "collectives", *TIMED)  # and "vllm"
USERS, REQUESTS_PER_USER = 32, 8
TOKENS = ("generate", "engine", "eagle1", "eagle3")
# Of an 8B step of one request: 2.6 and 1.9 ms on H200s, where the floors are 1.71 and 0.855.
FLOOR_LIMITS = {2: 1.52, 4: 2.22}
CUT_LIMIT = 4.5  # microseconds
_STEP = ("ranks", "batch", "floor_ms", "full_ms", "piecewise_ms", "cut_us")
_SUM = ("ranks", "bytes", "mixing", "own_us", "nccl_us", "one_shot_us", "same_on_all")


class Child:
    """Parts that run on so many ranks, begun at once."""

    def __init__(self, ranks: int, parts: Sequence[str], options: argparse.Namespace, **env: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out = Path(self._folder.name) / "rows.json"
        # A job of its own port: several of them run at once.
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = [
            sys.executable,
            *(several if ranks > 1 else []),
            "-m",
            "benchmarks.tensor_parallel_child",
            "--ranks",
            str(ranks),
        ]
        command += ["--parts", ",".join(parts), "--out", str(self._out), *options.passed]
        # Switches that sum need memory of many GPUs at one address, which not every machine has.
        self._process = subprocess.Popen(command, env={**os.environ, "NCCL_NVLS_ENABLE": "0", **env})

    def rows(self) -> list[Row]:
        """What it has written, and a row that says so if it failed; its error stands in the output."""
        status: int | str = "interrupted"
        with suppress(KeyboardInterrupt):  # the child has it too, and has written each part that it ended
            status = self._process.wait()
        found: list[Row] = json.loads(self._out.read_text()) if self._out.exists() else []
        return found + ([{"part": "failed", "status": status}] if status else [])


def measured(counts: Sequence[int], options: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of one rank and of several, part by part. Tokens are not timed, so all sides run at once."""
    if "tokens" in options.parts:
        sides = [Child(count, ["tokens"], options) for count in (1, *counts)]
        yield [row for child in sides for row in child.rows()]
    for count in sorted(counts, reverse=True):
        for mixing in ("1", "0") if "collectives" in options.parts else ():
            child = Child(count, ["collectives"], options, NCCL_GRAPH_MIXING_SUPPORT=mixing)
            yield [{**row, "mixing": mixing} for row in child.rows()]
        yield from timed(
            [part for part in TIMED if part in options.parts], count, count == min(counts), options
        )
        if "vllm" in options.parts:
            yield [vllm_row(count, options)]


def timed(parts: Sequence[str], ranks: int, last: bool, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of so many ranks, and after the last of one rank, which has no cuts and no sums to compare."""
    gpus, alone = torch.cuda.device_count(), [part for part in parts if part != "decode"]
    one = partial(Child, 1, alone, options, CUDA_VISIBLE_DEVICES=str(gpus - 1))
    beside = one() if alone and last and gpus > ranks else None
    if parts:
        yield Child(ranks, parts, options).rows()
    if alone and last:
        yield (beside or one()).rows()


def vllm_row(ranks: int, options: argparse.Namespace) -> Row:
    """vLLM's engine on so many GPUs under the load of ours: medians of its turns."""
    engine = Engine(SEVERAL_GPUS, random_weights(options.shape, 1) | {"tensor_parallel_size": ranks})
    try:
        start = engine.ready(PATIENCE)
        load = Load(PROMPT, NEW_TOKENS, vocab_size=LLAMA["vocab_size"])
        requests = arrivals(load, USERS * REQUESTS_PER_USER)
        turns = [engine.ask("load", users=USERS, requests=requests) for _ in range(options.turns + 1)]
    except EngineError as error:
        return {"part": "failed", "ranks": ranks, "status": str(error)}
    finally:
        engine.close()
    found = {name: median(turn[name] for turn in turns[1:]) for name in ("tok_s", "tpot_ms", "ttft_ms")}
    return {"part": "vllm", "ranks": ranks, "users": USERS, **found, "ready_s": start["ready_s"]}


def marks_of(rows: Sequence[Row]) -> list[Mark]:
    """One per figure that was promised, of the parts that there are."""
    tokens, found = {row["ranks"]: row for row in rows if row["part"] == "tokens"}, []
    for ranks, row in tokens.items():
        if ranks > 1:
            different = sum(tokens[1][way] != row[way] for way in TOKENS)
            found.append(Mark(f"ways to generate that differ, {ranks} GPUs", different, 0))
    for row in rows:
        if row["part"] == "decode" and row["ranks"] > 1:
            name = f"{row['ranks']} GPUs, {row['batch']} requests"
            found.append(Mark(f"microseconds of a cut, {name}", row["cut_us"], CUT_LIMIT))
            if row["batch"] == 1 and row["ranks"] in FLOOR_LIMITS:
                ratio = row["full_ms"] / row["floor_ms"]
                found.append(
                    Mark(f"decode, FULL, {name}, times the floor", ratio, FLOOR_LIMITS[row["ranks"]])
                )
    return found


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2", help="a list such as 2,4")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: all but vllm")
    parser.add_argument("--turns", type=int, default=3, help="of an engine's load, after one that warms up")
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_tensor_parallel.json")
    options = parser.parse_args(given)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - {*PARTS, "vllm"}:
        parser.error(f"--parts: no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)} and vllm")
    options.passed = [
        "--shape",
        options.shape,
        "--rounds",
        str(options.rounds),
        "--turns",
        str(options.turns),
    ]
    rows: list[Row] = []
    command = " ".join(["python -m benchmarks.bench_tensor_parallel", *without_out(given)])
    for more in measured(list(map(int, options.ranks.split(","))), options):
        rows += more
        write(options.out, command, rows, marks_of(rows), report=False)
        if rows[-1].get("status") == "interrupted":
            break
    write(options.out, command, rows, marks_of(rows))
    print(table([row for row in rows if row["part"] == "all_reduce"], _SUM))
    print(table([row for row in rows if row["part"] == "decode"], _STEP))
    served = [row for row in rows if row["part"] in ("engine", "vllm")]
    print(table(served, ("part", "ranks", "users", "tok_s", "tpot_ms", "ttft_ms")))
    print(
        table(
            [row for row in rows if row["part"] == "eagle"],
            ("ranks", "head", "round_ms", "plain_ms", "ratio"),
        )
    )
    return int(any(row["part"] == "failed" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
