"""Turns: the forwards of one graph pool run one after another, whatever threads and streams they come from.

Note [Callers on several streams]
A lock makes the forwards of several threads follow one another on the host, not on the device. Two streams
know nothing of each other, and the second forward would overwrite what the first one still reads. So the
stream of a caller waits for the stream of the caller before, if that is another one. A stream that is being
captured waits for nothing, because no graph of the pool runs in it.

Note [Forks]
A forked process has one thread, the one that forked. A lock that another thread held would stay locked for
ever, so the child takes a fresh one.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import torch


class Turns:
    """A context manager. Entering says whether this thread is inside already.

    A generator would cost each forward a microsecond more.

    Args:
        address_of: device -> the address of the caller's stream there.

    Attributes:
        address: of the stream whose turn it is; 0 is CUDA's legacy default stream.
    """

    __slots__ = ("__weakref__", "_address_of", "_depth", "_device", "_ordered", "_stream", "address", "lock")

    def __init__(self, address_of: Callable[[torch.device], int]) -> None:
        self._address_of = address_of
        self.address = 0
        self.lock = threading.RLock()
        self._depth = 0
        self._device: torch.device | None = None
        self._ordered: int | None = None  # address of the stream that had the latest turn
        self._stream: torch.cuda.Stream | None = None  # itself
        _all.add(self)

    @property
    def taken(self) -> bool:
        """A forward is under way."""
        return self._depth > 0

    def on(self, device: torch.device | None) -> None:
        """Order the streams of this GPU from now on; None = no streams."""
        self._device, self._ordered, self._stream = device, None, None
        if device is not None:
            self.address = self._address_of(device)
            self._follow(device)

    def __enter__(self) -> bool:
        self.lock.acquire()
        self._depth += 1
        if self._device is not None and self._depth == 1:
            self.address = self._address_of(self._device)
            if self.address != self._ordered:
                self._follow(self._device)
        return self._depth > 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self.lock.release()

    def _follow(self, device: torch.device) -> None:
        """Let the caller's stream wait (Note [Callers on several streams])."""
        if torch.cuda.is_current_stream_capturing():
            return
        current = torch.cuda.current_stream(device)
        if self._stream is not None:
            current.wait_stream(self._stream)
        self._ordered, self._stream = self.address, current

    def after_fork(self) -> None:
        """In the child. The thread that forked may itself be inside, and goes on."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
        else:
            self.lock, self._depth = threading.RLock(), 0


_all: weakref.WeakSet[Turns] = weakref.WeakSet()


def _after_fork() -> None:
    for turns in list(_all):
        turns.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
