"""What the benchmarks share: the environment block, fair timing, the JSON that README names."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from piecewise_graph.bench.serving_report import environment, table

__all__ = [
    "RESULTS",
    "Mark",
    "Timing",
    "alternate",
    "alternate_host",
    "caches_in",
    "distance",
    "environment",
    "on_own_stream",
    "read_bandwidth",
    "table",
    "wait",
    "without_out",
    "write",
]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Mark:
    """A figure that was promised: met when `value <= limit`."""

    name: str
    value: float
    limit: float

    def as_row(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.value <= self.limit}


def write(
    path: Path,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    marks: Sequence[Mark],
    *,
    report: bool = True,
) -> None:
    """Write the results file and, with `report`, print the marks."""
    content = {
        "env": environment(),
        "command": command,
        "rows": list(rows),
        "marks": [mark.as_row() for mark in marks],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    for mark in content["marks"] if report else ():
        verdict = "met   " if mark["met"] else "MISSED"
        print(f"{verdict} {mark['name']}: {mark['value']:.4g} (limit {mark['limit']:.4g})")


def caches_in(folder: Path) -> dict[str, str]:
    """Environment of a process whose compilers keep their caches in `folder`."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def without_out(arguments: list[str], *places: str) -> list[str]:
    """Where the results go, and what lies at other `places`, is no part of what was measured."""
    for option in ("--out", *places):
        if option in arguments:
            place = arguments.index(option)
            arguments = arguments[:place] + arguments[place + 2 :]
    return arguments


@dataclass(frozen=True)
class Timing:
    """Median seconds of one side, with the quartiles as its spread."""

    median: float
    low: float
    high: float


def alternate(
    sides: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    repeat: int,
    warmups: int = 3,
    rounds_of: Mapping[str, int] | None = None,
    around: Callable[[str], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> dict[str, Timing]:
    """Wall time per call of each side, the sides taking turns in one process.

    The device is idle when a turn begins and when it ends, so host and device time both count.

    Args:
        rounds_of: side -> how many it has, where it takes part in the first ones only.
        around: what a side's warm-up and each of its turns lie in, beside the time that is taken.
    """
    for name, call in sides.items():
        with around(name):
            for _ in range(warmups):
                call()
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, call in sides.items():
            if rounds_of and turn >= rounds_of[name]:
                continue
            with around(name):
                taken[name].append(seconds_of(call, repeat))
    return {name: _timing(seconds) for name, seconds in taken.items()}


def seconds_of(call: Callable[[], Any], repeat: int = 1) -> float:
    """Seconds of one of `repeat` calls, the device idle before and after them."""
    wait()
    began = time.perf_counter()
    for _ in range(repeat):
        call()
    wait()
    return (time.perf_counter() - began) / repeat


def alternate_host(
    sides: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 2,
    warmups: int = 3,
    streams: Mapping[str, Any] | None = None,
) -> dict[str, Timing]:
    """Host time per call of each side, the sides taking turns: until a call returns, its device work running.

    A turn begins with an idle device and makes few calls, so that no launch waits for room in the queue.

    Args:
        streams: the CUDA stream of a side, where it is not the current one; switching is not timed.
    """
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(-1, rounds):  # the first warms up
        for name, call in sides.items():
            wait()
            with torch.cuda.stream((streams or {}).get(name)):
                for _ in range(warmups if turn < 0 else calls):
                    began = time.perf_counter()
                    call()
                    if turn >= 0:
                        taken[name].append(time.perf_counter() - began)
    wait()
    return {name: _timing(seconds) for name, seconds in taken.items()}


@contextmanager
def on_own_stream(grad_mode: Callable[[], Any] = torch.inference_mode) -> Iterator[None]:
    """Off the default stream, where graphs in a row would leave the device idle between them."""
    with (
        grad_mode(),
        torch.cuda.stream(torch.cuda.Stream() if torch.cuda.is_available() else None),
    ):
        yield


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of logits to those that were wanted, by their norm."""
    return float((found - wanted).norm() / wanted.norm())


def _timing(seconds: list[float]) -> Timing:
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else 3 * seconds
    return Timing(statistics.median(seconds), low, high)


def wait() -> None:
    """Until the device, if there is one, has done all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Bytes per second that memory of these GPUs delivers. Runs of the reduction below read 4.24e12 to 4.42e12 on
# an H200; the low ones would flatter every figure in times of a floor.
_DELIVERED = {"NVIDIA H200": 4.39e12}


def read_bandwidth(device: torch.device, size: int = 2**30) -> float:
    """Bytes per second of reading memory once: by a reduction of torch, or `_DELIVERED` if more."""
    if device.type == "cpu":
        return 1e10
    data = torch.randint(-8, 8, (size // 4,), dtype=torch.int32, device=device)
    best = _DELIVERED.get(torch.cuda.get_device_name(device), 0.0)
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            data.view(4096, -1).amax(1)
        end.record()
        end.synchronize()
        best = max(best, 10 * size / (start.elapsed_time(end) / 1e3))
    return best


def pyplot_if_there() -> Any:
    """matplotlib.pyplot, drawing to files; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
