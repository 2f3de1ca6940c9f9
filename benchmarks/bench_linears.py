"""Linear kernels of a decode step: the blocks that are used against others, in the chain that a layer has.

    python -m benchmarks.bench_linears

A layer has four launches: q, k and v, the attention's output, gate and up, down. They run in turn over
several layers in one captured graph, so each kernel starts while the one before it ends, and no weight is
left in the cache. One of the four is given other blocks at a time. Weights are random, in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import (
    RESULTS,
    Mark,
    alternate,
    on_own_stream,
    read_bandwidth,
    table,
    without_out,
    write,
)
from benchmarks.llama import SHAPES, Shape
from piecewise_graph.kernels.launch import multiprocessors
from piecewise_graph.kernels.linear import linear_launch
from piecewise_graph.kernels.linear.kernel_configs import SHARED_MEMORY, KernelConfig, usual_config

_PARTS = ("q k v", "o", "gate up", "down")
_WEIGHTS = 2**30  # bytes of all layers at least: many times what the cache holds
_FASTER = 1.03  # the usual blocks over the best ones, one launch changed

Layer = Mapping[str, list[Tensor]]
Configs = Mapping[str, KernelConfig]


def layers(shape: Shape) -> list[Layer]:
    config = shape.config
    hidden, wide, heads = (config[n] for n in ("hidden_size", "intermediate_size", "num_attention_heads"))
    each = config.get("head_dim", hidden // heads)
    rows, kv = heads * each, config.get("num_key_value_heads", 8) * each
    sizes = {
        "q k v": [(rows, hidden), (kv, hidden), (kv, hidden)],
        "o": [(hidden, rows)],
        "gate up": [(wide, hidden)] * 2,
        "down": [(hidden, wide)],
    }
    bytes_each = 2 * sum(n * k for part in sizes.values() for n, k in part)
    return [
        {
            part: [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for n, k in known]
            for part, known in sizes.items()
        }
        for _ in range(max(_WEIGHTS // bytes_each, 8))
    ]


def usual(layer: Layer, tokens: int, processors: int) -> dict[str, KernelConfig]:
    found = {}
    for part in _PARTS:
        rows, columns = [len(weight) for weight in layer[part]], layer[part][0].shape[1]
        config = usual_config(tokens, rows, columns, gated=part == "gate up", processors=processors)
        if config is None:
            raise SystemExit(f"{part}: {rows} rows of {columns} columns are left to cuBLAS.")
        found[part] = config
    return found


def others(tokens: int) -> Iterator[KernelConfig]:
    if tokens == 1:
        for rows, columns, warps in ((2, 512, 4), (2, 1024, 4), (2, 2048, 8), (4, 2048, 4), (8, 512, 4)):
            yield KernelConfig(rows, columns, 1, warps, 1, ahead=16 if rows == 4 else 4)
        return
    for stages in (4, 5, 7):
        forms = (
            KernelConfig(64, 128, 1, 4, stages),
            KernelConfig(128, 64, 1, 4, stages),
            KernelConfig(32, 128, 1, 4, stages, parts=2, ahead=16),
            KernelConfig(16, 128, 1, 4, stages, parts=4, ahead=16),
        )
        yield from (config for config in forms if shared_memory(config, tokens) <= SHARED_MEMORY)


def shared_memory(config: KernelConfig, tokens: int) -> int:
    """Bytes of the tiles that are in flight, of weight and input; of products in parts it is one less."""
    padded = max(16, 1 << (tokens - 1).bit_length())
    tile = config.parts * config.block_k * (config.block_n + padded) * 2
    return tile * (config.stages - (config.parts > 1))


def step(x: Tensor, weights: list[Layer], configs: Configs) -> Tensor:
    for layer in weights:
        q = linear_launch.linears_few(x, layer["q k v"], [None] * 3, configs["q k v"])[0]
        hidden = linear_launch.linears_few(q, layer["o"], [None], configs["o"])[0]
        wide = linear_launch.swiglu_few(hidden, layer["gate up"], [None] * 2, configs["gate up"])
        x = linear_launch.linears_few(wide, layer["down"], [None], configs["down"])[0]
    return x


def captured(x: Tensor, weights: list[Layer], configs: Configs) -> Callable[[], None]:
    step(x, weights, configs)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step(x, weights, configs)
    return graph.replay


def compile_ahead(weights: Layer, tokens: int, given: list[KernelConfig]) -> None:
    for part in _PARTS:
        like, form = weights[part][0], (False, part == "gate up")
        for config in given:
            linear_launch.compile_ahead(config, like, tokens, like.shape[1], *form)


def bench(name: str, tokens: int, weights: list[Layer], rounds: int) -> list[dict[str, Any]]:
    """One row per launch and its blocks; the first one has the usual blocks everywhere."""
    known = usual(weights[0], tokens, multiprocessors(torch.device("cuda")))
    tried = list(others(tokens))
    compile_ahead(weights[0], tokens, [*known.values(), *tried])
    x = torch.randn(tokens, weights[0]["down"][0].shape[0], device="cuda", dtype=torch.bfloat16)
    choices = {("all", "usual"): known}
    choices |= {(part, c.name): {**known, part: c} for part in _PARTS for c in tried if c != known[part]}
    sides = {" | ".join(key): captured(x, weights, configs) for key, configs in choices.items()}
    times = alternate(sides, rounds=rounds, repeat=4)
    per_layer = 1e6 / len(weights)
    return [
        {
            "shape": name, "tokens": tokens, "launch": part, "blocks": blocks,
            "us": timing.median * per_layer, "low_us": timing.low * per_layer,
            "high_us": timing.high * per_layer,
            "usual": {each: config.name for each, config in known.items()} if part == "all" else None,
        }
        for (part, blocks), timing in zip(choices, times.values(), strict=True)
    ]  # fmt: skip


def summary(found: list[dict[str, Any]], floor_us: float) -> tuple[dict[str, Any], Mark]:
    usual_row, best = found[0], min(found, key=lambda row: row["us"])
    name = f"{usual_row['shape']}, {usual_row['tokens']} rows: usual blocks over the best, one launch changed"
    row = {
        "shape": usual_row["shape"], "tokens": usual_row["tokens"], "floor_us": floor_us,
        "usual_us": usual_row["us"], "best_us": best["us"], "changed": best["launch"], "to": best["blocks"],
    }  # fmt: skip
    return row, Mark(name, usual_row["us"] / best["us"], _FASTER)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1b,8b", help="of " + ", ".join(SHAPES))
    parser.add_argument("--tokens", default="1,4,16,32,64")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_linears.json")
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise SystemExit("bench_linears times kernels for Hopper GPUs; here is no GPU.")
    rows: list[dict[str, Any]] = []
    marks: list[Mark] = []
    bandwidth = read_bandwidth(torch.device("cuda"))
    for name in options.shapes.split(","):
        with on_own_stream():
            weights = layers(SHAPES[name])
            read = sum(weight.nbytes for part in weights[0].values() for weight in part)
            for tokens in map(int, options.tokens.split(",")):
                found = bench(name, tokens, weights, options.rounds)
                row, mark = summary(found, read / bandwidth * 1e6)
                rows, marks = [*rows, row, *found], [*marks, mark]
        del weights
        torch.cuda.empty_cache()
        command = " ".join(["python -m benchmarks.bench_linears", *without_out(given)])
        write(options.out, command, rows, marks)
    columns = ("shape", "tokens", "floor_us", "usual_us", "best_us", "changed", "to")
    print(table([row for row in rows if "floor_us" in row], columns))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
