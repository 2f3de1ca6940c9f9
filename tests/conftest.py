"""Fixtures that every test file may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from cheap_traces import make_traces_cheap
from hypothesis import HealthCheck, settings
from interpreter import INTERPRETED, make_interpreter_cheap
from torch import nn

import piecewise_graph as pg
from piecewise_graph.reasons import REMEDIES

# Inductor looks for the CPU's vector units by compiling and starting programs: seconds in every process.
# With this setting it believes the processor's own list.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Deterministic algorithms want it before the process's first matrix product on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# How long an example takes depends on what else the machine does.
settings.register_profile("piecewise", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("piecewise")

gc.collect()
make_traces_cheap()
if INTERPRETED:
    make_interpreter_cheap()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device; give slow ones a place that costs least."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items[:] = _slow_ones_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _slow_ones_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """In the part that each worker begins with: else the last of them would run while all others are idle."""
    if workers == 1:
        return items
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    size = -(-len(others) // workers)
    parts = ((slow[k::workers], others[k * size : (k + 1) * size]) for k in range(workers))
    return [item for first, then in parts for item in (*first, *then)]


@pytest.fixture(autouse=True)
def fresh_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test a process without traces, graphs, counts, options or random state of another test."""
    for variable in [name for name in os.environ if name.startswith("PIECEWISE_GRAPH_")]:
        monkeypatch.delenv(variable)
    torch._dynamo.reset()
    pg.reset()
    pg.counters.clear()
    torch.manual_seed(0)
    yield
    counted = {name.partition(":")[2] for name in pg.counters.snapshot() if ":" in name}
    torch._dynamo.reset()
    pg.reset()
    assert counted <= REMEDIES.keys(), "a reason without a remedy (piecewise_graph/reasons.py)"


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def no_grad() -> Iterator[None]:
    """Run the test without gradients, as inference does."""
    with torch.no_grad():
        yield


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    """Two residual blocks around a splitting op: three segments."""
    from toys import Blocks

    return Blocks(layers=2).to(device)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models with tiny matrices: on a busy machine, threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
