"""`python -m piecewise_graph bench serving`: an engine under load, in this process or one per GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from piecewise_graph.bench.drive import take_turns
from piecewise_graph.bench.load import Load, arrivals, read_texts
from piecewise_graph.bench.serving_report import (
    Outcome,
    check_picture,
    heading,
    plot,
    ratio_table,
    side_table,
)
from piecewise_graph.bench.setting import Setting
from piecewise_graph.bench.trace import trace
from piecewise_graph.eagle.head.checkpoint_files import read_json

from .errors import CommandError
from .files import check_file, write_file
from .loading import Served, check_model, make_served, named_dtype
from .processes import check_processes, is_first, is_rank, joined, start

GIVEN = "as given"
_PROMPTS_PER_CONCURRENCY = 5  # as in the field


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the files that were asked for."""
    sides = _sides(options)
    _check(options)
    if options.tp > 1 and not is_rank():
        return start(options.tp, options.given)
    with joined(options.tp, options.device):
        _measure(options, sides)
    return 0


def _measure(options: argparse.Namespace, sides: Mapping[str, Setting]) -> None:
    served = make_served(options, list(sides.values()))
    load = _load(options, served)
    outcome = Outcome(sides, {})
    turns = options.turns or (5 if len(sides) > 1 else 1)
    for each in options.concurrency:
        some = arrivals(load, options.num_prompts or _PROMPTS_PER_CONCURRENCY * each)
        outcome.turns[each] = take_turns(
            served.speculator, sides, some, each, seed=options.seed, turns=turns, warm_up=options.warm_up
        )
        if options.json and is_first():  # now, so that a run that is cut short keeps what it has
            content = outcome.to_dict(options.command_line, load)
            write_file("--json", options.json, json.dumps(content, indent=1) + "\n")
    if is_first():
        _show(options, outcome)
    if options.trace:
        some = arrivals(load, options.concurrency[-1])
        steps = trace(served.speculator, sides[GIVEN], some, options.trace if is_first() else None)
        what = f"traced {steps} steps of {len(some)} requests: {options.trace.name}"
        if is_first():
            print(heading(what, outcome.synthetic))


def _show(options: argparse.Namespace, outcome: Outcome) -> None:
    for name in outcome.sides:
        print(side_table(name, outcome.medians(name)), end="\n\n")
    if options.compare is not None:
        print(ratio_table(outcome), end="\n\n")
    if options.plot:
        print(plot(outcome, options.plot))


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
    if options.prompts != "random":
        read_texts(Path(options.prompts), str.encode)
    if options.model:
        check_model(options.model)
    if options.draft:
        read_json(Path(options.draft, "config.json"))
    if options.dtype:
        named_dtype(options.dtype)
    if options.tp > 1:
        check_processes(options.tp, options.device)
    for name in ("json", "plot", "trace"):
        file = getattr(options, name)
        if file is not None and is_first():
            check_file(f"--{name}", file)
    if options.plot is not None:
        check_picture(options.plot)


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
