"""What bench_tensor_parallel runs on each of several ranks; rank 0 writes the rows."""

from __future__ import annotations

import argparse
import faulthandler
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

import piecewise_graph as pg
from benchmarks.bench_decode import Decode
from benchmarks.bench_tensor_parallel import REQUESTS_PER_USER, USERS
from benchmarks.bench_vllm import NEW_TOKENS, PROMPT
from benchmarks.common import alternate, read_bandwidth, wait
from benchmarks.llama import SHAPES, model_of_rank, random_draft
from benchmarks.own_engine import plain_speculator, served
from piecewise_graph.bench.load import Load, arrivals
from piecewise_graph.bench.metrics import Metrics
from piecewise_graph.bench.setting import Setting
from piecewise_graph.eagle import Speculator, load_draft
from piecewise_graph.ranks.collectives import all_reduce
from piecewise_graph.ranks.exchange import ranks_of_groups
from piecewise_graph.ranks.peer_memory import prepare

Row = dict[str, Any]
MODELS = Path(__file__).parent / "models"
CALLS = 64  # sums in one graph, as in a decode step of the 8B shape
STEPS = 3
HANGS = 25  # seconds after which the end of a process group counts as hung


def collectives(options: argparse.Namespace) -> list[Row]:
    """Microseconds of a sum over ranks in a graph, by what sums: our op, NCCL, torch's one-shot kernel."""
    from torch.distributed import _symmetric_memory as symmetric

    world: Any = distributed.group.WORLD
    group, device = world.group_name, torch.device("cuda", torch.cuda.current_device())
    prepare(ranks_of_groups([group], 60.0), world, torch.empty(0, device=device, dtype=torch.bfloat16), 60.0)
    rows = []
    for size in [2**power for power in range(13, 25)]:
        x = torch.randn(size // 2, device=device, dtype=torch.bfloat16)
        memory = symmetric.empty(size // 2, device=device, dtype=x.dtype)
        symmetric.rendezvous(memory, group)
        one_shot = partial(torch.ops.symm_mem.one_shot_all_reduce_copy, memory, x, "sum", group)
        calls = {"own": partial(all_reduce, x, group), "nccl": partial(_by_nccl, x), "one_shot": one_shot}
        sides = {name: _graph_of(call) for name, call in calls.items()}
        row: Row = {"part": "all_reduce", "bytes": size}
        for name, timing in alternate(sides, rounds=options.rounds, repeat=5).items():
            row[f"{name}_us"] = timing.median / CALLS * 1e6
        rows.append(row | {"same_on_all": _same(all_reduce(x, group))})
    peers = [torch.cuda.can_device_access_peer(0, other) for other in range(1, options.ranks)]
    return [{"part": "peer_access", "all": all(peers)}, *rows]


def _by_nccl(x: Tensor) -> None:
    distributed.all_reduce(x.clone())


def _graph_of(call: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(CALLS):
            call()
        graph.capture_end()
    return graph.replay


def _same(x: Tensor) -> bool:
    """Bit by bit on all ranks."""
    first = x.clone()
    distributed.broadcast(first, 0)
    equal = torch.tensor([torch.equal(first, x)], device=x.device, dtype=torch.int32)
    distributed.all_reduce(equal, distributed.ReduceOp.MIN)
    return bool(equal)


@torch.inference_mode()
def decode(options: argparse.Namespace) -> list[Row]:
    """A decode step as bench_decode times it, of this rank's part of the weights."""
    batches, extra = list(map(int, options.batches.split(","))), {"compiler": options.compiler}
    torch.manual_seed(0)
    made = Decode(options.shape, batches, argparse.Namespace(implementation=None, extra=extra))
    bandwidth, rows = read_bandwidth(made.device), []
    with torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None):
        for batch in batches:
            sides = {"full": made.side(batch, True), "piecewise": made.side(batch, False)}
            times = alternate(sides, rounds=options.rounds, repeat=20)
            full, cut = times["full"].median, times["piecewise"].median
            rows.append({
                "part": "decode", "batch": batch, "floor_ms": made.weight_bytes / bandwidth * 1e3,
                "full_ms": full * 1e3, "piecewise_ms": cut * 1e3,
                "cut_us": (cut - full) * 1e6 / made.model.config.num_hidden_layers,
            })  # fmt: skip
    start = {"part": "start", "start_s": made.start_seconds, "explain": str(pg.explain(made.compiled))}
    return [start | {"bandwidth_TBps": bandwidth / 1e12}, *rows]


def _model(options: argparse.Namespace) -> Any:
    pg.register_attention()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model_of_rank(SHAPES[options.shape], device)


def engine(options: argparse.Namespace) -> list[Row]:
    """Plain decoding under a closed load, no option set."""
    speculator = plain_speculator(_model(options), options.users, 256)
    load = Load(PROMPT, NEW_TOKENS, vocab_size=500)
    setting, found = Setting.of(steps=0), []
    made, requests = setting.engine(speculator), arrivals(load, options.users * REQUESTS_PER_USER)
    for _ in range(options.turns + 1):
        found.append(served(made, setting, requests, options.users))
    seen = Metrics.median_of(found[1:])
    times = {"tpot_ms": seen.median_tpot_ms, "ttft_ms": seen.median_ttft_ms}
    return [{"part": "engine", "users": options.users, "tok_s": seen.output_throughput, **times}]


def eagle(options: argparse.Namespace) -> list[Row]:
    """Rounds of an EAGLE-1 head, held whole by each rank and cut over the ranks."""
    target, cuts = _model(options), (False, True) if options.ranks > 1 else (False,)
    return [_eagle(target, shard, options) for shard in cuts]


def _eagle(target: Any, shard: bool, options: argparse.Namespace) -> Row:
    """A round of the head over a plain one, and how long each takes."""
    torch.manual_seed(1)
    draft = random_draft(target, "eagle1", shard)
    speculator = Speculator(target, draft, shapes=[STEPS, 0], max_requests=1, max_seq_len=768, page_size=16)
    times: dict[str, list[float]] = {"round": [], "plain": []}
    for _ in range(options.turns + 1):
        for name, shape in (("round", STEPS), ("plain", 0)):
            session, _ = speculator.session([list(range(128))], max_new_tokens=512, shape=shape, overlap=None)
            for _ in range(8):
                session.step()
            wait()
            began = time.perf_counter()
            for _ in range(50):
                session.step()
            wait()
            times[name].append((time.perf_counter() - began) / 50)
            session.close()
    times = {name: taken[1:] for name, taken in times.items()}
    ms = {f"{name}_ms": statistics.median(taken) * 1e3 for name, taken in times.items()}
    return {
        "part": "eagle",
        "head": "cut" if shard else "whole",
        **ms,
        "ratio": ms["round_ms"] / ms["plain_ms"],
    }


def tokens(options: argparse.Namespace) -> list[Row]:
    """Greedy tokens of the repository's model in float32: by generate, by the engine, with a draft."""
    from transformers import AutoModelForCausalLM

    pg.register_attention()
    kind: Row = {"tp_plan": "auto"} if distributed.is_initialized() else {"device_map": "cuda"}
    prompt, path = [byte + 3 for byte in b"import os\nimport sys\n"], str(MODELS / "byte-llama")
    found: Row = {"part": "tokens"}
    for attention in ("sdpa", "piecewise"):
        model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation=attention, dtype=torch.float32, **kind
        ).eval()
        if attention == "sdpa":
            compiled, ids = pg.compile(model, max_tokens=32), torch.tensor([prompt], device=model.device)
            with torch.no_grad():
                made = compiled.generate(ids, max_new_tokens=32, do_sample=False)
            found["generate"] = made[0, len(prompt) :].tolist()
            continue
        for head in (None, "eagle1", "eagle3"):
            draft = None if head is None else load_draft(str(MODELS / f"byte-llama-{head}"), model)
            speculator = Speculator(model, draft, shapes=[0 if head is None else 3])
            found[head or "engine"] = speculator.generate([prompt], max_new_tokens=32)[0]
    return [found | {"counters": {k: v for k, v in pg.counters.snapshot().items() if v}}]


PARTS = {"collectives": collectives, "decode": decode, "engine": engine, "eagle": eagle, "tokens": tokens}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--compiler", default="inductor")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.ranks > 1:
        from transformers.distributed.utils import _ensure_torch_distributed

        _ensure_torch_distributed()
    rows = []
    for part in options.parts.split(","):
        if part != "collectives" or options.ranks > 1:
            began = time.perf_counter()
            rows += [{"ranks": options.ranks, **row} for row in PARTS[part](options)]
            print(part, f"{time.perf_counter() - began:.1f} s", flush=True)
            if options.ranks == 1 or distributed.get_rank() == 0:
                options.out.write_text(json.dumps(rows, indent=1))
            torch._dynamo.reset()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if options.ranks > 1:
        rank = distributed.get_rank()
        faulthandler.dump_traceback_later(HANGS, exit=True)
        began = time.perf_counter()
        pg.reset()
        distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            rows.append({"ranks": options.ranks, "part": "teardown", "seconds": time.perf_counter() - began})
            options.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
