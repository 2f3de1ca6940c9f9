"""Settings: what an engine is asked for, and how values of options are read from text.

Each of `OPTIONS` is an option of the command line and a name that `--compare` can change.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from piecewise_graph.eagle.options import (
    AUTO,
    GRAPH_MODES,
    DraftShape,
    EngineOptions,
    Sampling,
    planner_shapes,
)

from .errors import BenchError


def whole(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` up."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} cannot be; pass a whole number from {least} up")
        return int(text)

    return parse


def wholes(least: int, *, fewest: int = 0) -> Callable[[str], tuple[int, ...]]:
    """A parser of lists such as "1,4,16" with at least `fewest` numbers."""

    def parse(text: str) -> tuple[int, ...]:
        found = tuple(whole(least)(part.strip()) for part in text.split(",") if part.strip())
        if len(found) < fewest:
            raise ArgumentTypeError(f"{text!r} names none; pass numbers, such as 1,4,16")
        return found

    return parse


def number(least: float, most: float = float("inf")) -> Callable[[str], float]:
    """A parser of numbers from `least` to `most`; "inf" is one where there is no upper bound."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            above = " up" if most == float("inf") else f" to {most:g}"
            raise ArgumentTypeError(f"{text!r} cannot be; pass a number from {least:g}{above}")
        return value

    return parse


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A parser of one of `names`."""

    def parse(text: str) -> str:
        if text not in names:
            raise ArgumentTypeError(f"{text!r} is none of them; pass one of {', '.join(names)}")
        return text

    return parse


def on_or_off(text: str) -> bool:
    return one_of(("on", "off"))(text) == "on"


def _steps(text: str) -> int | str:
    return int(text) if text.isdecimal() else text  # `Setting.of` refuses other words than "auto"


@dataclass(frozen=True)
class Option:
    """One value of a setting, as text spells it."""

    default: Any
    parse: Callable[[str], Any]
    help: str


_STEPS = "tokens that a round drafts, 0 = plain decoding, or 'auto' (default: 3 with a draft, else 0)"
_SYNTHETIC = "accept this many tokens per round on average, to time random weights: the text is meaningless"
_mode = one_of(GRAPH_MODES)
_PHASES = {"draft": "draft_decode", "verify": "verify", "extend": "extend"}  # phase -> its option
OPTIONS = {
    "steps": Option(None, _steps, _STEPS),
    "topk": Option(DraftShape.topk, whole(1), "branches per level; 1 = a chain"),
    "num_draft_tokens": Option(None, whole(1), "rows that the target verifies, root included"),
    "graphs": Option("full", _mode, f"graph mode of all phases: {', '.join(GRAPH_MODES)}"),
    "draft_decode": Option(None, _mode, "graph mode of draft (default: --graphs)"),
    "verify": Option(None, _mode, "graph mode of verify (default: --graphs)"),
    "extend": Option(None, _mode, "graph mode of draft-extend (default: --graphs)"),
    "overlap": Option(None, on_or_off, "on or off: prepare a round while one runs (default: on with a GPU)"),
    "synthetic_accept_length": Option(None, number(1), _SYNTHETIC),
    "temperature": Option(Sampling.temperature, number(0), "of sampling; 0 = greedy"),
    "top_k": Option(Sampling.top_k, whole(0), "sample from the k most likely tokens; 0 = all"),
    "top_p": Option(Sampling.top_p, number(0), "sample from the top tokens of this probability; 1 = all"),
}
_SHAPE = ("topk", "num_draft_tokens")
_OF_A_DRAFT = ("steps", *_SHAPE, "synthetic_accept_length")


@dataclass(frozen=True)
class Setting:
    """One way to serve a load on a speculator. Make it before a model is loaded, which takes longer.

    Attributes:
        values: of all `OPTIONS`, which the others follow from.
    """

    options: EngineOptions
    sampling: Sampling
    values: dict[str, Any] = field(compare=False)

    @classmethod
    def of(cls, **given: Any) -> Setting:
        """From values of options; the others have their defaults. Plain decoding ignores those of a draft.

        Raises:
            BenchError: the number of steps is another word than "auto".
            SpeculatorError: no such round, or no such sampling.
        """
        values = {name: option.default for name, option in OPTIONS.items()} | given
        shape = steps = values["steps"] or 0
        if isinstance(steps, int):
            shape = DraftShape(steps, *(values[name] for name in _SHAPE if steps))
        elif steps != AUTO:
            raise BenchError.bad_steps(steps)
        graphs = {phase: values[option] or values["graphs"] for phase, option in _PHASES.items()}
        synthetic = values["synthetic_accept_length"] if steps else None
        sampling = Sampling(values["temperature"], values["top_k"], values["top_p"])
        return cls(EngineOptions(shape, graphs, synthetic, values["overlap"]), sampling, values)

    @classmethod
    def from_options(cls, options: argparse.Namespace, *, has_draft: bool) -> Setting:
        """The setting that the command line asks for; without --steps, chains of 3 if there is a draft.

        Raises:
            BenchError: a draft is asked for and there is none.
            SpeculatorError: no such round, or no such sampling.
        """
        given = {name: getattr(options, name) for name in OPTIONS if getattr(options, name, None) is not None}
        return cls.of(**{"steps": 3 if has_draft else 0} | given)._checked(has_draft)

    def but(self, changes: str, *, has_draft: bool) -> Setting:
        """This one with some values changed, such as "overlap=off,steps=0".

        Raises:
            BenchError: an unknown name, an unreadable value, or nothing that differs.
        """
        values: dict[str, Any] = {}
        for part in changes.split(","):
            name, equals, text = (word.strip() for word in part.partition("="))
            key = name.replace("-", "_")
            if not equals:
                raise BenchError.no_value(changes, part)
            if key not in OPTIONS:
                raise BenchError.unknown_setting(_spelled(name), map(_spelled, OPTIONS))
            try:
                values[key] = OPTIONS[key].parse(text)
            except ArgumentTypeError as error:
                raise BenchError.bad_value(changes, name, error) from None
        changed = Setting.of(**self.values | values)._checked(has_draft)
        if changed == self:
            raise BenchError.nothing_to_compare(changes)
        return changed

    def _checked(self, has_draft: bool) -> Setting:
        asked = [name for name in _OF_A_DRAFT if self.values[name] not in (0, OPTIONS[name].default)]
        if asked and not has_draft:
            raise BenchError.no_draft(f"--{_spelled(asked[0])} {self.values[asked[0]]}")
        return self

    def shapes(self, page_size: int) -> list[DraftShape]:
        """The shapes that a speculator has to be made for; trees need pages of one token."""
        shape = self.options.shape
        return [shape] if isinstance(shape, DraftShape) else planner_shapes(trees=page_size == 1)

    def engine(self, speculator: Any) -> Any:
        """An engine of the speculator that serves like this. The caller closes it."""
        return speculator.engine(**vars(self.options))


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def add_setting_options(group: argparse._ActionsContainer, leave_out: Container[str] = ()) -> None:
    """Add an option of the command line for each of `OPTIONS` but those to leave out."""
    for name, each in OPTIONS.items():
        if name not in leave_out:
            group.add_argument(f"--{_spelled(name)}", type=each.parse, default=each.default, help=each.help)
