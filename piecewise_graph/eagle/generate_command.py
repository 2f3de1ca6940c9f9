"""`python -m piecewise_graph generate`: a target and a draft on the command line, beside plain decoding."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import piecewise_graph as pg
from piecewise_graph.errors import PiecewiseError

from .errors import SpeculatorError
from .options import AUTO, DraftShape, Sampling, planner_shapes
from .rounds.synthetic import Synthetic
from .speculator import Speculator
from .statistics import Statistics

_SMALL = 100_000_000  # parameters up to which float32 costs nothing and makes agreement exact
_PLAIN = DraftShape(0)


@dataclass(frozen=True)
class Run:
    """One generation of one request.

    Attributes:
        seconds: per token after the first, of a run in which nothing is captured any more.
    """

    tokens: list[int]
    seconds: float
    statistics: Statistics


def run(options: argparse.Namespace) -> int:
    """Generate with and without the draft, print the text, the times and the acceptance; 0 when all is well.

    Greedy text must be the same with and without a draft; in float32 a difference ends with status 1, options
    that cannot be served with 2.
    """
    try:
        return _run(options)
    except PiecewiseError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    shape = _shape(options)
    if options.synthetic_accept_length is not None and isinstance(shape, DraftShape):
        Synthetic.of(options.synthetic_accept_length, shape.steps)  # said before a model is loaded
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    tokenizer, target = load_target(options.model, options.dtype, options.device)
    prompt = tokenizer(options.prompt, add_special_tokens=False).input_ids
    speculator = _speculator(options, target, [shape] if shape != AUTO else planner_shapes(), len(prompt))
    asked: dict[str, Any] = {"plain decoding": _PLAIN, str(shape): shape}
    runs = {
        name: measure(
            speculator, prompt, each, sampling, options.max_new_tokens,
            options.synthetic_accept_length if each != _PLAIN else None,
        )
        for name, each in asked.items()
    }  # fmt: skip
    print(tokenizer.decode([*prompt, *runs[str(shape)].tokens], skip_special_tokens=True))
    print("-" * 72)
    print(speed_table(runs))
    print(runs[str(shape)].statistics)
    if shape == AUTO:
        print(speculator.planner)
    different = runs["plain decoding"].tokens != runs[str(shape)].tokens
    if sampling.greedy and different and options.synthetic_accept_length is None:
        print(
            "greedy text differs from plain decoding" + " (rounding can do that in 16 bits)" * _rounds(target)
        )
        return 0 if _rounds(target) else 1
    return 0


def measure(
    speculator: Speculator,
    prompt: Sequence[int],
    shape: DraftShape | str,
    sampling: Sampling,
    max_new_tokens: int,
    synthetic: float | None = None,
) -> Run:
    """Generate twice, the first time to compile and capture, and time the second after its first token."""
    asked: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "shape": shape}
    asked["synthetic"] = synthetic
    speculator.generate([prompt], **asked)
    engine, (request,) = speculator.session([prompt], **asked)
    try:
        engine.step()
        _wait(speculator.device)
        made, began = len(request.tokens), time.perf_counter()
        while engine.unfinished:
            engine.step()
        _wait(speculator.device)
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    each = seconds / max(len(request.tokens) - made, 1)
    return Run(request.tokens, each, Statistics((request.counts,), engine.synthetic_accept_length))


def speed_table(runs: dict[str, Run]) -> str:
    """A line per run, against the first of them."""
    first = next(iter(runs.values()))
    width = max(map(len, runs))
    lines = [f"{'':{width}s} {'ms/token':>9s} {'speed-up':>9s} {'accepted':>9s}  by position"]
    for name, each in runs.items():
        rates = " ".join(f"{rate:.2f}" for rate in each.statistics.acceptance_rates)
        lines.append(
            f"{name:{width}s} {each.seconds * 1e3:9.3f} {first.seconds / each.seconds:8.2f}x "
            f"{each.statistics.mean_acceptance_length:9.2f}  {rates}"
        )
    return "\n".join(lines)


def demo(path: str, prompt: Sequence[int], max_new_tokens: int, compiler: str, device: str) -> None:
    """The repository's heads beside plain decoding, where they stand next to the model at `path`."""
    from transformers import AutoModelForCausalLM

    heads = [
        folder for folder in sorted(Path(path).parent.glob(f"{Path(path).name}-eagle*")) if folder.is_dir()
    ]
    if not heads:
        return
    pg.register_attention()
    compiled = {"compiler": compiler}
    runs: dict[str, Run] = {}
    for folder in heads:
        target: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="piecewise", dtype=torch.float32
        )
        target = target.to(device).eval()
        draft = _draft(folder, target)
        shapes = [_PLAIN, DraftShape(3), DraftShape(5, 4, 16)]
        speculator = Speculator(
            target, draft, shapes=shapes, max_requests=1, max_seq_len=len(prompt) + max_new_tokens,
            options=compiled, draft_options=compiled,
        )  # fmt: skip
        for shape in shapes:
            name = "plain decoding" if shape == _PLAIN else f"{folder.name}, {shape}"
            if name not in runs:
                runs[name] = measure(speculator, prompt, shape, Sampling(), max_new_tokens)
    print("speculative decoding, one request; accepted: tokens per round, the bonus included")
    print(speed_table(runs))
    plain = runs["plain decoding"].tokens
    same = sum(each.tokens == plain for each in runs.values())
    print(f"{same} of {len(runs)} give the tokens of plain decoding")


def load_target(path: str, dtype: str | None, device: str) -> tuple[Any, Any]:
    """(tokenizer, target on our attention); without a dtype its own, or float32 where the model is small."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pg.register_attention()
    wanted, place = _dtype(dtype) if dtype else "auto", _device(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        target: Any = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="piecewise", dtype=wanted
        )
    except (OSError, ValueError) as error:
        raise SpeculatorError.no_model(path, error) from error
    if not dtype and sum(p.numel() for p in target.parameters()) <= _SMALL:
        target = target.float()
    return tokenizer, target.to(place).eval()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SpeculatorError.no_dtype(name)
    return found


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SpeculatorError.no_device(name, error) from error
    return device


def _draft(path: Any, target: Any) -> Any:
    from .head.checkpoints import load_draft

    return load_draft(path, target)


def _speculator(options: argparse.Namespace, target: Any, shapes: list[Any], prompt: int) -> Speculator:
    compiled = {"compiler": options.compiler}
    return Speculator(
        target,
        _draft(options.draft, target) if options.draft else None,
        shapes=[*shapes, _PLAIN],
        max_requests=1,
        max_seq_len=prompt + options.max_new_tokens,
        graphs=options.graphs,
        options=compiled,
        draft_options=compiled,
    )


def _shape(options: argparse.Namespace) -> DraftShape | str:
    if not options.draft:
        if options.steps is not None or options.topk != 1 or options.num_draft_tokens is not None:
            raise SpeculatorError.no_draft("what --steps, --topk and --num-draft-tokens ask for")
        return _PLAIN
    steps = "3" if options.steps is None else options.steps
    if steps == AUTO:
        return AUTO
    if not steps.isdecimal():
        raise SpeculatorError.bad_steps_option(steps)
    return DraftShape(int(steps), options.topk, options.num_draft_tokens)


def _rounds(target: Any) -> bool:
    return next(target.parameters()).dtype != torch.float32


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
