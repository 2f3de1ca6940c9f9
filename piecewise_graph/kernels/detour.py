"""Detour: what a caller on CUDA's default stream enqueues runs on another stream, in order with the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

SetStream = Callable[[torch.cuda.Stream], Callable[[], None]]


class Detour:
    """From the default stream of a device to another one of it, and back.

    Args:
        stream: where calls run.
        setter: stream -> a function that makes it the current one, and its device the current device.
        current_device: tells the index of the current device.
    """

    def __init__(
        self, stream: torch.cuda.Stream, setter: SetStream, current_device: Callable[[], int]
    ) -> None:
        self._stream, self._default = stream, torch.cuda.default_stream(stream.device)
        self._before, self._after = torch.cuda.Event(), torch.cuda.Event()
        self._enter, self._leave = setter(self._stream), setter(self._default)
        self._device, self._current_device = stream.device_index, current_device

    def run(self, calls: Iterable[Callable[[], object]]) -> None:
        """Make `calls` in order. The caller is on the default stream."""
        self._before.record(self._default)
        self._before.wait(self._stream)
        device = self._current_device()
        self._enter()
        try:
            for call in calls:
                call()
        finally:
            self._leave()
            if device != self._device:
                torch.cuda.set_device(device)
            self._after.record(self._stream)
            self._after.wait(self._default)
