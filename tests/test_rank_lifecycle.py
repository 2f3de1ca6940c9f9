"""Ranks that capture and let go of their graphs a thousand times hold no more than after a few times."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from ranks import values
from test_ranks import Summed, compiled_here, rows
from torch import Tensor

import piecewise_graph as pg
from piecewise_graph.ranks import exchange, peer_memory

MIB = 2**20
WARM = 50  # by then whatever is made once is made, and the allocator of the host has what it needs


def _held() -> dict[str, int]:
    """What a process holds. Threads of gloo let go of what they have summed a moment later."""
    time.sleep(0.5)
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.synchronize()
    objects = gc.get_objects()
    return {
        "tensors": sum(issubclass(type(each), Tensor) for each in objects),
        "objects": len(objects),
        "memories of peers": len(peer_memory._memories),
        "exchanges": exchange._ranks.cache_info().currsize,
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "host MiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") // MIB,
        "GPU MiB": torch.cuda.memory_reserved() // MIB if on_gpu else 0,
    }


def _grown(times: int, device: str) -> dict[str, int]:
    """By how much a rank's holdings grow while it captures two buckets and lets go of them, `times` times."""
    model = Summed().to(device)
    compiled, x, y = compiled_here(model), rows(3).to(device), rows(8).to(device)
    expected = [model(x), model(y)]

    def capture_and_release(count: int) -> None:
        for _ in range(count):
            for given, wanted in zip((x, y), expected, strict=True):
                for _ in ("captured", "replayed"):
                    torch.testing.assert_close(compiled(given), wanted)
            pg.reset()

    gc.freeze()  # pg.reset collects garbage: what torch has made by now need not be looked at each time
    with pg.counters.expect(captures=2 * (WARM + times), replays=2 * (WARM + times), fallbacks=0, traces=1):
        capture_and_release(WARM)
        before = _held()
        capture_and_release(times)
    return {name: count - before[name] for name, count in _held().items()}


def _assert_nothing_grows(times: int, device: str, backend: str) -> None:
    for grown in values(2, _grown, times, device, within=500.0, backend=backend):
        assert grown.pop("objects") < 50 and grown.pop("host MiB") <= 16 and grown.pop("GPU MiB") <= 16
        assert all(more <= 0 for more in grown.values()), grown


@pytest.mark.slow
def test_captures_and_releases_leave_nothing_behind() -> None:
    _assert_nothing_grows(150, "cpu", "gloo")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_captures_and_releases_on_gpus_leave_nothing_behind() -> None:
    _assert_nothing_grows(1000, "cuda", "nccl")
