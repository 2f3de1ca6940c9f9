"""What a trace has captured: tapes by bucket, one set per mode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piecewise_graph.dispatch import Captured
from piecewise_graph.tape import BoundTape, ReplayTape


@dataclass(frozen=True)
class Tape:
    """A recorded bucket and what recording it cost.

    Attributes:
        context: fields of the forward context that a full graph was captured with; None when piecewise.
    """

    tape: ReplayTape
    seconds: float
    graph_bytes: int
    context: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Ready:
    """A tape bound to a token count, and what a replay of it checks and counts."""

    bound: BoundTape
    context: Mapping[str, Any] | None
    bucket: int
    not_full: str | None


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
