"""Settings: what an engine is asked for. An option of the command line is a field here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from piecewise_graph.eagle.options import AUTO, DraftShape, Sampling, planner_shapes
from piecewise_graph.eagle.options import GRAPH_MODES as WAYS

from .errors import BenchError
from .values import number, on_or_off, one_of, whole


def _steps(text: str) -> int | str:
    return text if text == AUTO else whole(0)(text)


def _option(default: Any, parse: Callable[[str], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True)
class Setting:
    """One way to serve a load on a speculator.

    Attributes:
        steps: of a draft, 0 = plain decoding, "auto" = the planner's choice; None = 3 where there is a draft.
        draft_decode, verify, extend: how that phase runs, where it differs from `graphs`.
        overlap: None = on where there is a GPU.
        synthetic_accept_length: decreed, in tokens per round with the bonus; None = the target decides.
    """

    steps: int | str | None = _option(None, _steps, "tokens that a round drafts, 0 = plain decoding, 'auto'")
    topk: int = _option(1, whole(1), "branches per level; 1 = a chain")
    num_draft_tokens: int | None = _option(None, whole(1), "rows that the target verifies, root included")
    graphs: str = _option("full", one_of(WAYS), f"how phases run: {', '.join(WAYS)}")
    draft_decode: str | None = _option(None, one_of(WAYS), "how the draft phase runs, if not as --graphs")
    verify: str | None = _option(None, one_of(WAYS), "how the verify phase runs")
    extend: str | None = _option(None, one_of(WAYS), "how the draft-extend phase runs")
    overlap: bool | None = _option(None, on_or_off, "on or off: the host works while the device does")
    synthetic_accept_length: float | None = _option(
        None, number(1), "decree acceptance, for random weights: the text is void"
    )
    temperature: float = _option(0.0, number(0), "0 = greedy")
    top_k: int = _option(0, whole(0), "0 = all")
    top_p: float = _option(1.0, number(0), "1 = all")

    @classmethod
    def from_options(cls, options: argparse.Namespace, *, has_draft: bool) -> Setting:
        """Raises:
        BenchError: a draft is asked for and there is none.
        """
        setting = cls(**{each.name: getattr(options, each.name) for each in fields(cls)})
        if setting.steps is None:
            setting = replace(setting, steps=3 if has_draft else 0)
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
                raise BenchError.bad_setting(changes, f"{part!r} has no '='")
            if name not in known:
                raise BenchError.unknown_setting(name, known)
            try:
                values[known[name].name] = known[name].metadata["parse"](text)
            except argparse.ArgumentTypeError as error:
                raise BenchError.bad_setting(changes, f"{name}: {error}") from None
        changed = replace(self, **values).checked(has_draft)
        if changed == self:
            raise BenchError.nothing_to_compare(changes)
        return changed

    def checked(self, has_draft: bool) -> Setting:
        """Itself, so that what is wrong is said before a model is loaded.

        Raises:
            BenchError: it drafts without a draft.
            SpeculatorError: no such round, or nothing can be sampled like this.
        """
        if self.steps != 0 and not has_draft:
            raise BenchError.no_draft(self.steps)
        _ = self.shape, self.sampling(0)
        return self

    @property
    def shape(self) -> DraftShape | str:
        """What a round looks like, or "auto"."""
        if not isinstance(self.steps, int):
            return AUTO
        return DraftShape(self.steps, self.topk, self.num_draft_tokens) if self.steps else DraftShape(0)

    def shapes(self, page_size: int) -> list[DraftShape]:
        """What a speculator has to be made for; trees need pages of one token."""
        if isinstance(self.shape, DraftShape):
            return [self.shape]
        return planner_shapes(trees=page_size == 1)

    @property
    def ways(self) -> dict[str, str]:
        """How each phase runs."""
        own = {"draft": self.draft_decode, "verify": self.verify, "extend": self.extend}
        return {phase: way or self.graphs for phase, way in own.items()}

    def sampling(self, seed: int) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, seed)

    def engine(self, speculator: Any) -> Any:
        """An engine of the speculator that serves like this; to be closed by the caller."""
        synthetic = self.synthetic_accept_length if self.steps else None
        return speculator.engine(
            shape=self.shape, graphs=self.ways, synthetic=synthetic, overlap=self.overlap
        )


def add_setting_options(parser: argparse._ArgumentGroup) -> None:
    """An option of the command line for each field."""
    for each in fields(Setting):
        parser.add_argument(
            f"--{each.name.replace('_', '-')}", type=each.metadata["parse"], default=each.default,
            help=each.metadata["help"],
        )  # fmt: skip
