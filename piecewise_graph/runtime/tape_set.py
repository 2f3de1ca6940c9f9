"""What a trace has captured: tapes by bucket, one set per mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from piecewise_graph.context import ForwardContext
from piecewise_graph.recorder.tape import BoundTape, ReplayTape
from piecewise_graph.runtime.captured_context import CapturedContext
from piecewise_graph.runtime.dispatch import Captured
from piecewise_graph.runtime.model_state import Family
from piecewise_graph.telemetry import counters


@dataclass(frozen=True)
class Tape:
    """A recorded bucket and what recording it cost.

    Attributes:
        context: what a full graph was captured under; None when piecewise.
        planned_bytes: what pg.plan said of `graph_bytes`; None where it was not asked, or when full.
    """

    tape: ReplayTape
    seconds: float
    graph_bytes: int
    context: CapturedContext | None = None
    planned_bytes: int | None = None


@dataclass(frozen=True)
class Ready:
    """A tape bound to a token count, and what a replay of it checks and counts."""

    bound: BoundTape
    context: CapturedContext | None
    bucket: int
    not_full: str | None
    checked: list[bool] = field(default_factory=list)  # one entry once its context was looked into

    def check(self, context: ForwardContext, num_tokens: int, *, always: bool) -> None:
        """Refuse a full graph under another context than the captured one; count its replay.

        Args:
            always: look into the context's objects in every replay, not in the first alone.
        """
        if self.context is not None:
            self.context.check(context, self.bucket, num_tokens, thorough=always or not self.checked)
            if not self.checked:
                self.checked.append(True)
            counters.add("full_replays")

    def stands_in(self, family: Family) -> bool:
        """It is piecewise only because no full graph was captured, and one may be captured now."""
        return self.not_full == "not_captured" and family.may_capture()


@dataclass(frozen=True)
class TapeSet:
    """What was captured in one mode: piecewise, or full with one key. Grows as buckets are captured."""

    tapes: dict[int, Tape] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    replays: Counter[int] = field(default_factory=Counter)

    def captured(self, unpaddable: Mapping[int, str]) -> Captured:
        proven = {bucket: entry.tape.proven for bucket, entry in self.tapes.items()}
        return Captured(proven, self.failed, unpaddable)
