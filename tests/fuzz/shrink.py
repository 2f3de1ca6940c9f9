"""A failing case made small: blocks, steps and options are left out while it still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.sequences import Case, Step


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 120.0) -> Case:
    """The smallest case found in `seconds` that still fails."""
    end, again = time.perf_counter() + seconds, True
    while again:
        again = False
        for smaller in _smaller(case):
            if time.perf_counter() > end:
                return case
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the most likely to fail first."""
    program, usage = case.program, case.sequence
    steps = usage.steps
    if len(steps) > 3:
        for start in range(0, len(steps), 3):
            yield _with_steps(case, steps[:start] + steps[start + 3 :])
    for index in reversed(range(len(program.blocks))):
        yield replace(case, program=program.without(index))
    for index in reversed(range(len(steps))):
        yield _with_steps(case, steps[:index] + steps[index + 1 :])
    if usage.copies > 1:
        alone = tuple(replace(step, copy=0) for step in steps)
        yield replace(case, sequence=replace(usage, copies=1, steps=alone))
    for index, (name, _) in enumerate(usage.options):
        if name not in ("capture_sizes", "max_tokens"):
            fewer = usage.options[:index] + usage.options[index + 1 :]
            yield replace(case, sequence=replace(usage, options=fewer))
    if usage.entry != "pg.compile":
        yield replace(case, sequence=replace(usage, entry="pg.compile"))
    if program.ending != "h":
        yield replace(case, program=replace(program, ending="h"))
    if program.entry != "rows":
        yield replace(case, program=replace(program, entry="rows"))
    for index, step in enumerate(steps):
        for plainer in _plainer(step):
            yield _with_steps(case, (*steps[:index], plainer, *steps[index + 1 :]))


def _plainer(step: Step) -> Iterator[Step]:
    if step.kind == "frozen":
        yield replace(step, kind="call")
    for name in ("data", "layout", "mode"):
        plain = getattr(Step(step.kind), name)
        if getattr(step, name) != plain:
            yield replace(step, **{name: plain})


def _with_steps(case: Case, steps: tuple[Step, ...]) -> Case:
    return replace(case, sequence=replace(case.sequence, steps=steps))
