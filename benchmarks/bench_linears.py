"""Linear kernels of a decode step: the blocks that are used against others, in the chain that a layer has.

    python -m benchmarks.bench_linears

A layer has four launches: q, k and v, the attention's output, gate and up, down. They run in turn over
several layers in one captured graph, so each kernel starts while the one before it ends, and no weight is
left in the cache. One of the four is given other blocks, or cuBLAS, at a time. cuBLAS has one launch for two
weights of one shape where that is faster; with more than 128 rows a launch for each weight is tried too.
Weights are random, in bf16. Sizes are those of public decoders; "llama-3-8b-half" is what one of two
tensor-parallel ranks has. All layers have a SwiGLU, those of Gemma too, which itself has another activation.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
from benchmarks.llama import SHAPES
from piecewise_graph.kernels.early_reads import unwritten
from piecewise_graph.kernels.launch import multiprocessors
from piecewise_graph.kernels.linear import MAX_TOKENS, linear_launch
from piecewise_graph.kernels.linear.kernel_configs import (
    IN_TILES,
    MANY_TOKENS,
    PLAIN,
    RING_TOKENS,
    SHARED_MEMORY,
    KernelConfig,
    rings_of,
    usual_config,
)
from piecewise_graph.kernels.linear.library_products import by_library, time_pairs

_PARTS = ("q k v", "o", "gate up", "down")
_WEIGHTS = 2**30  # bytes of all layers at least: many times what the cache holds
_FASTER = 1.03  # the usual blocks over the best ones, one launch changed
_LIBRARY, _EACH = "cuBLAS", "cuBLAS, a launch each"
# Rows of a block, columns of a step.
_ONE_ROW = ((2, 1024), (4, 1024), (8, 1024), (2, 2048), (4, 2048), (8, 2048))


def _decoder(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int = 0) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim or hidden // heads,
    }  # fmt: skip


_SIZES = {
    "1b": SHAPES["1b"].config,
    "8b": SHAPES["8b"].config,
    "smollm2-360m": _decoder(960, 2560, 15, 5),
    "gemma-3-1b": _decoder(1152, 6912, 4, 1, 256),
    "qwen2.5-0.5b": _decoder(896, 4864, 14, 2),
    "qwen2.5-1.5b": _decoder(1536, 8960, 12, 2),
    "qwen2.5-3b": _decoder(2048, 11008, 16, 2),
    "qwen2.5-7b": _decoder(3584, 18944, 28, 4),
    "qwen3-4b": _decoder(2560, 9728, 32, 8, 128),
    "gemma-2-2b": _decoder(2304, 9216, 8, 4, 256),
    "phi-3-mini": _decoder(3072, 8192, 32, 32),
    "llama-2-7b": _decoder(4096, 11008, 32, 32),
    "qwen2.5-14b": _decoder(5120, 13824, 40, 8),
    "llama-3-8b-half": _decoder(4096, 7168, 16, 4, 128),
}

Layer = Mapping[str, list[Tensor]]
Blocks = KernelConfig | str  # of a kernel of ours, or how cuBLAS is called
Configs = Mapping[str, Blocks]


def layers(config: Mapping[str, Any]) -> list[Layer]:
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


def usual(layer: Layer, tokens: int, processors: int, rings: bool) -> dict[str, Blocks]:
    found: dict[str, Blocks] = {}
    for part in _PARTS:
        rows, columns = [len(weight) for weight in layer[part]], layer[part][0].shape[1]
        config = usual_config(
            tokens, rows, columns, gated=part == "gate up", processors=processors, rings=rings
        )
        found[part] = config or _LIBRARY
    return found


def others(tokens: int, rings: bool) -> Iterator[Blocks]:
    """What is tried in the place of the usual ones."""
    yield _LIBRARY
    if tokens == 1:
        yield from (KernelConfig(*block, 1, 4, 1) for block in _ONE_ROW)
        return
    if rings and tokens <= RING_TOKENS:
        yield from rings_of(tokens)
        yield PLAIN
        return
    if tokens > MANY_TOKENS:
        yield _EACH
        yield from (IN_TILES, IN_TILES._replace(warps=8, tile=128), IN_TILES._replace(stages=4, tile=128))
        return
    forms = [KernelConfig(64, 128, 1, 4, 0), KernelConfig(128, 64, 1, 4, 0)]
    if tokens > MAX_TOKENS:
        forms += [KernelConfig(64, 64, 1, 4, 0)]
    else:
        forms += [KernelConfig(32, 128, 1, 4, 0, parts=2, ahead=16)]
        forms += [KernelConfig(16, 128, 1, 4, 0, parts=4, ahead=16)]
    for stages in (3, 4, 5, 6) if tokens > MAX_TOKENS else (4, 5, 7):
        made = [form._replace(stages=stages) for form in forms]
        yield from (config for config in made if shared_memory(config, tokens) <= SHARED_MEMORY)


def shared_memory(config: KernelConfig, tokens: int) -> int:
    """Bytes of the tiles that are in flight, of weight and input; of products in parts it is one less."""
    padded = max(16, 1 << (tokens - 1).bit_length())
    tile = config.parts * config.block_k * (config.block_n + padded) * 2
    return tile * (config.stages - (config.parts > 1))


def step(x: Tensor, weights: list[Layer], configs: Configs) -> Tensor:
    for layer in weights:
        q = linears(x, layer["q k v"], configs["q k v"])[0]
        hidden = linears(q, layer["o"], configs["o"])[0]
        blocks, pair = configs["gate up"], layer["gate up"]
        if isinstance(blocks, KernelConfig):
            wide = linear_launch.swiglu_few(hidden, pair, [None] * 2, blocks)
        else:
            wide = linear_launch.silu_times(*linears(hidden, pair, blocks))
        x = linears(wide, layer["down"], configs["down"])[0]
    return x


def linears(x: Tensor, weights: list[Tensor], blocks: Blocks) -> list[Tensor]:
    if isinstance(blocks, KernelConfig):
        return linear_launch.linears_few(x, weights, [None] * len(weights), blocks)
    if blocks == _EACH:
        return [functional.linear(x, weight) for weight in weights]
    return by_library(x, weights, [None] * len(weights))


def named(blocks: Blocks) -> str:
    return blocks.name if isinstance(blocks, KernelConfig) else blocks


def captured(x: Tensor, weights: list[Layer], configs: Configs) -> Callable[[], None]:
    step(x, weights, configs)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    read = [weight for layer in weights for part in layer.values() for weight in part]
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()), unwritten(read):
        step(x, weights, configs)
    return graph.replay


def compile_ahead(weights: Layer, tokens: int, given: list[Blocks]) -> None:
    for part in _PARTS:
        like, form = weights[part][0], (False, part == "gate up")
        time_pairs(like, tokens, [len(weight) for weight in weights[part]], like.shape[1])
        for config in [blocks for blocks in given if isinstance(blocks, KernelConfig)]:
            linear_launch.compile_ahead(config, like, tokens, like.shape[1], *form)


def bench(name: str, tokens: int, weights: list[Layer], rounds: int) -> list[dict[str, Any]]:
    """One row per launch and its blocks; the first one has the usual blocks everywhere."""
    device = weights[0]["o"][0].device
    rings = linear_launch.has_rings(device)
    known = usual(weights[0], tokens, multiprocessors(device), rings)
    tried = list(others(tokens, rings))
    compile_ahead(weights[0], tokens, [*known.values(), *tried])
    x = torch.randn(tokens, weights[0]["down"][0].shape[0], device="cuda", dtype=torch.bfloat16)
    choices = {("all", "usual"): known}
    for part, blocks in itertools.product(_PARTS, tried):
        if blocks != known[part] and (blocks != _EACH or len(weights[0][part]) > 1):
            choices[part, named(blocks)] = {**known, part: blocks}
    sides = {" | ".join(key): captured(x, weights, configs) for key, configs in choices.items()}
    times = alternate(sides, rounds=rounds, repeat=4)
    per_layer = 1e6 / len(weights)
    return [
        {
            "shape": name, "tokens": tokens, "launch": part, "blocks": blocks,
            "us": timing.median * per_layer, "low_us": timing.low * per_layer,
            "high_us": timing.high * per_layer,
            "usual": {each: named(config) for each, config in known.items()} if part == "all" else None,
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
    parser.add_argument("--shapes", default=",".join(_SIZES), help="of " + ", ".join(_SIZES))
    parser.add_argument("--tokens", default="1,4,32,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_linears.json")
    options = parser.parse_args(given)
    if not torch.cuda.is_available():
        raise SystemExit("bench_linears times kernels for Hopper GPUs; here is no GPU.")
    rows: list[dict[str, Any]] = []
    marks: list[Mark] = []
    bandwidth = read_bandwidth(torch.device("cuda"))
    for name in options.shapes.split(","):
        with on_own_stream():
            weights = layers(_SIZES[name])
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
