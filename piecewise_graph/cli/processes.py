"""Processes of a command that runs one model on several GPUs (`--tp`): started, joined, ended.

A command that needs several starts itself once per GPU, by torchrun. Each of them reads all options again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed

import piecewise_graph as pg

from .errors import CommandError
from .loading import named_device

_GRACE = 15.0  # seconds that torchrun has to end its ranks
_PATIENCE = timedelta(hours=2)  # ranks read large models from one disk at very different speeds


def is_rank() -> bool:
    """Whether torchrun, or another launcher, started this process as one of several."""
    return distributed.is_available() and distributed.get_node_local_rank(-1) >= 0


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return not is_rank() or distributed.get_node_local_rank() == 0


def check_processes(count: int, device: str) -> None:
    """See that `count` processes can have a device each.

    No GPU is touched: the memory that this takes would lie there as long as the ranks run.

    Raises:
        CommandError: they cannot.
    """
    try:
        kind, index = torch.device(device).type, torch.device(device).index
    except RuntimeError as error:
        raise CommandError.no_device(device, error) from error
    if kind == "cuda" and index is not None:
        raise CommandError.one_gpu(device, count)
    if kind == "cuda" and count > torch.cuda.device_count():
        raise CommandError.few_gpus(count, torch.cuda.device_count())
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if kind == "cpu" and accelerator is not None:
        raise CommandError.hidden_accelerator(device, count, accelerator.type)
    if kind != "cuda":
        named_device(device)


def start(count: int, arguments: Sequence[str]) -> int:
    """Run `python -m piecewise_graph` with these arguments in `count` processes on this host.

    Returns:
        the exit status, once all have ended; not 0 if one of them failed.
    """
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    process = subprocess.Popen([sys.executable, "-m", *torchrun, "-m", "piecewise_graph", *arguments])
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # from a terminal torchrun has it too, and ends the ranks
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_GRACE)
                process.terminate()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def joined(count: int, device: str) -> Iterator[None]:
    """Inside, the `count` processes are a group, each with a GPU of its own where `device` is "cuda".

    Raises:
        CommandError: there is no group, or it has another number of processes.
    """
    made = is_rank() and not distributed.is_initialized()
    if made:
        _join(device)
    if is_rank() and distributed.get_world_size() != count:
        raise CommandError.other_count(count, distributed.get_world_size())
    if not is_first():
        from transformers.utils import logging

        logging.disable_progress_bar()
    yield
    if made:  # not after an error: other ranks may still be in a collective
        pg.reset()  # a group whose collectives lie in a graph would not end
        distributed.destroy_process_group()


def _join(device: str) -> None:
    own = None
    if torch.device(device).type == "cuda":
        own = torch.device("cuda", distributed.get_node_local_rank())
    try:
        if own is not None:
            torch.cuda.set_device(own)
        distributed.init_process_group("gloo" if own is None else "nccl", timeout=_PATIENCE, device_id=own)
    except (RuntimeError, ValueError) as error:  # torch has no other for a variable that is not set
        raise CommandError.no_group(error) from error
