"""A trace that cannot be split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from piecewise_graph.runtime.model_state import Family
from piecewise_graph.runtime.signals import TracedOnly
from piecewise_graph.telemetry import counters


class WholeRuntime:
    """Runs a trace that cannot be split, compiled as one, and counts why.

    Args:
        run: the whole graph, compiled.
        reason: why it was not split.
        bound: its weights, by which `explain` finds it.
    """

    def __init__(
        self, run: Callable[..., Any], reason: str, family: Family, bound: Sequence[tuple[int, Tensor]]
    ) -> None:
        self.run, self.reason, self.family = run, reason, family
        self.fallbacks: Counter[str] = Counter()
        self.bound_ids = frozenset(id(tensor) for _, tensor in bound)
        family.add(self)

    def __call__(self, *args: Any) -> Any:
        if self.family.tracing:
            raise TracedOnly
        self.family.ran += 1
        counters.add("fallbacks", reason=self.reason)
        self.fallbacks[self.reason] += 1
        return self.run(*args)

    def drop_graphs(self) -> None:
        """It has none."""
