"""`python -m piecewise_graph bench serving`: an engine under load, in this process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from piecewise_graph.bench.drive import take_turns
from piecewise_graph.bench.load import Load, arrivals, read_texts
from piecewise_graph.bench.serving_report import Outcome, heading, plot, ratio_table, side_table
from piecewise_graph.bench.setting import Setting
from piecewise_graph.bench.trace import trace

from .errors import CommandError
from .files import check_file
from .loading import Served, make_served

GIVEN = "as given"
_PROMPTS_PER_CONCURRENCY = 5  # as in the field


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the files that were asked for."""
    sides = _sides(options)
    _check(options)
    served = make_served(options, list(sides.values()))
    load = _load(options, served)
    outcome = Outcome(sides, {})
    turns = options.turns or (5 if len(sides) > 1 else 1)
    for each in options.concurrency:
        some = arrivals(load, options.num_prompts or _PROMPTS_PER_CONCURRENCY * each)
        outcome.turns[each] = take_turns(
            served.speculator, sides, some, each, seed=options.seed, turns=turns, warm_up=options.warm_up
        )
        if options.json:  # now, so that a run that is cut short keeps what it has
            content = outcome.to_dict(options.command_line, load)
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    for name in sides:
        print(side_table(name, outcome.medians(name)), end="\n\n")
    if options.compare is not None:
        print(ratio_table(outcome), end="\n\n")
    if options.plot:
        print(plot(outcome, options.plot))
    if options.trace:
        some = arrivals(load, options.concurrency[-1])
        steps = trace(served.speculator, sides[GIVEN], some, options.trace)
        what = f"traced {steps} steps of {len(some)} requests: {options.trace.name}"
        print(heading(what, outcome.synthetic))
    return 0


def _sides(options: argparse.Namespace) -> Mapping[str, Setting]:
    has_draft = bool(options.draft or options.random_draft)
    given = Setting.from_options(options, has_draft=has_draft)
    if options.compare is None:
        return {GIVEN: given}
    return {GIVEN: given, options.compare: given.but(options.compare, has_draft=has_draft)}


def _check(options: argparse.Namespace) -> None:
    """Raise before minutes are spent on the rest."""
    if options.prompts != "random" and not options.model:
        raise CommandError.no_tokenizer(options.prompts)
    for name in ("json", "plot", "trace"):
        file = getattr(options, name)
        if file is not None:
            check_file(f"--{name}", file)


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
