"""Random ways to use a program: options, and steps such as calls, weight updates and resets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from fuzz.blocks import WIDTH, WORDS
from fuzz.programs import Program

TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 15, 16)
ABOVE = (17, 20)
CAPTURE_SIZES = ((1, 2, 4, 8, 16), (1, 2, 4, 8, 16), (4, 8, 16), (16,), (3, 7, 12))
# What the values of a call are like; each has met a fault of its own kind.
DATA = (
    "normal",
    "normal",
    "normal",
    "large",
    "ones",
    "zero_rows",
    "whole",
    "sorted",
    "not_finite",
    "positive",
)
LAYOUTS = ("plain", "sliced", "transposed", "expanded")


@dataclass(frozen=True)
class Step:
    """One step of a sequence.

    Attributes:
        kind: "call", "frozen" (a call of a frozen callable), "capture", "update" (weights in place),
            "replace" (a Parameter), "move" (a weight's storage), "reset", "dynamo_reset", "train", "eval",
            "kept" (look at earlier answers).
        seed: of the numbers that the step draws.
        copy: which of the compiled copies it concerns.
        mode: around a call: "no_grad", "inference", "grad".
    """

    kind: str
    seed: int = 0
    copy: int = 0
    tokens: int = 0
    data: str = "normal"
    layout: str = "plain"
    mode: str = "no_grad"

    def __str__(self) -> str:
        plain = asdict(Step(self.kind))
        told = {name: value for name, value in asdict(self).items() if value != plain[name]}
        return f"{self.kind}({', '.join(f'{name}={value!r}' for name, value in told.items())})"


@dataclass(frozen=True)
class Usage:
    """How a program is compiled, and the steps.

    Attributes:
        entry: "pg.compile" or "torch.compile".
        copies: compiled copies that share a pool.
        options: of the backend, the compiler apart.
    """

    entry: str
    copies: int
    options: tuple[tuple[str, Any], ...]
    steps: tuple[Step, ...]

    def without(self, index: int) -> Usage:
        """The sequence less one step."""
        return replace(self, steps=self.steps[:index] + self.steps[index + 1 :])


@dataclass(frozen=True)
class Case:
    """A program and what is done with it."""

    program: Program
    sequence: Usage

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.sequence.options)
        head = f"# {self.sequence.copies} of {self.sequence.entry}(Program(){options})\n"
        return self.program.source + "\n" + head + "\n".join(f"# {step}" for step in self.sequence.steps)

    @property
    def as_json(self) -> str:
        return json.dumps(asdict(self))


def random_sequence(random: Random) -> Usage:
    """Options and 5 to 9 steps, most of them calls."""
    options: dict[str, Any] = {"capture_sizes": random.choice(CAPTURE_SIZES), "max_tokens": 16}
    if random.random() < 0.3:
        options["outputs"] = "static"
    if random.random() < 0.1:
        options["check"] = "always"
    if random.random() < 0.05:
        options["cuda_graphs"] = "off"
    if random.random() < 0.1:
        options["merge_linears"] = True
    explicit = random.random() < 0.2
    if explicit and random.random() < 0.5:
        options["capture"] = "explicit"
    entry = "pg.compile" if random.random() < 0.85 else "torch.compile"
    # Few sizes, so that buckets are met again; neighbours of one another, so that padding differs.
    palette = random.sample(TOKENS, random.choice((2, 3, 4)))
    palette += [random.choice(ABOVE)] if random.random() < 0.2 else []
    layouts = LAYOUTS if random.random() < 0.15 else LAYOUTS[:1]
    copies = 2 if random.random() < 0.2 else 1
    mode = "inference" if random.random() < 0.15 else "no_grad"
    steps = [_call(random, palette, layouts, copies, mode)]
    if explicit:
        steps.append(Step("capture", random.randrange(2**31)))
    steps += [_step(random, palette, layouts, copies, mode) for _ in range(random.randrange(5, 9))]
    return Usage(entry, copies, tuple(options.items()), (*steps, Step("kept")))


def _call(
    random: Random, palette: Sequence[int], layouts: Sequence[str], copies: int, mode: str, kind: str = "call"
) -> Step:
    if kind == "call" and random.random() < 0.03:
        mode = "grad"
    seed, copy, tokens = random.randrange(2**31), random.randrange(copies), random.choice(palette)
    return Step(kind, seed, copy, tokens, random.choice(DATA), random.choice(layouts), mode)


def _step(random: Random, palette: Sequence[int], layouts: Sequence[str], copies: int, mode: str) -> Step:
    drawn = random.random()
    if drawn < 0.72:
        return _call(random, palette, layouts, copies, mode)
    if drawn < 0.82:
        return _call(random, palette, layouts, copies, mode, "frozen")
    kinds = ("update", "update", "update", "replace", "replace", "move", "reset", "reset", "kept")
    kinds += ("dynamo_reset", "train", "eval")
    return Step(random.choice(kinds), random.randrange(2**31), random.randrange(copies))


def inputs_of(program: Program, step: Step, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a call, by name."""
    generator = torch.Generator().manual_seed(step.seed)
    shape = (*program.batch, step.tokens)
    if step.data == "not_finite" and program.casts:  # what NaN is as an integer is not defined
        step = replace(step, data="normal")
    made: dict[str, Tensor] = {}
    for name in program.inputs:
        if name == "ids" or (name == "x" and program.entry == "ids"):
            made[name] = _ids(shape, step.data, generator)
        elif name == "flags":
            made[name] = torch.rand(shape, generator=generator) < (1.1 if step.data == "ones" else 0.6)
        else:
            made[name] = _features((*shape, WIDTH), step.data, generator)
    return {name: _laid_out(t, step.layout).to(device) for name, t in made.items()}


def _ids(shape: Sequence[int], data: str, generator: torch.Generator) -> Tensor:
    low = 0 if data in ("normal", "zero_rows") else 1
    found = torch.randint(low, WORDS, tuple(shape), generator=generator)
    return found.sort(-1).values if data == "sorted" else found


def _features(shape: Sequence[int], data: str, generator: torch.Generator) -> Tensor:
    t = torch.randn(tuple(shape), generator=generator)
    if data == "large":
        return t * 50
    if data == "ones":
        return torch.ones_like(t)
    if data == "zero_rows":
        return t * (torch.rand(t.shape[:-1], generator=generator) < 0.5)[..., None]
    if data == "whole":
        return t.mul(2).round()
    if data == "sorted":
        return t.sort(-2).values
    if data == "positive":
        return t.abs() + 0.5
    if data == "not_finite":
        t.view(-1)[torch.randint(t.numel(), (1,), generator=generator)] = float("nan")
        t.view(-1)[torch.randint(t.numel(), (1,), generator=generator)] = float("inf")
    return t


def _laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values in other memory."""
    if layout == "sliced":
        return t.repeat_interleave(2, -1)[..., ::2]
    if layout == "transposed" and t.ndim > 1:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "expanded" and t.ndim == 3:
        return t[:1].expand(t.shape)
    return t
