"""A trace that cannot be split."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.telemetry import count_fallback


class UnsplitRuntime:
    """Runs a trace that cannot be split, compiled as one, and counts why.

    Args:
        run: the whole graph, compiled.
        reason: why it was not split.
        bound: its weights, by which `explain` finds it.
    """

    def __init__(
        self, run: Callable[..., Any], reason: str, state: ModelState, bound: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.run, self.blocked, self.state = run, reason, state
        self.fallbacks: Counter[str] = Counter()
        self.bound = {index: weakref.ref(tensor) for index, tensor in bound}
        state.add(self)

    def __call__(self, *args: Any) -> Any:
        self.state.channel.admitted()
        count_fallback(self.fallbacks, self.blocked)
        return self.run(*args)

    def drop_graphs(self) -> None:
        """It has none."""

    def served(self) -> dict[str, int]:
        """It has no graphs."""
        return {}

    def to_plan(self, number: int) -> None:
        """It is never captured."""
