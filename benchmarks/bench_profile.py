"""One decode step of a Llama on paged KV, kernel by kernel: launches, microseconds, bytes of weights and KV.

    python -m benchmarks.bench_profile

A full graph of `pg.compile(model)` without options, attention at a context of 128 tokens per request and
logits included. The kernels of a replay come in the order of the model's calls, so the n-th matrix product
reads the n-th weight. A part's share is its bytes over its time, over the read bandwidth (common.py).
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_decode import Decode
from benchmarks.common import RESULTS, alternate, read_bandwidth, table, without_out, write
from benchmarks.idle_time import Event, span, traced, work_of
from benchmarks.llama import SHAPES
from benchmarks.paged import CONTEXT, head_dim

Row = dict[str, Any]
Part = tuple[str, float]  # a name, and bytes that it reads

_PRODUCT = re.compile(r"nvjet|gemm|gemv|few_rows", re.IGNORECASE)
_BESIDE = re.compile(r"reduce|flash|attention|sgemm", re.IGNORECASE)  # of those, no product with a weight
_ATTENTION = re.compile(r"attend|attention|combine", re.IGNORECASE)
_LAYER = ("q", "k", "v", "o", "gate", "up", "down")
_TOGETHER = ("q k v", "o", "gate up", "down")  # linears of one input in one launch
_STEPS = 10
_COLUMNS = ("shape", "batch", "part", "kernel", "launches", "us", "MB", "share")


def products(config: Any, together: bool) -> list[Part]:
    """The weights in the order of a step's matrix products."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, head_dim(config)
    wide, narrow = config.num_attention_heads * dim, config.num_key_value_heads * dim
    outputs = dict(zip(_LAYER, (wide, narrow, narrow, wide, inner, inner, inner), strict=True))
    names = _TOGETHER if together else _LAYER
    layer = [(name, 2.0 * hidden * sum(outputs[part] for part in name.split())) for name in names]
    return layer * config.num_hidden_layers + [("head", 2.0 * hidden * config.vocab_size)]


def kernels_of(step: Callable[[], Any]) -> list[list[Event]]:
    """What the device does in each of some replays, in order."""
    step()
    torch.cuda.synchronize()

    def steps() -> None:
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()

    work = sorted(work_of(traced(steps)), key=span)
    each, rest = divmod(len(work), _STEPS)
    if rest:
        raise RuntimeError(f"{len(work)} kernels in {_STEPS} replays: not the same in each")
    return [work[at : at + each] for at in range(0, len(work), each)]


def parts_of(steps: Sequence[Sequence[Event]], config: Any, batch: int) -> list[Row]:
    """A row per part and kernel: launches per step, median microseconds of all of them, megabytes."""
    found: dict[tuple[str, str], Row] = {}
    is_product = [bool(_PRODUCT.search(e["name"]) and not _BESIDE.search(e["name"])) for e in steps[0]]
    known = {len(weights): weights for weights in (products(config, True), products(config, False))}
    weights = known.get(sum(is_product))
    if weights is None:
        names = sorted({event["name"] for event in steps[0]})
        raise RuntimeError(f"{sum(is_product)} matrix products, {list(known)} weights; kernels: {names}")
    order = iter(weights)
    for at, event in enumerate(steps[0]):
        part, size = next(order) if is_product[at] else _beside(event["name"], config, batch)
        row = found.setdefault((part, event["name"]), {"part": part, "launches": 0, "us": 0.0, "MB": 0.0})
        row["launches"] += 1
        row["us"] += statistics.median(step[at].get("dur", 0.0) for step in steps)
        row["MB"] += size / 1e6
    return [{"kernel": name[:80], **row} for (_, name), row in found.items()]


def _beside(kernel: str, config: Any, batch: int) -> Part:
    if "sgemm" in kernel:
        return "rotary angles", 0.0
    if not _ATTENTION.search(kernel):
        return "other", 0.0
    if "combine" in kernel:  # of parts of a context, whose keys and values another kernel has read
        return "attention", 0.0
    return "attention", 4.0 * batch * CONTEXT * config.num_key_value_heads * head_dim(config)


@torch.inference_mode()
def bench_shape(shape: str, options: argparse.Namespace) -> list[Row]:
    batches = [int(size) for size in options.batches.split(",")]
    decode = Decode(shape, batches, options)
    bandwidth = read_bandwidth(decode.device)
    rows: list[Row] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in batches:
            step = decode.side(batch, True)
            taken = alternate({"full": step}, rounds=options.rounds, repeat=20)["full"].median * 1e6
            parts = parts_of(kernels_of(step), decode.model.config, batch)
            common = {"shape": shape, "batch": batch}
            for row in parts:
                row["share"] = row["MB"] * 1e6 / (row["us"] / 1e6) / bandwidth if row["MB"] else None
            busy = sum(row["us"] for row in parts)
            floor = decode.weight_bytes / bandwidth * 1e6
            total = {"step_us": taken, "busy_us": busy, "floor_us": floor, "bandwidth_TBps": bandwidth / 1e12}
            rows.append(common | total | {"launches": sum(row["launches"] for row in parts)})
            rows += [common | row for row in sorted(parts, key=lambda row: -row["us"])]
            print(table([common | total], tuple(common | total)), flush=True)
            print(table(rows[-len(parts) :], _COLUMNS), flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default="8b,1b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--batches", default="1,4,32")
    parser.add_argument("--implementation", help="of attention; None = triton")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_profile.json")
    options = parser.parse_args(given)
    options.extra = {}
    rows: list[Row] = []
    command = " ".join(["python -m benchmarks.bench_profile", *without_out(given)])
    for shape in options.shapes.split(","):
        rows += bench_shape(shape, options)
        gc.collect()
        torch.cuda.empty_cache()
        write(options.out, command, rows, [], report=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
