"""What a trace costs beside its own work, saved in each process that tests trace in."""

from __future__ import annotations

import gc
import logging

import torch._dynamo.guards


def make_traces_cheap() -> None:
    """To be called when torch has been loaded."""
    # pytest listens to loggers that do not hand on what they get. Torch's trace log is one, which describes
    # every tensor and guard of a trace as soon as somebody listens: a tenth of the time of all tests.
    logging.getLogger("torch.__trace").propagate = True

    # Behind each trace Dynamo collects garbage, and times the guards with the processor's caches flushed:
    # 20 ms.
    torch._dynamo.config.run_gc_after_compile = False
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

    # What torch has made by now stays: the collector need not look at it again and again.
    gc.freeze()
    # A trace makes objects by the hundred thousand. With Python's threshold, collection is a fifth of the
    # time.
    gc.set_threshold(100_000, 20, 20)
