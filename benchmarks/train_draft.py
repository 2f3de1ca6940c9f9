"""Train EAGLE heads for the repository's byte-level Llama, on the text that it was trained on.

An EAGLE-1 head learns the target's next feature and distribution (arXiv 2401.15077), an EAGLE-3 head the
distribution alone, over several steps of its own (2503.01840).  What is measured is the accept length of
greedy chains on held-out text.  A run takes as many steps as fit into `--minutes`, and records them; the
same number (`--methods eagle1 --steps N --minutes 60`) is meant to give the same weights, bit by bit, on the
same software and GPU.

    python -m benchmarks.train_draft                                       # one GPU, two minutes
    python -m benchmarks.train_draft --verify                              # measure the heads again
    python -m benchmarks.train_draft --smoke --out OUT --results OUT.json  # CPU, seconds
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks import train_model
from benchmarks.draft_windows import Draft, Target, accept_lengths, draft_loss, heldout_survival
from piecewise_graph.eagle.head.checkpoints import load_draft, save_draft
from piecewise_graph.eagle.head.draft import DraftModel
from piecewise_graph.eagle.head.draft_config import DraftConfig

BENCHMARKS = Path(__file__).resolve().parent
TARGET = BENCHMARKS / "models" / "byte-llama"
CHAIN = 5  # the longest chain that is measured
MARK_CHAIN = 3
SIZE_LIMIT_BYTES, FORWARDS_PER_TOKEN_LIMIT = 1_300_000, 0.4  # accept length 2.5 at MARK_CHAIN
VERIFY_TOLERANCE = 0.02  # of the accept length at MARK_CHAIN: devices round differently
SHAPES: dict[str, dict[str, Any]] = {  # each about as large as the limit allows
    "eagle1": {"intermediate_size": 384},
    # the bytes that stand in source code; by default, a target of four layers would give the inputs of two
    "eagle3": {"intermediate_size": 96, "draft_vocab_size": 128, "feature_layers": (1, 2, 3)},
}

CARD = """---
library_name: piecewise-graph
license: other
license_name: psf-2.0
---
# byte-llama-{kind}

An {title} head ({parameters:,} parameters, bf16) for `byte-llama`, next to this folder: a draft
for tests and benchmarks of speculative decoding, in EAGLE's own layout.  To load it:
`piecewise_graph.eagle.load_draft`.

Greedy chains on held-out text, target and head in fp32, {chains:,} chains:

| chain of | survives to its end | accept length (bonus included) |
|---|---|---|
{table}

- Data: as byte-llama's (Python {python}'s standard library without its tests, sha256
  `{corpus_sha256}`), under the PSF licence.
- Made by `{command}`: {steps} steps of {batch} x {window} tokens on {device},
  torch {torch}, transformers {transformers}.
"""


@dataclasses.dataclass
class Settings:
    """What decides the result; the defaults and METHODS are the published heads'."""

    steps: int = 100_000  # at most; fewer if they do not fit into `minutes`
    minutes: float = 0.75  # of training one head
    seed: int = 0
    device: str = "cuda"
    batch: int = 8
    window: int = 2048  # all of max_position_embeddings: no distance stays untrained
    heldout_window: int = 2040  # the longest chains end within max_position_embeddings
    heldout_windows: int | None = None  # None: all
    starts: int = 32  # chains per held-out window
    warmup: int = 100
    report_every: int = 500
    peak_rate: float = 2e-3
    unroll: int = 1  # steps of training-time test
    decay: float = 0.8  # of the loss from one unrolled step to the next
    noise: float = 0.0  # uniform, on the target's features
    token_weight: float = 1.0  # of the cross-entropy
    feature_weight: float = 0.0  # of the smooth L1 between features


METHODS: dict[str, dict[str, Any]] = {
    "eagle1": {"noise": 0.1, "token_weight": 0.1, "feature_weight": 1.0},
    "eagle3": {"unroll": 4, "report_every": 200},
}
SMOKE: dict[str, Any] = {"steps": 12, "minutes": 5.0, "device": "cpu", "batch": 4, "window": 64}
SMOKE |= {"heldout_window": 128, "heldout_windows": 8, "starts": 4, "warmup": 2, "report_every": 6}


def build_draft(kind: str, target: Target, stream: Tensor, seed: int) -> DraftModel:
    """The untrained head, with the frozen target's embedding and, where the ids allow, its output layer."""
    torch.manual_seed(seed)
    config = DraftConfig.for_target(target.config, kind, **SHAPES[kind])
    if kind == "eagle1":
        shared = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.lm_head}
        return DraftModel(config, **shared)
    counts = stream.long().bincount(minlength=config.vocab_size)
    ids = counts.argsort(descending=True, stable=True)[: config.draft_vocab_size].sort().values
    d2t = ids - torch.arange(len(ids))
    draft = DraftModel(config, embed_tokens=target.get_input_embeddings(), d2t=d2t)
    with torch.no_grad():  # what the target knows of its tokens is a start
        draft.lm_head.weight.copy_(target.lm_head.weight[ids])
    return draft


def affordable_steps(done: int, seconds_per_step: float, deadline: float) -> int:
    """How many steps there can be in all; a tenth of the time is for measuring."""
    return done + max(0, int(0.9 * (deadline - time.monotonic()) / seconds_per_step))


def train(
    draft: Draft, target: Target, stream: Tensor, heldout: Tensor, settings: Settings
) -> tuple[Draft, list[dict[str, Any]], dict[str, Any]]:
    """The averaged head, its curve and the facts of the run.

    The warm-up needs no total: its second half is timed, and the schedule then made for the steps that fit.
    """
    begun = timed = time.monotonic()
    deadline, schedule = begun + 60 * settings.minutes, settings
    teacher = round_weights(copy.deepcopy(target)) if heldout.is_cuda else target  # slow on a CPU
    average, optimizer = copy.deepcopy(draft), make_optimizer(draft)
    generator = torch.Generator(settings.device).manual_seed(settings.seed + 1)  # no copies to wait for
    probe, stream = heldout[:: -(-len(heldout) // 32)], stream.to(settings.device)
    offsets, last = torch.arange(settings.window + 1, device=settings.device), len(stream) - settings.window
    rows: list[dict[str, Any]] = []
    losses: list[Tensor] = []  # since the last row
    for done in itertools.count():
        if done in (settings.warmup // 2, settings.warmup) and losses:
            losses[-1].item()  # waits for the GPU
            if done == settings.warmup:
                each = (time.monotonic() - timed) / (done - settings.warmup // 2)
                fitting = affordable_steps(done, each, deadline)
                schedule = dataclasses.replace(settings, steps=min(settings.steps, fitting))
            timed = time.monotonic()
        ended = done == schedule.steps or time.monotonic() > deadline
        if done % settings.report_every == 0 or ended:
            mean = torch.stack(losses).mean().item() if losses else None
            losses.clear()
            survival = heldout_survival(average, target, probe, starts=4, length=CHAIN)
            row = {"step": done, "train_loss": mean, "heldout_survival": survival}
            rows.append(row | {"seconds": time.monotonic() - begun})
            print(rows[-1], flush=True)
            if ended:
                break
        begins = torch.randint(last, (settings.batch, 1), generator=generator, device=settings.device)
        ids = stream[begins + offsets].long()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            losses.append(draft_loss(draft, teacher, ids, settings, generator))
        take_step(draft, average, optimizer, losses[-1], done, schedule)
        losses[-1] = losses[-1].detach()
    run = {"steps": done, "stopped_by_minutes": done < schedule.steps, "planned_steps": schedule.steps}
    return average, rows, run


def make_optimizer(draft: Draft) -> torch.optim.Optimizer:
    """For the draft's own parameters: what it shares with the target is frozen."""
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    fused = trained[0].is_cuda
    return torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)


def take_step(
    draft: Draft,
    average: Draft,
    optimizer: torch.optim.Optimizer,
    loss: Tensor,
    done: int,
    schedule: Settings,
) -> None:
    """One step of the optimizer and of the average, which follows closely at first, to forget the start."""
    for group in optimizer.param_groups:
        group["lr"] = train_model.learning_rate(done, schedule)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for averaged, current in zip(average.parameters(), draft.parameters(), strict=True):
            if current.requires_grad:
                averaged.lerp_(current, 1 - min(0.999, (1 + done) / (10 + done)))


def round_weights(model: Any) -> Any:
    """To bf16, in place; `model.to` would round RoPE's frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def measure(folder: Path, target: Target, heldout: Tensor, settings: Settings) -> dict[str, list[float]]:
    """Greedy chains of a saved head, in the target's precision."""
    rates = heldout_survival(load_draft(folder, target), target, heldout, settings.starts, CHAIN)
    return {"survival": rates, "accept_lengths": accept_lengths(rates)}


def heldout_rows(files: train_model.Files, settings: Settings) -> Tensor:
    """Held-out windows, as train_model cuts them; the last one, which is not full, is left out."""
    shape = {"window": settings.heldout_window, "heldout_windows": settings.heldout_windows}
    cut = train_model.Settings(**shape, device=settings.device)
    windows = train_model.heldout_windows(train_model.split_corpus(files)[1], cut).long()
    return windows[(windows >= 0).all(1)]


def load_target(folder: Path, device: str) -> Target:
    """In fp32, frozen."""
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return target.to(device).eval().requires_grad_(False)


def train_method(
    kind: str, target: Target, files: train_model.Files, settings: Settings, out: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train, save and measure one head: its curve, and what is known of it."""
    stream = train_model.encode_stream(train_model.split_corpus(files)[0])
    heldout = heldout_rows(files, settings)
    draft = build_draft(kind, target, stream, settings.seed).to(settings.device)
    average, rows, run = train(draft, target, stream, heldout, settings)
    save_draft(round_weights(average), out)
    run["parameters"] = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    run["heldout_chains"] = len(heldout) * settings.starts
    run |= measure(out, target, heldout, settings)
    run["settings"] = dataclasses.asdict(settings)
    run["bytes"] = (out / "model.safetensors").stat().st_size
    return [{"method": kind, **row} for row in rows], run


def write_card(kind: str, run: dict[str, Any], env: dict[str, Any], command: str, out: Path) -> None:
    """The head's README."""
    measured = zip(run["survival"], run["accept_lengths"], strict=True)
    table = [f"| {depth} | {rate:.3f} | {length:.3f} |" for depth, (rate, length) in enumerate(measured, 1)]
    device = (env["gpu"] or "a CPU") + (", cut short" if run["stopped_by_minutes"] else "")
    facts = {"title": kind.upper().replace("EAGLE", "EAGLE-"), "table": "\n".join(table), "device": device}
    values = env | run["settings"] | run | facts | {"kind": kind, "chains": run["heldout_chains"]}
    (out / "README.md").write_text(CARD.format(**values, command=command), encoding="utf-8")


def run_training(
    files: train_model.Files,
    target: Target,
    methods: dict[str, Settings],
    command: str,
    out: Path,
    results: Path,
) -> None:
    """Train every method, and write heads, cards and results."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # never read, and filling takes time
    torch.backends.cuda.enable_cudnn_sdp(False)  # as train_model does, and for its reasons
    env = train_model.environment(files, next(iter(methods.values())))
    report: dict[str, Any] = {"env": env, "command": command, "rows": [], "marks": [], "run": {}}
    for kind, settings in methods.items():
        folder = out / f"byte-llama-{kind}"
        rows, run = train_method(kind, target, files, settings, folder)
        write_card(kind, run, env, command, folder)
        length = run["accept_lengths"][MARK_CHAIN - 1]
        marks = {"bytes": (run["bytes"], SIZE_LIMIT_BYTES)}
        marks[f"target forwards per token, chain of {MARK_CHAIN}"] = (1 / length, FORWARDS_PER_TOKEN_LIMIT)
        for name, (value, limit) in marks.items():
            mark = {"name": f"{kind}: {name}", "value": value, "limit": limit, "met": value <= limit}
            report["marks"].append(mark)
        report["rows"] += rows
        report["run"][kind] = run
        results.parent.mkdir(parents=True, exist_ok=True)  # after each head: a later failure loses nothing
        results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"marks": report["marks"], "run": report["run"]}, indent=2))


def verify(files: train_model.Files, target: Target, out: Path, results: Path, device: str) -> int:
    """Measure saved heads again: 0 if they are as recorded, 1 if not, 2 if the corpus differs."""
    report, differ = json.loads(results.read_text(encoding="utf-8")), False
    for kind, run in report["run"].items():
        settings = Settings(**run["settings"] | {"device": device})
        measured = measure(out / f"byte-llama-{kind}", target, heldout_rows(files, settings), settings)
        now, then = (lengths["accept_lengths"][MARK_CHAIN - 1] for lengths in (measured, run))
        print(f"{kind}: accept length {now:.4f} now, {then:.4f} recorded, chain of {MARK_CHAIN}")
        differ |= abs(now - then) > VERIFY_TOLERANCE
    if train_model.environment(files, settings)["corpus_sha256"] != report["env"]["corpus_sha256"]:
        print(f"not comparable: recorded with Python {report['env']['python']}'s library")
        return 2
    return int(differ)


def main(arguments: list[str] | None = None) -> int:
    """Read the options; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the folder of the heads' folders")
    parser.add_argument("--results", type=Path, help="the JSON file with the results")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = {"steps": int, "minutes": float, "seed": int, "device": str}
    for name, kind in options.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the CPU")
    parser.add_argument("--verify", action="store_true", help="measure saved heads again")
    args = parser.parse_args(arguments)
    if args.smoke and not (args.out and args.results):
        parser.error("--smoke needs --out and --results, to leave the published heads alone")
    given = {key: value for key, value in vars(args).items() if key in options}
    changed = (SMOKE if args.smoke else {}) | given
    methods = {kind: Settings(**METHODS[kind] | changed) for kind in args.methods}
    files = train_model.read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    device = next(iter(methods.values())).device
    target = load_target(TARGET, device)
    out, results = args.out or BENCHMARKS / "models", args.results or BENCHMARKS / "results/train_draft.json"
    if args.verify:
        return verify(files, target, out, results, device)
    command = "python -m benchmarks.train_draft" + " --smoke" * args.smoke
    command += " --methods " + " ".join(args.methods) if args.methods != list(METHODS) else ""
    command += "".join(f" --{key} {value}" for key, value in given.items())
    run_training(files, target, methods, command, out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
