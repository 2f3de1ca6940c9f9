"""A Chrome trace of some steady steps: every request is in its rounds and none is finished.

A profiler names a phase (`verify`) and its kernels, and between them only `cudaGraphLaunch`. A PIECEWISE
phase makes one launch per segment, in order, so the launches within a phase are numbered and named here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from piecewise_graph.eagle.speculator import Speculator

from .drive import wait
from .errors import BenchError
from .load import Arrival
from .metrics import acceptance
from .setting import Setting

PHASES = ("draft", "verify", "draft-extend", "prompts")
LAUNCH = "cudaGraphLaunch"
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
STEPS = 16
_SETTLE, _PROFILER_WARM_UP = 3, 2
Event = Mapping[str, Any]


def trace(
    speculator: Speculator,
    setting: Setting,
    load: Sequence[Arrival],
    path: Path | None,
    *,
    steps: int = STEPS,
) -> int:
    """Write a trace of up to `steps` steps of the whole load at once; fewer if a request ends before.

    In the trace each step is a `round` with `draft`, `verify` and `draft-extend`; their graphs are numbered.

    Args:
        load: requests that run together. Each generates until `max_seq_len`; the end of its prompt is cut off
            if that leaves too few tokens for `steps` steps.
        path: None = run the steps and write nothing, as the ranks beside rank 0 do.

    Returns:
        steps in the trace.

    Raises:
        BenchError: a request ends before all of them are steady, or the system refuses the file.
    """
    with steady(speculator, setting, load, steps) as engine:
        recorded = _record(engine, speculator.device, len(load), path, steps)
    if not recorded:
        raise BenchError.nothing_steady(speculator.max_seq_len - _longest_prompt(speculator, setting, steps))
    return recorded


@contextmanager
def steady(speculator: Speculator, setting: Setting, load: Sequence[Arrival], steps: int) -> Iterator[Any]:
    """An engine in which the whole load is in its rounds, with room for `steps` steps; closed afterwards.

    Args:
        load, steps: as of `trace`.
    """
    longest, kept = speculator.max_seq_len, _longest_prompt(speculator, setting, steps)
    engine = setting.engine(speculator)
    try:
        requests = [
            engine.add_request(prompt, max_new_tokens=longest - len(prompt), sampling=setting.sampling)
            for prompt in (arrival.prompt[:kept] for arrival in load)
        ]
        while engine.unfinished and not all(request.tokens for request in requests):
            engine.step()
        for _ in range(_SETTLE):
            engine.step()
        yield engine
    finally:
        engine.close()


def _longest_prompt(speculator: Speculator, setting: Setting, steps: int) -> int:
    """Tokens of a prompt that leave room for `steps` steps."""
    tokens_per_round = 1 + max(shape.steps for shape in setting.shapes(page_size=1))
    return max(1, speculator.max_seq_len - (_SETTLE + _PROFILER_WARM_UP + steps) * tokens_per_round)


def _record(engine: Any, device: torch.device, running: int, path: Path | None, steps: int) -> int:
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
        wait(device)
        profiler.add_metadata_json("acceptance", json.dumps(acceptance(engine.synthetic_accept_length)))
    if path is None:
        return recorded
    with TemporaryDirectory() as folder:  # the profiler tells nobody that it could not write
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        content = json.loads(file.read_text(encoding="utf-8"))
    content["traceEvents"] += segment_events(content["traceEvents"])
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError as error:
        raise BenchError.unwritable("--trace", path, error) from error
    return recorded


def segment_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """An event per graph launch, on the host's row and on the device's, called `verify: segment 3`."""
    phases = [event for event in events if event.get("cat") == "user_annotation" and event["name"] in PHASES]
    launches = sorted((e for e in events if e.get("name") == LAUNCH), key=lambda event: event["ts"])
    numbers: Counter[int] = Counter()
    names: dict[Any, str] = {}
    made = []
    for launch in launches:
        phase = next((each for each in phases if _is_within(each, launch)), None)
        if phase is None:
            continue
        names[launch["args"]["correlation"]] = name = f"{phase['name']}: segment {numbers[id(phase)]}"
        numbers[id(phase)] += 1
        made.append(_named(name, [launch]))
    work: dict[Any, list[Event]] = {}  # launch -> what the device did for it
    for event in events:
        if event.get("cat") in WORK:
            work.setdefault(event.get("args", {}).get("correlation"), []).append(event)
    return made + [_named(names[key], done) for key, done in work.items() if key in names]


def _is_within(phase: Event, launch: Event) -> bool:
    """Whether the host made a launch in this phase."""
    return phase.get("tid") == launch.get("tid") and 0 <= launch["ts"] - phase["ts"] <= phase["dur"]


def _named(name: str, events: Sequence[Event]) -> dict[str, Any]:
    """One event from the first to the last, on the row of the first."""
    start = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    first = events[0]
    return {"ph": "X", "cat": "segment", "name": name, "pid": first["pid"], "tid": first["tid"],
            "ts": start, "dur": end - start}  # fmt: skip
