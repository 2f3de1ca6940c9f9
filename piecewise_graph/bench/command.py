"""`python -m piecewise_graph bench serving`: an engine under load, in this process."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from piecewise_graph.errors import PiecewiseError

from .environment import environment
from .errors import BenchError
from .load import Load, arrivals, read_texts
from .metrics import Metrics, acceptance
from .models import Served, make_served
from .options import parse
from .plot import plot
from .report import heading, ratio_table, side_table
from .settings import Setting
from .trace import trace
from .turns import Ratio, ratios, take_turns

GIVEN = "as given"
_PROMPTS_PER_CONCURRENCY = 5  # as in the field

Turns = dict[str, list[Metrics]]  # side -> metrics, turn by turn


@dataclass(frozen=True)
class Outcome:
    """What was measured so far.

    Attributes:
        turns: per concurrency.
    """

    sides: Mapping[str, Setting]
    turns: dict[int, Turns]

    def medians(self, side: str) -> list[Metrics]:
        """Of one side, per concurrency."""
        return [Metrics.median_of(found[side]) for found in self.turns.values()]

    @property
    def decreed(self) -> float | None:
        """The accept length that some side was given by decree."""
        found = [turns[0].synthetic for each in self.turns.values() for turns in each.values()]
        return next((length for length in found if length is not None), None)

    def ratios(self) -> tuple[str, dict[int, list[Ratio]]]:
        """(what is divided by what, ratios per concurrency); for two sides."""
        first, second = self.sides
        per_concurrency = {
            concurrency: ratios(found[first], found[second]) for concurrency, found in self.turns.items()
        }
        return f"{first} / {second}", per_concurrency


def main(arguments: Sequence[str]) -> int:
    """Measure and print; the status is 2 where the options cannot be served."""
    try:
        return _run(parse(arguments), arguments)
    except PiecewiseError as error:
        print(error, file=sys.stderr)
        return 2


def _run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    sides = _sides(options)
    _check(options)
    served = make_served(options, list(sides.values()))
    load = _load(options, served)
    outcome = Outcome(sides, {})
    for each in options.concurrency:
        outcome.turns[each] = _measure(options, served, sides, load, each)
        if options.json:  # now, so that a run that is cut short keeps what it has
            content = _content(arguments, load, outcome)
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    for name in sides:
        print(side_table(name, outcome.medians(name)), end="\n\n")
    if options.compare is not None:
        print(ratio_table(*outcome.ratios(), outcome.decreed), end="\n\n")
    if options.plot:
        print(plot({name: outcome.medians(name) for name in sides}, options.plot))
    if options.trace:
        some = arrivals(load, options.concurrency[-1])
        steps = trace(served.speculator, sides[GIVEN], some, options.trace)
        print(heading(f"traced {steps} steps of {len(some)} requests: {options.trace.name}", outcome.decreed))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Say what is wrong before minutes are spent on the rest."""
    if options.prompts != "random" and not options.model:
        raise BenchError.no_tokenizer(options.prompts)
    for name in ("json", "plot", "trace"):
        file = getattr(options, name)
        if file is not None and not file.parent.is_dir():
            raise BenchError.no_folder(f"--{name}", file)


def _sides(options: argparse.Namespace) -> dict[str, Setting]:
    has_draft = bool(options.draft or options.random_draft)
    given = Setting.from_options(options, has_draft=has_draft)
    if options.compare is None:
        return {GIVEN: given}
    return {GIVEN: given, options.compare: given.but(options.compare, has_draft=has_draft)}


def _load(options: argparse.Namespace, served: Served) -> Load:
    texts = None
    if options.prompts != "random":
        assert served.encode is not None
        texts = read_texts(Path(options.prompts), served.encode)
    return Load(
        options.input_len,
        options.output_len,
        options.range_ratio,
        options.request_rate,
        options.seed,
        served.vocab_size,
        texts,
    )


def _measure(
    options: argparse.Namespace, served: Served, sides: Mapping[str, Setting], load: Load, concurrency: int
) -> Turns:
    count = options.num_prompts or _PROMPTS_PER_CONCURRENCY * concurrency
    return take_turns(
        served.speculator, sides, arrivals(load, count), concurrency,
        seed=options.seed, turns=options.turns or (5 if len(sides) > 1 else 1), warm_up=options.warm_up,
    )  # fmt: skip


def _content(arguments: Sequence[str], load: Load, outcome: Outcome) -> dict[str, Any]:
    """The results file: a row per side and concurrency, medians over the turns."""
    rows = [
        {"side": name, "turns": len(found[name]), **Metrics.median_of(found[name]).to_dict()}
        for found in outcome.turns.values()
        for name in outcome.sides
    ]
    content: dict[str, Any] = {
        "env": environment(),
        "command": " ".join(["python -m piecewise_graph bench", *arguments]),
        "load": load.to_dict(),
        "sides": {name: asdict(setting) for name, setting in outcome.sides.items()},
        "rows": rows,
    }
    if len(outcome.sides) > 1:
        name, found = outcome.ratios()
        content["ratios"] = [
            {"ratio": name, "acceptance": acceptance(outcome.decreed), "max_concurrency": concurrency}
            | asdict(ratio)
            for concurrency, each in found.items()
            for ratio in each
        ]
        content["turns"] = [
            {"side": side, "turn": turn, **metrics.to_dict()}
            for of in outcome.turns.values()
            for side, each in of.items()
            for turn, metrics in enumerate(each)
        ]
    return content
