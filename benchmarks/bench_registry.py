"""How much of transformers' registry runs in graphs: each model of tests/tiny_models.py, at a dozen sizes.

    python -m benchmarks.bench_registry                      # all of them, in processes of their own
    python -m benchmarks.bench_registry mixtral bert-masked  # some of them
    python -m benchmarks.bench_registry --compiler inductor --jobs 8 --seconds 600
    python -m benchmarks.bench_registry --experts grouped_mm,batched_mm --dtype float32,bfloat16

The last one takes the models that have experts and may run them in several ways, in each way and type.

Each model is compiled with `torch.compile(model, backend="piecewise")` and called three times at each size of
SIZES: one token, every bucket, its neighbours, and sizes above the limit. The first two rounds capture; sizes
that get graphs of their own get them in the second. Each round has another order. A row says of its model:

    wrong      sizes at which the rows are further than the tolerance from those of the model in float32 on
               a CPU, and twice as far as the eager model's, in any round
    compiled   of such sizes, those at which plain torch.compile of the same model gives our rows: the model
               computes something else when it is compiled, or rounds so that other experts are chosen
    error      what a call raised
    unusable   what building or calling the eager model raised; it is left out of the sums
    calls      calls of the last round, of sizes up to the limit
    replayed   of those, forwards that graphs served (of several traces, where the model has graph breaks)
    failures   why captures failed, if any did
    fallbacks  forwards without graphs in the last round, by reason; those above the limit are left out
    unpadded   regions that replays of the last round ran between their graphs

A family is served when graphs answered all of these calls. Those that are not have their reasons in a table
of benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from benchmarks.common import RESULTS, Mark, without_out, write
from benchmarks.registry_sides import BUCKETS, EagerRaisesError, Sides, Verdict

sys.path.append(str(Path(__file__).parents[1] / "tests"))

SIZES = (5, 1, 8, 7, 9, 2, 16, 15, 17, 31, 32, 33, 40)
ROUNDS = SIZES, tuple(sorted(SIZES)), tuple(sorted(SIZES, reverse=True))


# Dynamo unrolls their loops over tokens, anew for each size: they take longest, and so begin first.
_SLOW = frozenset(
    {
        *("mamba", "falcon_mamba", "jamba", "bamba", "mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h"),
        *("zamba", "zamba2", "kimi_linear", "xlstm", "cpmant", "deepseek_v4", "hy_v4", "inkling_text"),
        *("jetmoe", "longcat_flash", "gemma3n_text", "aria_text"),
    }
)


@dataclass(frozen=True)
class Variant:
    """A model, and how its experts run; None: as it chooses."""

    name: str
    dtype: str = "float32"
    experts: str | None = None


def model_row(variant: Variant, compiler: str, device: str, seconds: int) -> dict[str, Any]:
    """The figures of one model; what went wrong, where it could not be compiled or called."""
    began = time.perf_counter()
    row: dict[str, Any] = {"model": variant.name, "dtype": variant.dtype}
    row |= {} if variant.experts is None else {"experts": variant.experts}
    signal.signal(signal.SIGALRM, partial(_too_long, seconds))
    signal.alarm(seconds)
    try:
        row |= _calls(variant, compiler, torch.device(device))
    except EagerRaisesError as problem:
        row["unusable"] = str(problem)
    except Exception as problem:
        row["error"] = f"{type(problem).__name__}: {str(problem)[:300]}"
    finally:
        signal.alarm(0)
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def _built(name: str) -> Any:
    """The tiny model.

    Raises:
        EagerRaisesError: this version of transformers cannot build it so.
    """
    import tiny_models

    try:
        return tiny_models.build(name)
    except Exception as problem:
        raise EagerRaisesError(f"{type(problem).__name__}: {str(problem)[:200]}") from problem


def with_experts(names: Sequence[str]) -> list[str]:
    """Of these models, those that have experts, and those that cannot be built: a row tells why."""

    def may_have_experts(name: str) -> bool:
        try:
            return bool(_built(name)._can_set_experts_implementation())
        except EagerRaisesError:
            return True

    return [name for name in names if may_have_experts(name)]


def _too_long(seconds: int, *_: Any) -> None:
    raise TimeoutError(f"more than {seconds} s")


def _calls(variant: Variant, compiler: str, device: torch.device) -> dict[str, Any]:
    name = variant.name
    built, exact = _built(name), _built(name)
    model = built.to(device, getattr(torch, variant.dtype))
    if variant.experts is not None:
        model.set_experts_implementation(variant.experts)
    options = {"compiler": compiler, "capture_sizes": list(BUCKETS), "max_tokens": max(BUCKETS)}
    fast = torch.compile(model, backend="piecewise", options=options)
    sides, found = Sides(name, exact, model, fast), {}
    for sizes in ROUNDS:
        before = pg.counters.snapshot()
        for size in sizes:
            found[size] = max(found.get(size, Verdict.RIGHT), sides.verdict(size))
    after = pg.counters.snapshot()
    moved = {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
    inside = [size for size in SIZES if size <= max(BUCKETS)]
    reasons = {key.partition(":")[2]: count for key, count in moved.items() if key.startswith("fallbacks:")}
    reasons.pop("above_max_tokens", None)
    return {
        "wrong": [size for size in sorted(found) if found[size] is Verdict.WRONG],
        "compiled": [size for size in sorted(found) if found[size] is Verdict.AS_COMPILED],
        "calls": len(inside),
        "replayed": moved.get("replays", 0),
        "failures": sorted({why[:200] for trace in pg.explain(fast).traces for why in trace.failed.values()}),
        "fallbacks": reasons,
        "traces": after["traces"],
        "graphs": after["captures"],
        "unpadded": moved.get("unpadded_segments", 0),
    }


def is_served(row: Mapping[str, Any]) -> bool:
    """Graphs answered each call of the last round up to the limit."""
    return "calls" in row and row["replayed"] >= row["calls"] and not row["fallbacks"]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The row of all models together, but for those that cannot be called at all."""
    reasons: Counter[str] = Counter()
    rows, unusable = [row for row in rows if "unusable" not in row], sum("unusable" in row for row in rows)
    for row in rows:
        if not is_served(row):
            kind = [row["error"].partition(":")[0]] if "error" in row else list(row["fallbacks"])
            reasons.update(kind or ["no graph"])
    return {
        "model": "all",
        "models": len(rows),
        "served": sum(map(is_served, rows)),
        "wrong": sum(bool(row.get("wrong")) for row in rows),
        "errors": sum("error" in row for row in rows),
        "unusable": unusable,
        "not_served_by_reason": dict(reasons.most_common()),
    }


def _in_process(processes: Any, work: Any, until: float, variant: Variant) -> dict[str, Any]:
    """A model's row from a process of its own: what one model leaves behind, no other one meets."""
    if time.monotonic() > until:
        return {"left out": variant.name}
    with processes.Pool(1) as pool:
        row: dict[str, Any] = pool.apply(work, (variant,))
    print(json.dumps(row), flush=True)
    return row


def _processes() -> Any:
    """Makes processes that begin with everything imported; CUDA starts in each of them."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(
        ["benchmarks.bench_registry", "tiny_models", "torch._dynamo", "torch._inductor"]
    )
    return processes


def _row(compiler: str, device: str, seconds: int, variant: Variant) -> dict[str, Any]:
    torch.set_num_threads(1)  # many processes work side by side, on small models
    return model_row(variant, compiler, device, seconds)


def main(arguments: list[str] | None = None) -> int:
    import tiny_models

    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="model", help="of tests/tiny_models.py; default: all")
    parser.add_argument("--compiler", default="eager", choices=["eager", "inductor"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", help="one or several, by commas")
    parser.add_argument("--experts", help="experts_implementation, one or several: models that have experts")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit-seconds", type=int, default=300, help="of one model")
    parser.add_argument("--seconds", type=int, default=10**6, help="after these no further model is begun")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_registry.json")
    options = parser.parse_args(given)
    work = partial(_row, options.compiler, options.device, options.limit_seconds)
    until, processes = time.monotonic() + options.seconds, _processes()
    names = sorted(options.names or tiny_models.NAMES, key=lambda name: name not in _SLOW)
    ways = options.experts.split(",") if options.experts else [None]
    if options.experts:
        with processes.Pool(1) as pool:
            names = pool.apply(with_experts, (names,))
    variants = [Variant(*each) for each in itertools.product(names, options.dtype.split(","), ways)]
    command = " ".join(["python -m benchmarks.bench_registry", *without_out(given)])
    found: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.jobs) as threads:
        run = partial(_in_process, processes, work, until)
        for done in as_completed([threads.submit(run, variant) for variant in variants]):
            found.append(done.result())
            _write(options.out, command, found, report=False)  # a run that is cut off leaves what it has
    if not summary(_rows(found))["models"]:
        parser.error("none of these models can be called in this way")
    print(_write(options.out, command, found, report=True))
    return 0


def _rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of models that were begun, by name."""
    return sorted((row for row in found if "model" in row), key=lambda row: row["model"])


def _write(path: Path, command: str, found: Sequence[dict[str, Any]], *, report: bool) -> dict[str, Any]:
    """Write the rows and their sum; returns the sum."""
    rows = _rows(found)
    total = summary(rows) | {"left_out": len(found) - len(rows)}
    marks = [
        Mark("wrong models", total["wrong"], 0),
        Mark("models with an error from inside", total["errors"], 0),
        Mark("share of models not served", 1 - total["served"] / max(total["models"], 1), 0.05),
    ]
    write(path, command, [*rows, total], marks, report=report)
    return total


if __name__ == "__main__":
    sys.exit(main())
