"""`python -m tests.fuzz`: programs, ops, replay."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fuzz.ops import op_cases, run_op
from fuzz.rows import Row, Rows, shard
from fuzz.sequences import Case
from fuzz.shrink import shrink
from fuzz.trial import case_of, run_case, run_seed

_BATCH = 250  # then processes begin anew: what torch keeps of a trace does not add up


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 where anything was wrong or raised from inside."""
    given = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device(given.device)
    if given.command == "replay":
        return _replay(given, device)
    if given.command == "programs":
        items: Sequence[Any] = range(given.seed, given.seed + given.count)
        run: Callable[[Any], Row] = partial(run_seed, compiler=given.compiler, device=device)
        return _sweep(given, items, int, run)
    return _sweep(
        given, op_cases(given.samples, given.op), str, partial(run_op, compiler=given.compiler, device=device)
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    programs = commands.add_parser("programs", help="random programs, one per seed")
    programs.add_argument("--count", type=int, default=300)
    programs.add_argument("--seed", type=int, default=0, help="the first seed")
    ops = commands.add_parser("ops", help="every op of op_db as a function of [T, ...]")
    ops.add_argument("--samples", type=int, default=1, help="sample inputs per op")
    ops.add_argument("--op", default=None, help="only the op of this name")
    replay = commands.add_parser("replay", help="one seed, shrunk where it fails, printed as Python")
    replay.add_argument("seed", type=int)
    replay.add_argument("--no-shrink", action="store_true")
    for command in (programs, ops):
        command.add_argument("--shard", default="1/1", help="K/N: every N-th, from the K-th on")
        command.add_argument("--resume", type=Path, help="JSONL of rows; those there are not run again")
        command.add_argument("--jobs", type=int, default=1, help="processes")
        command.add_argument("--summary", type=Path, help="a JSON file for the figures")
    for command in (programs, ops, replay):
        command.add_argument("--compiler", default="eager", choices=("eager", "aot_eager", "inductor"))
        command.add_argument("--device", default="cpu")
    return parser


def _sweep(
    given: argparse.Namespace,
    items: Sequence[Any],
    name: Callable[[Any], int | str],
    run: Callable[[Any], Row],
) -> int:
    rows, start = Rows(given.resume), time.perf_counter()
    todo = [item for item in shard(items, given.shard) if name(item) not in rows.done]
    for item, row in zip(todo, _run_all(run, todo, given.jobs), strict=True):
        rows.add(row)
        if row.verdict not in ("right", "refused", "invalid"):
            print(f"{row.seed}: {row.verdict}: {row.reason}", flush=True)
        if row.failed and given.command == "programs":
            print(case_of(item).program.source, flush=True)
    seconds = time.perf_counter() - start
    figures = rows.summary() | {
        "compiler": given.compiler,
        "device": given.device,
        "torch": torch.__version__,
    }
    if given.summary is not None:
        given.summary.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=1))
    print(f"{len(todo)} run, {seconds / max(len(todo), 1):.2f} s each")
    if rows.failed and given.command == "programs":
        print(
            f"python -m tests.fuzz replay {rows.failed[0].seed} --compiler {given.compiler}", file=sys.stderr
        )
    return bool(rows.failed)


def _run_all(run: Callable[[Any], Row], items: Sequence[Any], jobs: int) -> Iterator[Row]:
    """Rows in the order of `items`; with several jobs, from processes of their own."""
    if jobs == 1:
        yield from map(run, items)
        return
    for start in range(0, len(items), _BATCH):
        yield from _in_processes(run, items[start : start + _BATCH], jobs)


def _in_processes(run: Callable[[Any], Row], items: Sequence[Any], jobs: int) -> list[Row]:
    """The rows of one batch. A process that dies says nothing, so half a batch is tried at a time."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(min(jobs, len(items)), context, torch.set_num_threads, (1,)) as pool:
            return list(pool.map(run, items))
    except BrokenProcessPool:
        if len(items) == 1:
            return [Row(str(items[0]), "error", "the process died")]
    half = len(items) // 2
    return [*_in_processes(run, items[:half], jobs), *_in_processes(run, items[half:], jobs)]


def _replay(given: argparse.Namespace, device: torch.device) -> int:
    case = case_of(given.seed)
    row = run_case(case, given.compiler, device, given.seed)
    if row.failed and not given.no_shrink:

        def fails(smaller: Case) -> bool:
            return run_case(smaller, given.compiler, device).verdict == row.verdict

        case = shrink(case, fails)
        row = run_case(case, given.compiler, device, given.seed)
    print(case)
    print(f"\n# {row.seed}: {row.verdict}: {row.reason}\n# {row.counters}")
    return row.failed
