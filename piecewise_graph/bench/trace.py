"""A Chrome trace of some steady steps: every request in its rounds, none of them finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from piecewise_graph.eagle.speculator import Speculator

from .errors import BenchError
from .load import Arrival
from .metrics import acceptance
from .segments import segment_events
from .settings import Setting

STEPS = 16
_SETTLE, _PROFILER_WARM_UP = 3, 2


def trace(
    speculator: Speculator, setting: Setting, load: Sequence[Arrival], path: Path, *, steps: int = STEPS
) -> int:
    """Write a trace of up to `steps` steps of the whole load at once; fewer where a request ends before.

    Each step is a `round` in it, with `draft`, `verify` and `draft-extend`; their graphs are numbered.

    Args:
        load: as many requests as shall run together; each gets all the tokens that there is room for, and
            gives up the end of its prompt where that makes room for more steps.

    Returns:
        steps in the trace.

    Raises:
        BenchError: requests end before anything is steady.
    """
    most = speculator.max_seq_len
    kept = max(1, most - (_SETTLE + _PROFILER_WARM_UP + steps) * _tokens_per_round(setting))
    engine, sampling = setting.engine(speculator), setting.sampling(0)
    try:
        requests = [
            engine.add_request(prompt, max_new_tokens=most - len(prompt), sampling=sampling)
            for prompt in (arrival.prompt[:kept] for arrival in load)
        ]
        while engine.unfinished and not all(request.tokens for request in requests):
            engine.step()
        for _ in range(_SETTLE):
            engine.step()
        recorded = _record(engine, speculator.device, len(requests), path, steps)
    finally:
        engine.close()
    if not recorded:
        raise BenchError.nothing_steady(most - kept)
    return recorded


def _tokens_per_round(setting: Setting) -> int:
    """At most."""
    steps = [shape.steps for shape in setting.shapes(page_size=1)]
    return 1 + max(steps)


def _record(engine: Any, device: torch.device, running: int, path: Path, steps: int) -> int:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    plan = schedule(wait=0, warmup=_PROFILER_WARM_UP, active=steps, repeat=1)
    recorded = 0
    with profile(activities=activities, schedule=plan) as profiler:
        for step in range(_PROFILER_WARM_UP + steps):
            if step:
                profiler.step()
            engine.step()
            if engine.unfinished < running:
                break
            recorded += step >= _PROFILER_WARM_UP
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        profiler.add_metadata_json("acceptance", json.dumps(acceptance(engine.synthetic_accept_length)))
    profiler.export_chrome_trace(str(path))
    _number_segments(path)
    return recorded


def _number_segments(path: Path) -> None:
    """Add the numbers of graphs to a trace file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    content["traceEvents"] += segment_events(content["traceEvents"])
    path.write_text(json.dumps(content), encoding="utf-8")
