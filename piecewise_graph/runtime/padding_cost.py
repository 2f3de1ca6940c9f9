"""PaddingCost: what a padded batch costs beside the same call at its own sizes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

log = logging.getLogger(__name__)

_TURNS = 3
_CLEAR = 1.1  # a difference below a tenth is noise, and graphs of a call's own sizes take memory


@dataclass(frozen=True)
class PaddingCost:
    """Seconds of one forward of a padded batch, and of calls that would be padded to it.

    Attributes:
        replay: of the padded batch.
        launch: what the host takes to run a call without graphs, whatever its size.
        row: what the device takes for each row of such a call.
    """

    replay: float
    launch: float
    row: float

    def pays(self, rows: int) -> bool:
        """A call of that many rows is not clearly slower padded than without graphs."""
        return self.replay <= _CLEAR * max(self.launch, self.row * rows)


def measured(
    device: torch.device, padded: Callable[[], object], exact: Callable[[], object], rows: int
) -> PaddingCost | None:
    """Time both ways, by turns.

    None on a CPU, where nothing is launched and so nothing saved, and where one of them raises (there may be
    no memory for a call without graphs).

    Args:
        padded: replays the padded batch. Both are called several times.
        exact: runs a call that is padded to it, without graphs.
        rows: of that call, its requests times their tokens.
    """
    if device.type != "cuda":
        return None
    try:
        exact()  # it may load kernels
        turns = [(_seconds(device, padded), _seconds(device, exact)) for _ in range(_TURNS)]
    except Exception as error:  # whatever it is: the call itself has not begun
        log.info("padding a batch was not measured: %s", error)
        return None
    replay = min(total for (_, total), _ in turns)
    launch, total = (min(times) for times in zip(*(second for _, second in turns), strict=True))
    return PaddingCost(replay, launch, total / rows)


def _seconds(device: torch.device, run: Callable[[], object]) -> tuple[float, float]:
    """(until the host is done, until the device is)."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    launched = time.perf_counter()
    torch.cuda.synchronize(device)
    return launched - began, time.perf_counter() - began
