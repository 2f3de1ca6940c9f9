"""Which products of the library share a launch, kept in cache_dir (Note [One launch or two] in
library_products.py): later processes time nothing again, and round as this one does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from piecewise_graph.compiler.disk_cache import Folder, read_measured, write_measured
from piecewise_graph.compiler.segment_key import surroundings
from piecewise_graph.kernels.linear import library_products

_FORMAT, _SUFFIX = 1, ".products"


@contextmanager
def kept_products(cache_dir: Folder | None, devices: set[torch.device]) -> Iterator[None]:
    """What is timed on `devices` meanwhile is read from `cache_dir`, and left there."""
    if cache_dir is None:
        yield
        return
    keys = {device: "\n".join([f"products {_FORMAT}", *surroundings([device])]) for device in devices}
    known = {}
    for device, key in keys.items():
        # A bad file costs timings, no more.
        with suppress(ValueError, TypeError, AttributeError, KeyError):
            library_products.remember(device, read_measured(cache_dir, key, _SUFFIX)["one_launch"])
        known[device] = library_products.timed_on(device)
    yield
    for device, key in keys.items():
        found = library_products.timed_on(device)
        if found != known[device]:
            write_measured(cache_dir, key, _SUFFIX, one_launch=found)
