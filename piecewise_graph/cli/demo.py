"""The demo: one causal LM through eager, torch.compile and piecewise, side by side.

Reaches upwards to transformers, so it is imported by the command line only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg

PROMPT = "import os\nimport sys\n\n\nclass Parser:\n    def __init__(self, "
_SMALL = 100_000_000  # parameters up to which float32 costs nothing and makes agreement exact
_TIMED_TOKENS = (1, 8, 64, 256)


@dataclass(frozen=True)
class DemoOptions:
    """What the command line chose."""

    command: str
    model: str
    prompt: str
    new_tokens: int
    max_tokens: int
    compiler: str
    dtype: str | None
    device: str

    @classmethod
    def from_namespace(cls, options: argparse.Namespace) -> DemoOptions:
        values = vars(options) | {"prompt": options.prompt or PROMPT}
        values["model"] = options.model or _default_model()
        return cls(**values)


def run(options: DemoOptions) -> int:
    """Run the demo; the exit status is 1 when a token differs from eager."""
    from piecewise_graph.eagle import generate_command

    model, tokenizer = _load(options)
    count = sum(p.numel() for p in model.parameters())
    print(
        f"{options.model}: {count / 1e6:.1f} M parameters, {next(model.parameters()).dtype}, {options.device}"
    )
    compiled = pg.compile(model, max_tokens=options.max_tokens, compiler=options.compiler)
    prompt = _encode(tokenizer, options.prompt).to(options.device)
    with torch.no_grad():
        print(pg.capture(compiled, lambda n: _inputs(prompt[:, :1].repeat(1, n))))
        if options.command == "explain":
            print(pg.explain(compiled))
            return 0
        equal = _complete(model, compiled, tokenizer, prompt, options)
        _print_times(model, compiled, prompt, options)
    print(pg.explain(compiled))
    generate_command.demo(
        options.model, prompt[0].tolist(), options.new_tokens, options.compiler, options.device
    )
    return 0 if equal else 1


def _load(options: DemoOptions) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa", dtype="auto")
    small = sum(p.numel() for p in model.parameters()) <= _SMALL
    dtype = getattr(torch, options.dtype) if options.dtype else torch.float32 if small else model.dtype
    torch.nn.Module.to(model, device=options.device, dtype=dtype)
    return model.eval(), tokenizer


def _encode(tokenizer: Any, text: str) -> Tensor:
    return tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids


def _inputs(ids: Tensor) -> dict[str, Any]:
    # One forward over all tokens: the demo shows the backend, not a KV cache.
    return {"input_ids": ids, "use_cache": False}


def _complete(model: Any, compiled: Any, tokenizer: Any, prompt: Tensor, options: DemoOptions) -> bool:
    expected = _greedy(model, prompt, options.new_tokens)
    with _Seconds() as spent:
        found = _greedy(compiled, prompt, options.new_tokens)
    print("-" * 72)
    print(tokenizer.decode(found[0], skip_special_tokens=True))
    print("-" * 72)
    same = int((expected == found).sum()) - prompt.shape[1]
    each = spent.value * 1e3 / options.new_tokens
    print(f"{same} of {options.new_tokens} tokens equal to eager, {each:.2f} ms each")
    if not torch.equal(expected, found):
        first = int((expected != found)[0].int().argmax())
        top = model(**_inputs(expected[:, :first])).logits[0, -1].float().topk(2).values
        print(
            f"first difference at token {first - prompt.shape[1]}; eager's two best logits are {top.tolist()}"
        )
    return torch.equal(expected, found)


def _greedy(model: Callable[..., Any], ids: Tensor, new_tokens: int) -> Tensor:
    for _ in range(new_tokens):
        best = model(**_inputs(ids)).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, best], 1)
    return ids


def _print_times(model: Any, compiled: Any, prompt: Tensor, options: DemoOptions) -> None:
    """ms per forward, the three sides alternating in one process."""
    sides = {"eager": model, "torch.compile": torch.compile(model), "piecewise": compiled}
    sizes = [n for n in _TIMED_TOKENS if n <= options.max_tokens]
    print(f"{'tokens':>8s}" + "".join(f"{name:>16s}" for name in sides) + "   ms per forward (median)")
    for tokens in sizes:
        ids = prompt[:, :1].repeat(1, tokens)
        calls = [partial(side, **_inputs(ids)) for side in sides.values()]
        medians = _medians(calls, options.device)
        print(f"{tokens:8d}" + "".join(f"{value * 1e3:16.3f}" for value in medians))


def _medians(calls: Sequence[Callable[[], Any]], device: str, rounds: int = 15) -> list[float]:
    for call in calls:
        for _ in range(3):
            call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for spent, call in zip(times, calls, strict=True):
            with _Seconds(device) as seconds:
                call()
            spent.append(seconds.value)
    return [statistics.median(spent) for spent in times]


class _Seconds:
    """Wall time of a block, device work included."""

    def __init__(self, device: str = "") -> None:
        self._cuda = device.startswith("cuda")
        self.value = 0.0

    def __enter__(self) -> _Seconds:
        self._wait()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.value = time.perf_counter() - self._began

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _default_model() -> str:
    """The trained model of a source checkout."""
    for root in (Path.cwd(), Path(__file__).resolve().parents[2]):
        path = root / "benchmarks" / "models" / "byte-llama"
        if path.is_dir():
            return str(path)
    raise SystemExit(
        "The repository's model is not here (benchmarks/models/byte-llama); "
        "name one: python -m piecewise_graph demo --model DIR_OR_HUB_ID"
    )
