"""Which products of the library share a launch, kept in cache_dir (Note [One launch or two] in
library_products.py): later processes time nothing again, and round as this one does."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from piecewise_graph.compiler.disk_cache import Folder, read_private, write_private
from piecewise_graph.compiler.segment_key import surroundings
from piecewise_graph.kernels.linear import library_products

_FORMAT = 1


@contextmanager
def kept_products(cache_dir: Folder | None, devices: set[torch.device]) -> Iterator[None]:
    """What is timed on `devices` meanwhile is read from `cache_dir`, and left there."""
    if cache_dir is None:
        yield
        return
    keys = {device: "\n".join([f"products {_FORMAT}", *surroundings([device])]) for device in devices}
    known = {}
    for device, key in keys.items():
        _remember(device, read_private(cache_dir, _file_name(key)), key)
        known[device] = library_products.timed_on(device)
    yield
    for device, key in keys.items():
        found = library_products.timed_on(device)
        if found != known[device]:
            content = json.dumps({"key": key, "one_launch": found})
            write_private(cache_dir, _file_name(key), content.encode())


def _remember(device: torch.device, content: bytes | str | None, key: str) -> None:
    """A bad file costs timings, no more."""
    try:
        found = json.loads(content) if isinstance(content, bytes) else {}
        if found.get("key") == key:
            library_products.remember(device, found["one_launch"])
    except (ValueError, TypeError, AttributeError, KeyError):
        return


def _file_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest() + ".products"
