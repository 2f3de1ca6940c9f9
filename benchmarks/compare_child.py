"""What bench_compare runs in processes of their own: one side's start, and all sides' steady state.

Each result is printed at once, as a line: the parent process may end this one before it is finished.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from benchmarks.common import alternate, alternate_host, distance, on_own_stream, read_bandwidth, wait
from benchmarks.compare_sides import OURS, SIDES, Eager, Step
from benchmarks.llama import SHAPES
from benchmarks.paged import PagedModel

MARK = "@row "
MAKE_READY = 0.7  # of a budget; the rest is for timing


def emit(**row: Any) -> None:
    print(MARK + json.dumps(row), flush=True)


def parse(output: str) -> list[dict[str, Any]]:
    """The rows among what a child has printed."""
    lines = [line for line in output.splitlines() if line.startswith(MARK) and line.endswith("}")]
    return [json.loads(line.removeprefix(MARK)) for line in lines]


def sizes(options: argparse.Namespace) -> list[int]:
    """The token counts, largest first: the largest is compiled for, and smaller graphs reuse its memory."""
    return sorted((int(count) for count in options.tokens.split(",")), reverse=True)


@on_own_stream()
def start(options: argparse.Namespace) -> None:
    """One side's way from a process with weights on the device to all its token counts being ready."""
    paged = _prepared(options)
    names = ("piecewise", "full") if options.child == "ours" else (options.child,)
    began = time.perf_counter()
    sides = [SIDES[name](paged, options.cache_dir, options.compiler) for name in names]
    sides[0].first()
    wait()
    row: dict[str, Any] = {"first_call_s": time.perf_counter() - began, "backend_s": _backend_seconds()}
    row["ready"] = []
    emit(**row | sides[0].facts())
    for side in sides:
        for tokens in paged.counts:
            side.ready(tokens)
            wait()
            row["ready"] = sorted({*row["ready"], tokens})
            row |= {"ready_s": time.perf_counter() - began, "backend_s": _backend_seconds()}
            emit(**row)
    captured = sum(side.capture_seconds for side in sides)
    emit(**row | sides[0].facts() | {"capture_s": captured or None})


def _prepared(options: argparse.Namespace) -> PagedModel:
    """All that is there before the clock starts: imports, weights, attention kernels."""
    import torch._inductor.compile_fx
    import torch._inductor.cudagraph_trees  # noqa: F401

    paged = PagedModel(SHAPES[options.shape], sizes(options), options.implementation)
    paged.touch()
    wait()
    return paged


def _backend_seconds() -> float | None:
    """Seconds in the backend so far, of all that Dynamo traced; None where this torch names it otherwise."""
    headers, values = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    found = dict(zip(headers, values, strict=True)).get("OutputGraph.call_user_compiler")
    return None if found is None else float(found)


@on_own_stream()
def steady(options: argparse.Namespace) -> None:
    """All sides in this process, made ready one after the other, then timed in turns."""
    began = time.perf_counter()
    torch._dynamo.config.recompile_limit = 64  # the sides share the module's code, and so the count
    paged = _prepared(options)
    bandwidth = read_bandwidth(paged.device)
    floor = paged.weight_bytes / bandwidth
    emit(kind="floor", ms=floor * 1e3, weight_bytes=paged.weight_bytes, bandwidth_TBps=bandwidth / 1e12)
    skipped = json.loads(options.skip)
    ready: dict[str, dict[int, Step | str]] = {}
    for name in options.sides.split(","):
        if time.perf_counter() - began > MAKE_READY * options.budget:
            skipped[name] = {str(count): "no time left" for count in paged.counts}
        ready[name] = _make_ready(name, paged, options, skipped.get(name, {}))
    for tokens in reversed(paged.counts):
        steps = {name: found[tokens] for name, found in ready.items()}
        _time_sides(tokens, steps, floor, options.rounds)


def _make_ready(
    name: str, paged: PagedModel, options: argparse.Namespace, skipped: Mapping[str, str]
) -> dict[int, Step | str]:
    """Per token count a side's step, or why there is none."""
    kind = SIDES[name]
    if kind.needs_cuda and paged.device.type != "cuda":
        emit(kind="ready", side=name, error="needs CUDA")
        return dict.fromkeys(paged.counts, "needs CUDA")
    found: dict[int, Step | str] = {
        count: skipped[str(count)] for count in paged.counts if str(count) in skipped
    }
    wanted = [count for count in paged.counts if count not in found]
    if not wanted:
        emit(kind="ready", side=name, error=next(iter(skipped.values())))
        return found
    before, began = _Memory(), time.perf_counter()
    row: dict[str, Any] = {"kind": "ready", "side": name}
    try:
        side = kind(paged, options.cache_dir, options.compiler)
        side.first()
        wait()
        row["first_call_s"] = time.perf_counter() - began
        for tokens in wanted:
            found[tokens] = _attempt(side, tokens)
        wait()
        row |= {"ready_s": time.perf_counter() - began, **side.facts()}
    except Exception as error:  # whatever it is, the other sides go on and the row says it
        row["error"] = describe(error)
        found |= {count: row["error"] for count in wanted if count not in found}
    emit(**row, **before.taken())
    return found


def _attempt(side: Eager, tokens: int) -> Step | str:
    try:
        return side.ready(tokens)
    except Exception as error:
        return describe(error)


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


class _Memory:
    """Device memory now, to compare with later."""

    def __init__(self) -> None:
        self._before = self._now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self._allocated = torch.cuda.memory_allocated()

    def taken(self) -> dict[str, int]:
        """Bytes that torch has reserved since and the device has lost since, and the most in use between."""
        if not torch.cuda.is_available():
            return {}
        peak = torch.cuda.max_memory_allocated() - self._allocated
        (reserved, free), (reserved_before, free_before) = self._now(), self._before
        return {
            "held_bytes": reserved - reserved_before,
            "device_bytes": free_before - free,
            "peak_bytes": peak,
        }

    @staticmethod
    def _now() -> tuple[int, int]:
        if not torch.cuda.is_available():
            return 0, 0
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]


def _time_sides(tokens: int, steps: Mapping[str, Step | str], floor: float, rounds: int) -> None:
    works: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    expected = _logits(steps["eager"]) if callable(steps.get("eager")) else None  # type: ignore[arg-type]
    for name, step in steps.items():
        rows[name] = {"kind": "forward", "side": name, "tokens": tokens}
        try:
            if isinstance(step, str):
                raise _Missing(step)
            found = _logits(step)
            rows[name]["difference_to_eager"] = None if expected is None else distance(found, expected)
            works[name] = step
        except _Missing as missing:
            rows[name]["error"] = str(missing)
        except Exception as error:
            rows[name]["error"] = describe(error)
    before = pg.counters.snapshot()["fallbacks"]
    times = alternate(works, rounds=rounds, repeat=5)
    host = alternate_host(works, rounds=rounds)
    fallbacks = pg.counters.snapshot()["fallbacks"] - before
    for name, row in rows.items():
        if name in works:
            timing = times[name]
            row |= {"ms": timing.median * 1e3, "quartiles_ms": [timing.low * 1e3, timing.high * 1e3]}
            row |= {"host_us": host[name].median * 1e6, "over_floor": timing.median / floor}
        if name in OURS and fallbacks:
            row["error"] = f"{fallbacks} forwards of ours were no replays"
        emit(**row)


class _Missing(Exception):
    """A side has no step for this token count."""


def _logits(step: Callable[[], Any]) -> Tensor:
    return step().logits.float()


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a child is told."""
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--cache-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--skip", default="{}", help=argparse.SUPPRESS)


def arguments(options: argparse.Namespace, **own: Any) -> Sequence[str]:
    """A child's command line, with what it shares with its parent's."""
    given = {"tokens": options.tokens, "rounds": options.rounds, "compiler": options.compiler, **own}
    if options.implementation:
        given["implementation"] = options.implementation
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
