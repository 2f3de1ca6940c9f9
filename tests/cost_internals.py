"""Where tests look behind the API at what padding a batch costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from piecewise_graph.runtime import batches
from piecewise_graph.runtime.padding_cost import PaddingCost


@contextmanager
def batches_cost(
    monkeypatch: pytest.MonkeyPatch, replay: float | None, launch: float = 1.0, row: float = 1.0
) -> Iterator[list[int]]:
    """As if these seconds had been measured, on any device; None: nothing is measured, as on a CPU.

    Yields the rows of the calls that were timed.
    """
    timed: list[int] = []

    def measured(device: torch.device, padded: Any, exact: Any, rows: int) -> PaddingCost | None:
        if replay is None:
            return None
        timed.append(rows)
        padded(), exact()
        return PaddingCost(replay, launch, row)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "measured", measured)
        yield timed
