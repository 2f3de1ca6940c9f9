"""`python -m piecewise_graph generate`: a target and a draft on the command line, beside plain decoding."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from piecewise_graph.bench.drive import wait
from piecewise_graph.bench.setting import Setting
from piecewise_graph.eagle.head.checkpoints import load_draft
from piecewise_graph.eagle.options import AUTO, DraftShape
from piecewise_graph.eagle.rounds.synthetic import Synthetic
from piecewise_graph.eagle.speculator import Speculator
from piecewise_graph.eagle.statistics import Statistics

from .loading import load_model

PLAIN = "plain decoding"


@dataclass(frozen=True)
class Run:
    """One generation of one request.

    Attributes:
        seconds: per token after the first, of a run that captures nothing.
    """

    tokens: list[int]
    seconds: float
    statistics: Statistics


def run(options: argparse.Namespace) -> int:
    """Generate with and without the draft, print the text, the times and the acceptance.

    Returns:
        0, or 1 if greedy text in float32 differs from plain decoding.
    """
    setting = Setting.from_options(options, has_draft=bool(options.draft))
    shape, synthetic = setting.options.shape, setting.options.synthetic
    if synthetic is not None and isinstance(shape, DraftShape):
        Synthetic.of(synthetic, shape.steps)  # raises before a model is loaded
    tokenizer, target = load_model(options.model, "piecewise", options.dtype, options.device)
    prompt = tokenizer(options.prompt, add_special_tokens=False).input_ids
    shapes = [*setting.shapes(page_size=1), DraftShape(0)]
    longest = len(prompt) + options.max_new_tokens
    graphs = setting.values["graphs"]
    speculator = _speculator(target, options.draft, shapes, longest, options.compiler, graphs)
    runs = {
        name: measure(speculator, prompt, each, options.max_new_tokens, options.seed)
        for name, each in {PLAIN: Setting.of(**setting.values | {"steps": 0}), str(shape): setting}.items()
    }
    print(tokenizer.decode([*prompt, *runs[str(shape)].tokens], skip_special_tokens=True))
    print("-" * 72)
    print(speed_table(runs))
    print(runs[str(shape)].statistics)
    if shape == AUTO:
        print(speculator.planner)
    different = runs[PLAIN].tokens != runs[str(shape)].tokens
    if setting.sampling.temperature or not different or synthetic is not None:
        return 0
    rounds = target.dtype != torch.float32
    print("greedy text differs from plain decoding" + " (rounding can do that in 16 bits)" * rounds)
    return 0 if rounds else 1


def measure(
    speculator: Speculator, prompt: Sequence[int], setting: Setting, max_new_tokens: int, seed: int = 0
) -> Run:
    """Generate twice: first to compile and capture, then to time the tokens after the first one."""
    asked = vars(setting.options) | {"max_new_tokens": max_new_tokens}
    asked["sampling"] = replace(setting.sampling, seed=seed)
    speculator.generate([prompt], **asked)
    engine, (request,) = speculator.session([prompt], **asked | {"overlap": False})
    try:
        engine.step()
        wait(speculator.device)
        made, began = len(request.tokens), time.perf_counter()
        while engine.unfinished:
            engine.step()
        wait(speculator.device)
        seconds = time.perf_counter() - began
    finally:
        engine.close()
    each = seconds / max(len(request.tokens) - made, 1)
    return Run(request.tokens, each, Statistics((request.counts,), engine.synthetic_accept_length))


def speed_table(runs: dict[str, Run]) -> str:
    """A line per run; speed-ups are relative to the first one."""
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


def demo(options: argparse.Namespace, prompt: Sequence[int]) -> None:
    """The repository's heads beside plain decoding, if there are heads next to the model."""
    path = Path(options.model)
    heads = [folder for folder in sorted(path.parent.glob(f"{path.name}-eagle*")) if folder.is_dir()]
    settings = [Setting.of(), Setting.of(steps=3), Setting.of(steps=5, topk=4, num_draft_tokens=16)]
    shapes = [shape for setting in settings for shape in setting.shapes(page_size=1)]
    runs: dict[str, Run] = {}
    for folder in heads:
        _, target = load_model(options.model, "piecewise", "float32", options.device)
        longest = len(prompt) + options.new_tokens
        speculator = _speculator(target, folder, shapes, longest, options.compiler)
        for setting in settings:
            name = f"{folder.name}, {setting.options.shape}" if setting.values["steps"] else PLAIN
            if name not in runs:
                runs[name] = measure(speculator, prompt, setting, options.new_tokens)
    if heads:
        print("speculative decoding, one request; accepted: tokens per round, the bonus included")
        print(speed_table(runs))
        same = sum(each.tokens == runs[PLAIN].tokens for each in runs.values())
        print(f"{same} of {len(runs)} give the tokens of plain decoding")


def _speculator(
    target: Any, draft: Any, shapes: Sequence[DraftShape], longest: int, compiler: str, graphs: str = "full"
) -> Speculator:
    compiled = {"compiler": compiler}
    return Speculator(
        target, load_draft(draft, target) if draft else None, shapes=shapes, max_requests=1,
        max_seq_len=longest, graphs=graphs, options=compiled, draft_options=compiled,
    )  # fmt: skip
