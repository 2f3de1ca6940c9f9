"""What pg.capture takes for all sizes of one model: seconds, and memory beside the graphs.

    python -m benchmarks.bench_capture                       # this checkout
    python -m benchmarks.bench_capture --old OLD --turns 3   # an earlier commit's installed copy takes turns

OLD is a folder that holds `benchmarks/` and an installed copy of the project (`pip install --target OLD .`).
Each turn is a process of its own with the same model; what Inductor compiled, the next process finds. Figures
are written after every turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_child import emit, parse  # a child imports its own commit's

LIMIT_S, LIMIT_GIB = 0.5, 0.3
_ROOT = Path(__file__).resolve().parents[1]


def measured(shape: str, compiler: str, max_tokens: int) -> dict[str, Any]:
    """One capture of all sizes, in this process, by whichever copy of the project it imports."""
    import piecewise_graph as pg
    from benchmarks.llama import SHAPES, random_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new token count
    with torch.inference_mode():
        model = random_model(SHAPES[shape], device, "sdpa")
        make = partial(_inputs, model.config.vocab_size, device)
        compiled = pg.compile(model, max_tokens=max_tokens, capture="explicit", compiler=compiler)
        compiled(**make(max_tokens))
        before = _reserved()
        report = pg.capture(compiled, make, progress=False)
    taken = _peak() - before
    return {
        "shape": shape,
        "captured_sizes": len(report.captured),
        "captured_graphs": sum(bucket.graphs for bucket in report.captured),
        "capture_s": report.seconds,
        "buckets_s": sum(bucket.seconds for bucket in report.captured),
        "pool_bytes": report.pool_bytes,
        "buffer_bytes": report.buffer_bytes,
        "peak_bytes": taken,
        "beside_graphs_bytes": max(taken - report.pool_bytes - report.buffer_bytes, 0),
    }


def _inputs(vocab: int, device: str, tokens: int) -> dict[str, Any]:
    return {"input_ids": torch.arange(tokens, device=device)[None] % vocab, "use_cache": False}


def _reserved() -> int:
    """Bytes that the device holds for this process, caches dropped; the peak starts anew."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def _peak() -> int:
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def in_process(folder: Path, cache: str, options: Sequence[str]) -> dict[str, Any]:
    """`measured` with the project that lies in `folder`."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), str(_ROOT), os.environ.get("PYTHONPATH")])),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": f"{cache}/triton",
    }
    command = [sys.executable, __file__, "--child", *options]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (row,) = parse(done.stdout)
    return row


def medians(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row for all turns of a side: medians of what varies, and every turn's seconds."""
    first = dict(turns[0])
    for name, value in first.items():
        if isinstance(value, (int, float)):
            first[name] = statistics.median(turn[name] for turn in turns)
    return first | {"turns_s": [turn["capture_s"] for turn in turns]}


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--old", type=Path)
    parser.add_argument("--names", default="old,new", help="commits, for the results file")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "bench_capture.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.child:
        emit(**measured(options.shape, options.compiler, options.max_tokens))
        return 0
    from benchmarks.common import without_out

    told = ["python -m benchmarks.bench_capture", *without_out(given, "--old", "--names")]
    compare(options, " ".join([*told, "--old OLD"] if options.old else told))
    return 0


def compare(options: argparse.Namespace, command: str) -> None:
    """Processes in turns."""
    from benchmarks.common import table

    child = [
        "--shape",
        options.shape,
        "--compiler",
        options.compiler,
        "--max-tokens",
        str(options.max_tokens),
    ]
    sides = {"old": options.old, "new": _ROOT} if options.old else {"new": _ROOT}
    turns: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(options.turns):
            for side, folder in sides.items():
                turns[side].append(in_process(folder.resolve(), f"{cache}/{side}", child))
            rows = _report(turns, options, command)
    print(table(rows, ("side", "capture_s", "pool_bytes", "buffer_bytes", "beside_graphs_bytes")))


def _report(
    turns: Mapping[str, Sequence[Mapping[str, Any]]], options: argparse.Namespace, command: str
) -> list[dict[str, Any]]:
    """Write the rows and marks of the turns so far."""
    from benchmarks.common import Mark, write

    names = dict(zip(("old", "new"), options.names.split(","), strict=True))
    rows = [{"side": side, "commit": names[side], **medians(found)} for side, found in turns.items()]
    new = rows[-1]
    name = f"{options.shape}: {new['captured_sizes']} sizes"
    marks = [
        Mark(f"{name}, seconds of pg.capture", new["capture_s"], LIMIT_S),
        Mark(f"{name}, GiB beside the graphs", new["beside_graphs_bytes"] / 2**30, LIMIT_GIB),
    ]
    write(options.out, command, rows, marks, report=False)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
