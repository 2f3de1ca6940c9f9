"""Train the repository's small model: a byte-level Llama on the standard library's source.

The benchmarks need a trained decoder that fits in the repository and that anybody can make again
without a network, so the data is the source that every Python installation carries.  The same
software and GPU are meant to give the same weights, bit by bit.

    python -m benchmarks.train_model                                       # one GPU, minutes
    python -m benchmarks.train_model --verify benchmarks/models/byte-llama # check the loss again
    python -m benchmarks.train_model --smoke --out OUT --results OUT.json  # CPU, seconds
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
import platform
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it as it starts

import torch
import transformers
from torch import Tensor, nn

BENCHMARKS = Path(__file__).resolve().parent
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data"}
PAD, EOS, BYTE_OFFSET, VOCABULARY = 0, 1, 3, 264  # ByT5's numbering; 259 ids rounded up to 8s
HELDOUT_FRACTION = 0.05
IGNORED = -100  # cross_entropy's default ignore_index
# `split_special_tokens`: "</s>" inside a source is four plain bytes
TOKENIZER = {"extra_ids": 0, "bos_token": "</s>", "split_special_tokens": True}
SIZE_LIMIT_BYTES, BITS_PER_BYTE_LIMIT = 7_000_000, 1.5
VERIFY_TOLERANCE = 0.005  # nats per byte: devices round differently
Files = list[tuple[str, bytes]]
Model = Any  # a transformers.PreTrainedModel, whose annotations reject `.to(device)`

CARD = """---
library_name: transformers
license: other
license_name: psf-2.0
---
# byte-llama

A byte-level Llama ({parameters:,} parameters, bf16) for tests and benchmarks: trained weights
that fit in a repository.  Held-out loss: {nats:.4f} nats/byte, {bits:.4f} bits/byte.

- Data: Python {python}'s standard library without its tests ({corpus_files} files,
  {corpus_bytes:,} bytes, sha256 `{corpus_sha256}`); 5 % of the files, by a hash of their path, are
  held out.  The library is under the PSF licence (https://docs.python.org/3/license.html).
- Made by `{command}`: {steps} steps on {device}, torch {torch}, transformers {transformers}.
- A token is a byte + 3; 0 is padding, 1 (`</s>`) separates documents.  The tokenizer ends every
  text with `</s>`: to continue a prompt, call it with `add_special_tokens=False`.
"""


@dataclasses.dataclass
class Settings:
    """What decides the result; the defaults are the published model's."""

    steps: int = 6000
    minutes: float = 4.0  # stop, and save what there is, after this time
    seed: int = 0
    device: str = "cuda"
    batch: int = 32
    window: int = 2048  # all of max_position_embeddings: no position stays untrained
    heldout_windows: int | None = None  # None: all
    warmup: int = 200
    report_every: int = 100
    peak_rate: float = 2e-3


SMOKE: dict[str, Any] = {"steps": 12, "device": "cpu", "batch": 4, "window": 128}
SMOKE |= {"heldout_windows": 16, "warmup": 2, "report_every": 6}


def read_corpus(root: Path) -> Files:
    """The library's sources that are not empty, in an order that no file system decides.

    Left out besides tests: `pydoc_data`, one generated text that would outweigh the other held-out
    files, and `_sysconfigdata*`, which differs by build and names the builder's paths.
    """
    files: Files = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        excluded = EXCLUDED_FOLDERS.intersection(name.parts[:-1])
        if path.is_file() and not excluded and not name.name.startswith("_sysconfigdata"):
            with contextlib.suppress(UnicodeDecodeError):
                if path.read_text(encoding="utf-8"):
                    files.append((name.as_posix(), path.read_bytes()))
    return files


def split_corpus(files: Files) -> tuple[Files, Files]:
    """Training and held-out files; by a hash of the path, so that no other file moves one."""
    parts: tuple[Files, Files] = ([], [])
    for name, data in files:
        fraction = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
        parts[fraction < HELDOUT_FRACTION].append((name, data))
    return parts


def encode_stream(files: Files) -> Tensor:
    """All documents as token ids, with end-of-sequence before, between and after them."""
    parts = [torch.tensor([EOS], dtype=torch.int16)]
    for _, data in files:
        ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).short() + BYTE_OFFSET
        parts += [ids, parts[0]]
    return torch.cat(parts)


def heldout_windows(files: Files, settings: Settings) -> Tensor:
    """Rows of `window` targets and the token before them; every token is a target once."""
    stream, window = encode_stream(files), settings.window
    rows = math.ceil((len(stream) - 1) / window)
    filler = stream.new_full((rows * window + 1 - len(stream),), IGNORED)
    windows = torch.cat([stream, filler]).unfold(0, window + 1, window)
    return windows[: settings.heldout_windows].to(settings.device)


def build_model(seed: int) -> transformers.LlamaForCausalLM:
    """The untrained model, made on the CPU so that its first weights depend on no device."""
    torch.manual_seed(seed)
    ids: dict[str, Any] = {"pad_token_id": PAD, "bos_token_id": EOS, "eos_token_id": EOS}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, **ids,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**ids)
    return model


def token_loss(model: Model, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy, in fp32, of each window's tokens given the ones before them."""
    inputs, targets = windows[:, :-1].clamp(min=PAD).long(), windows[:, 1:].long()
    mixed = windows.is_cuda and model.dtype == torch.float32  # a saved model runs as it is
    with torch.autocast(windows.device.type, torch.bfloat16, enabled=mixed):
        logits = model(input_ids=inputs, use_cache=False).logits
    logits = logits.float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)


@torch.no_grad()
def heldout_loss(model: Model, windows: Tensor) -> float:
    """Nats per byte: separators add to the sum, only bytes count."""
    losses = (token_loss(model, part, "sum").item() for part in windows.split(32))
    return math.fsum(losses) / int((windows >= BYTE_OFFSET)[:, 1:].sum())


def learning_rate(step: int, settings: Settings) -> float:
    """Linear warm-up, then a cosine down to a hundredth of the peak."""
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * max(0.0, done)))
    return settings.peak_rate * min(1.0, (step + 1) / settings.warmup) * cosine


def train(
    stream: Tensor, heldout: Tensor, settings: Settings, started: float
) -> tuple[Model, list[dict[str, Any]], dict[str, Any]]:
    """The averaged fp32 model, its loss curve and the facts of the run.

    The step count decides the result.  `minutes`, counted from `started`, only ends a run that is
    too slow; such a run is saved, but is no longer the same on every machine.
    """
    torch.use_deterministic_algorithms(True)  # attention's backward obeys only without warn_only
    torch.backends.cuda.enable_cudnn_sdp(False)  # releases differ in what it promises
    model = build_model(settings.seed).to(settings.device)
    average = copy.deepcopy(model).eval()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    shape = (settings.steps, settings.batch, 1)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    starts = torch.randint(len(stream) - settings.window, shape, generator=generator)
    starts, stream = starts.to(settings.device), stream.to(settings.device)
    offsets = torch.arange(settings.window + 1, device=settings.device)
    rows: list[dict[str, Any]] = []
    losses: list[Tensor] = []  # since the last row
    begun = time.monotonic()
    for done in range(settings.steps + 1):
        if done % settings.report_every == 0 or done == settings.steps:
            mean = torch.stack(losses).mean().item() if losses else None
            losses.clear()
            nats = heldout_loss(average, heldout)  # waits for the GPU: the time below is true
            row = {"step": done, "train_loss": mean, "heldout_nats_per_byte": nats}
            rows.append(row | {"heldout_bits_per_byte": nats / math.log(2)})
            milliseconds = 1000 * (time.monotonic() - begun) / max(1, done)
            print(f"{rows[-1]} {milliseconds:.1f} ms/step", flush=True)
            if done == settings.steps or time.monotonic() - started > 60 * settings.minutes:
                break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(done, settings)
        optimizer.zero_grad(set_to_none=True)
        loss = token_loss(model, stream[starts[done] + offsets])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        with torch.no_grad():  # the average follows closely at first, to forget the start
            for averaged, current in zip(average.parameters(), model.parameters(), strict=True):
                averaged.lerp_(current, 1 - min(0.999, (1 + done) / (10 + done)))
    stopped = done < settings.steps
    run = {"steps": done, "stopped_by_minutes": stopped, "milliseconds_per_step": milliseconds}
    return average, rows, run


def saved_loss(folder: Path, heldout: Tensor) -> float:
    """Held-out loss of a saved model; on a CPU in fp32, as bf16 arithmetic is slow there."""
    dtype = torch.bfloat16 if heldout.is_cuda else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return heldout_loss(model.to(heldout.device).eval(), heldout)


def environment(files: Files, settings: Settings) -> dict[str, Any]:
    """What has to be equal for the same numbers to be expected."""
    digest = hashlib.sha256()
    for name, data in files:
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    gpu = torch.cuda.get_device_name(settings.device) if "cuda" in settings.device else None
    return {
        "gpu": gpu, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "corpus_sha256": digest.hexdigest(),
        "corpus_bytes": sum(len(data) for _, data in files), "corpus_files": len(files),
    }  # fmt: skip


def run_training(files: Files, settings: Settings, command: str, out: Path, results: Path) -> None:
    """Train, save, measure what was saved, and write the model card and the results."""
    started = time.monotonic()
    train_files, heldout_files = split_corpus(files)
    heldout = heldout_windows(heldout_files, settings)
    model, rows, run = train(encode_stream(train_files), heldout, settings, started)
    model.to(torch.bfloat16).save_pretrained(out)
    transformers.ByT5Tokenizer(**TOKENIZER).save_pretrained(out)
    nats, env = saved_loss(out, heldout), environment(files, settings)
    bits, run["parameters"] = nats / math.log(2), model.num_parameters()
    run |= {"saved_heldout_nats_per_byte": nats, "settings": dataclasses.asdict(settings)}
    run["peak_gpu_bytes"] = torch.cuda.max_memory_allocated() if heldout.is_cuda else None
    device = (env["gpu"] or "a CPU") + (", cut short" if run["stopped_by_minutes"] else "")
    card = CARD.format(**env | run, nats=nats, bits=bits, command=command, device=device)
    (out / "README.md").write_text(card, encoding="utf-8")
    size = sum(file.stat().st_size for file in out.iterdir())
    limits: dict[str, tuple[float, float]] = {"model_bytes": (size, SIZE_LIMIT_BYTES)}
    limits["saved_heldout_bits_per_byte"] = (bits, BITS_PER_BYTE_LIMIT)
    marks = [{"name": k, "value": v, "limit": m, "met": v <= m} for k, (v, m) in limits.items()]
    report = {"env": env, "command": command, "rows": rows, "marks": marks, "run": run}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({"marks": marks, "run": run}, indent=2))


def verify(files: Files, folder: Path, results: Path, device: str) -> int:
    """Measure a saved model again: 0 if it is as recorded, 1 if not, 2 if the corpus differs."""
    report = json.loads(results.read_text(encoding="utf-8"))
    settings = Settings(**report["run"]["settings"] | {"device": device})
    nats = saved_loss(folder, heldout_windows(split_corpus(files)[1], settings))
    recorded = report["run"]["saved_heldout_nats_per_byte"]
    print(f"held-out nats/byte: {nats:.5f} now, {recorded:.5f} recorded")
    if environment(files, settings)["corpus_sha256"] != report["env"]["corpus_sha256"]:
        print(f"not comparable: recorded with Python {report['env']['python']}'s library")
        return 2
    return int(abs(nats - recorded) > VERIFY_TOLERANCE)


def main(arguments: list[str] | None = None) -> int:
    """Read the options; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="the model's folder")
    parser.add_argument("--results", type=Path, help="the JSON file with the results")
    options = {"steps": int, "minutes": float, "seed": int, "device": str}
    for name, kind in options.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a tiny run on the CPU")
    parser.add_argument("--verify", type=Path, metavar="DIR", help="measure a saved model again")
    args = parser.parse_args(arguments)
    if args.smoke and not args.verify and not (args.out and args.results):
        parser.error("--smoke needs --out and --results, to leave the published model alone")
    given = {key: value for key, value in vars(args).items() if key in options}
    settings = Settings(**(SMOKE if args.smoke else {}) | given)
    files = read_corpus(Path(sysconfig.get_paths()["stdlib"]))
    results = args.results or BENCHMARKS / "results" / "train_model.json"
    if args.verify:
        return verify(files, args.verify, results, settings.device)
    command = "python -m benchmarks.train_model" + " --smoke" * args.smoke
    command += "".join(f" --{key} {getattr(settings, key)}" for key in given)
    run_training(files, settings, command, args.out or BENCHMARKS / "models/byte-llama", results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
