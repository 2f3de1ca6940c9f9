"""The demo: one causal LM through eager, torch.compile and piecewise, side by side."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.bench.drive import wait

from . import generate_command
from .files import check_file, write_file
from .loading import default_model, load_model

_TIMED_TOKENS = (1, 8, 64, 256)


@torch.no_grad()
def run(options: argparse.Namespace) -> int:
    """Run the demo; the exit status is 1 when a token differs from eager."""
    tokenizer, model, compiled = _capture(options)
    encoded = tokenizer(options.prompt, return_tensors="pt", add_special_tokens=False)
    prompt = encoded.input_ids.to(model.device)
    equal = _complete(model, compiled, tokenizer, prompt, options.new_tokens)
    _print_times(model, compiled, prompt, options)
    print(pg.explain(compiled))
    generate_command.demo(options, prompt[0].tolist())
    return 0 if equal else 1


@torch.no_grad()
def explain(options: argparse.Namespace) -> int:
    """Capture a model and print `pg.explain`, or write it as a page."""
    if options.html is not None:
        check_file("--html", options.html)  # before minutes are spent on the rest
    report = pg.explain(_capture(options)[-1])
    print(report)
    if options.html is not None:
        write_file("--html", options.html, report.to_html())
        print(f"written to {options.html}")
    return 0


def _capture(options: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(tokenizer, model, the same captured)."""
    options.model = default_model() if options.model is None else options.model
    tokenizer, model = load_model(options.model, "sdpa", options.dtype, options.device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{options.model}: {count / 1e6:.1f} M parameters, {model.dtype}, {options.device}")
    compiled = pg.compile(model, max_tokens=options.max_tokens, compiler=options.compiler)
    print(pg.capture(compiled, lambda n: _inputs(torch.zeros(1, n, dtype=torch.long, device=model.device))))
    return tokenizer, model, compiled


def _inputs(ids: Tensor) -> dict[str, Any]:
    # One forward over all tokens: the demo shows the backend, not a KV cache.
    return {"input_ids": ids, "use_cache": False}


def _complete(model: Any, compiled: Any, tokenizer: Any, prompt: Tensor, new_tokens: int) -> bool:
    expected = _greedy(model, prompt, new_tokens)
    found, seconds = _timed(partial(_greedy, compiled, prompt, new_tokens), prompt.device)
    print("-" * 72)
    print(tokenizer.decode(found[0], skip_special_tokens=True))
    print("-" * 72)
    same = int((expected == found).sum()) - prompt.shape[1]
    print(f"{same} of {new_tokens} tokens equal to eager, {seconds * 1e3 / new_tokens:.2f} ms each")
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


def _print_times(model: Any, compiled: Any, prompt: Tensor, options: argparse.Namespace) -> None:
    """ms per forward, the three sides alternating in one process."""
    whole = torch.compile(model, backend=options.compiler)
    sides = {"eager": model, "torch.compile": whole, "piecewise": compiled}
    print(f"{'tokens':>8s}" + "".join(f"{name:>16s}" for name in sides) + "   ms per forward (median)")
    for tokens in (n for n in _TIMED_TOKENS if n <= options.max_tokens):
        ids = prompt[:, :1].repeat(1, tokens)
        medians = _medians([partial(side, **_inputs(ids)) for side in sides.values()], prompt.device)
        print(f"{tokens:8d}" + "".join(f"{value * 1e3:16.3f}" for value in medians))


def _medians(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = 15) -> list[float]:
    for call in calls:
        for _ in range(3):
            call()
    turns = [[_timed(call, device)[1] for call in calls] for _ in range(rounds)]
    return [statistics.median(taken) for taken in zip(*turns, strict=True)]


def _timed(call: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """(result, wall seconds with the device's work)."""
    wait(device)
    began = time.perf_counter()
    result = call()
    wait(device)
    return result, time.perf_counter() - began
