"""Settings: what an engine is asked for, and how values of options are read from text.

Each field of `Setting` is an option of the command line and a name that `--compare` can change.
"""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from piecewise_graph.eagle.options import AUTO, GRAPH_MODES, DraftShape, Sampling, planner_shapes

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
    return int(text) if text.isdecimal() else text  # `Setting.checked` refuses other words than "auto"


_STEPS = "tokens that a round drafts, 0 = plain decoding, or 'auto' (default: 3 with a draft, else 0)"


def _option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True)
class Setting:
    """One way to serve a load on a speculator.

    Attributes:
        steps: tokens per draft, 0 = plain decoding, "auto" = the planner's choice.
        draft_decode, verify, extend: graph mode of one phase; None = `graphs`.
        overlap: None = on with a GPU.
        synthetic_accept_length: mean tokens per round including the bonus; None = real acceptance.
    """

    steps: int | str = _option(0, _steps, _STEPS)
    topk: int = _option(1, whole(1), "branches per level; 1 = a chain")
    num_draft_tokens: int | None = _option(None, whole(1), "rows that the target verifies, root included")
    graphs: str = _option("full", one_of(GRAPH_MODES), f"graph mode of all phases: {', '.join(GRAPH_MODES)}")
    draft_decode: str | None = _option(None, one_of(GRAPH_MODES), "graph mode of draft (default: --graphs)")
    verify: str | None = _option(None, one_of(GRAPH_MODES), "graph mode of verify (default: --graphs)")
    extend: str | None = _option(None, one_of(GRAPH_MODES), "graph mode of draft-extend (default: --graphs)")
    overlap: bool | None = _option(
        None,
        on_or_off,
        "on or off: prepare a round while the device runs one (default: on with a GPU)",
    )
    synthetic_accept_length: float | None = _option(
        None,
        number(1),
        "accept this many tokens per round on average, whatever the target says; for timing models with "
        "random weights: the generated text is meaningless",
    )
    temperature: float = _option(0.0, number(0), "of sampling; 0 = greedy")
    top_k: int = _option(0, whole(0), "sample from the k most likely tokens; 0 = all")
    top_p: float = _option(1.0, number(0), "sample from the most likely tokens of this probability; 1 = all")

    @classmethod
    def from_options(cls, options: argparse.Namespace, *, has_draft: bool) -> Setting:
        """The setting that the command line asks for; without --steps, chains of 3 if there is a draft.

        Raises:
            BenchError: a draft is asked for and there is none.
            SpeculatorError: no such round, or no such sampling.
        """
        asked = {each.name: getattr(options, each.name, None) for each in fields(cls)}
        given = {name: value for name, value in asked.items() if value is not None}
        setting = cls(**({"steps": 3 if has_draft else 0} | given))
        if not has_draft and (setting.topk, setting.num_draft_tokens) != (1, None):
            raise BenchError.no_draft("what --topk and --num-draft-tokens ask for")
        return setting.checked(has_draft)

    def but(self, changes: str, *, has_draft: bool) -> Setting:
        """This one with some values changed, such as "overlap=off,steps=0".

        Raises:
            BenchError: an unknown name, an unreadable value, or nothing that differs.
        """
        known = {each.name.replace("_", "-"): each for each in fields(self)}
        values: dict[str, Any] = {}
        for part in changes.split(","):
            name, equals, text = (word.strip() for word in part.partition("="))
            name = name.replace("_", "-")
            if not equals:
                raise BenchError.no_value(changes, part)
            if name not in known:
                raise BenchError.unknown_setting(name, known)
            try:
                values[known[name].name] = known[name].metadata["parse"](text)
            except ArgumentTypeError as error:
                raise BenchError.bad_value(changes, name, error) from None
        changed = replace(self, **values).checked(has_draft)
        if changed == self:
            raise BenchError.nothing_to_compare(changes)
        return changed

    def checked(self, has_draft: bool) -> Setting:
        """Itself. Call it before a model is loaded, which takes longer than finding a mistake.

        Raises:
            BenchError: it drafts without a draft.
            SpeculatorError: no such round, or no such sampling.
        """
        if isinstance(self.steps, str) and self.steps != AUTO:
            raise BenchError.bad_steps(self.steps)
        if self.steps != 0 and not has_draft:
            raise BenchError.no_draft(f"--steps {self.steps}")
        _ = self.shape, self.sampling(0)
        return self

    @property
    def shape(self) -> DraftShape | str:
        """What a round looks like, or "auto"."""
        if not isinstance(self.steps, int):
            return AUTO
        return DraftShape(self.steps, self.topk, self.num_draft_tokens) if self.steps else DraftShape(0)

    def shapes(self, page_size: int) -> list[DraftShape]:
        """The shapes that a speculator has to be made for; trees need pages of one token."""
        if isinstance(self.shape, DraftShape):
            return [self.shape]
        return planner_shapes(trees=page_size == 1)

    @property
    def phase_graphs(self) -> dict[str, str]:
        """The graph mode of each phase."""
        own = {"draft": self.draft_decode, "verify": self.verify, "extend": self.extend}
        return {phase: mode or self.graphs for phase, mode in own.items()}

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, seed)

    def engine(self, speculator: Any) -> Any:
        """An engine of the speculator that serves like this. The caller closes it."""
        synthetic = self.synthetic_accept_length if self.steps else None
        return speculator.engine(
            shape=self.shape, graphs=self.phase_graphs, synthetic=synthetic, overlap=self.overlap
        )


def add_setting_options(group: argparse._ActionsContainer, leave_out: Container[str] = ()) -> None:
    """Add an option of the command line for each field but those to leave out."""
    for each in fields(Setting):
        if each.name not in leave_out:
            group.add_argument(
                f"--{each.name.replace('_', '-')}", type=each.metadata["parse"], default=each.default,
                help=each.metadata["help"],
            )  # fmt: skip
    group.set_defaults(steps=None)  # unlike 0: not given
