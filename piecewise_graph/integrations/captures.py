"""How plugins capture: a size that cannot be captured costs itself."""

from __future__ import annotations

from collections.abc import Sequence
from logging import Logger
from typing import Any

import piecewise_graph as pg
from piecewise_graph.errors import CaptureError


def capture_sizes(
    compiled: Any, part: str, sizes: Sequence[int], make_inputs: Any, log: Logger, **options: Any
) -> Any:
    """`pg.capture`, and its report; what was not captured is logged, and its calls run compiled, counted.

    Args:
        part: what the log calls the model.
        options: of pg.capture.
    """
    try:
        report = pg.capture(compiled, make_inputs, sizes=sizes, **options)
    except CaptureError as error:
        log.warning("%s model, %s tokens: not captured: %s", part, list(sizes), error)
        return None
    for size, why in report.failed.items():
        log.warning("%s model, %d tokens: not captured: %s", part, size, why)
    return report
