"""Run a function in several processes that form a process group, and collect what each returns."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from cheap_traces import make_traces_cheap
from torch import distributed

# Processes are forked from one that has loaded what tests import: to load it takes seconds, to fork does not.
# Inductor makes its pool of processes when it compiles and not when it is loaded: a pool cannot be shared.
os.environ.setdefault("TORCH_WARM_POOL", "0")
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([
    "hypothesis", "piecewise_graph.custom_ops.kv_cache", "piecewise_graph.eagle.speculator", "pytest",
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.tensor.parallel",
    "transformers.generation.utils", "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
])  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """What became of the function on one rank; `value` is None where it raised, or its process died.

    Attributes:
        error: the exception's type and text.
        seconds: until it returned or raised.
    """

    value: Any
    error: str | None
    seconds: float


def on_ranks(
    count: int, function: Callable[..., Any], *args: Any, within: float = 120.0, backend: str = "gloo"
) -> list[Answer]:
    """The answers of `function(*args)` by rank, run in `count` processes of one group.

    Args:
        function: of a test module; what it returns is pickled.
        within: seconds; a process that takes longer is killed, and fails the test.
        backend: of the group; with "nccl" each rank has the GPU of its number.
    """
    # The modules that the fork server loads may initialise CUDA. A process forked after that cannot use CUDA.
    context = _CONTEXT if backend == "gloo" else multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(count)]
        shared = count, Path(folder) / "store", backend
        processes = [
            context.Process(target=_run, args=(rank, *shared, pipe, function, args))
            for rank, (_, pipe) in enumerate(pipes)
        ]
        for process, (_, pipe) in zip(processes, pipes, strict=True):
            process.start()
            pipe.close()
        until = time.monotonic() + within
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [process for process in processes if process.is_alive()]
        for process in late:
            process.kill()
        assert not late, f"{len(late)} of {count} ranks did not end within {within} seconds"
        return [_received(pipe) for pipe, _ in pipes]


def values(
    count: int, function: Callable[..., Any], *args: Any, within: float = 120.0, backend: str = "gloo"
) -> list[Any]:
    """The same, of a function that no rank fails in."""
    answers = on_ranks(count, function, *args, within=within, backend=backend)
    assert not any(answer.error for answer in answers), "\n".join(str(answer.error) for answer in answers)
    return [answer.value for answer in answers]


def _received(pipe: Connection) -> Answer:
    try:
        found: Answer = pipe.recv()
        return found
    except EOFError:
        return Answer(None, "died", 0.0)


def _run(
    rank: int,
    count: int,
    store: Path,
    backend: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    make_traces_cheap()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}  # as torchrun does
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count)
    began = time.monotonic()
    try:
        with torch.no_grad():
            answer = Answer(function(*args), None, time.monotonic() - began)
    except Exception as error:
        told = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        answer = Answer(None, told, time.monotonic() - began)
    pipe.send(answer)
    pipe.close()
    if answer.error is None:
        distributed.destroy_process_group()


@contextmanager
def only_on(rank: int, target: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """On this rank alone, `replacement` in the place of what `target` names; it gets the original first."""
    if distributed.get_rank() != rank:
        yield
        return
    module, _, name = target.rpartition(".")
    owner = __import__("pkgutil").resolve_name(module)
    original = getattr(owner, name)
    with mock.patch.object(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs)):
        yield
