"""What a step costs the host, without what it waits for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch


def host_us(step: Callable[[], object], steps: int, event: type[Any] = torch.cuda.Event) -> float:
    """Median microseconds of a step, less those in which it stood in `event.synchronize`.

    A step that waits otherwise, for room in the device's queue for instance, has that counted.
    """
    waited = 0.0
    synchronize = event.synchronize

    def timed(self: Any) -> Any:
        nonlocal waited
        began = time.perf_counter()
        try:
            return synchronize(self)
        finally:
            waited += time.perf_counter() - began

    found = []
    with mock.patch.object(event, "synchronize", timed):
        for _ in range(steps):
            before, began = waited, time.perf_counter()
            step()
            found.append(time.perf_counter() - began - (waited - before))
    return median(found) * 1e6
