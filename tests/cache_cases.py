"""A model of one segment, compiled with a cache_dir, and the counters of a hit and of a miss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import assert_same, compiled, ops, rows

import piecewise_graph as pg
from piecewise_graph.compiler import disk_cache


def model(x: torch.Tensor) -> torch.Tensor:
    return ops.mix(x.sin() * 2 + 1)


def run(folder: Path, count: int = 5, **options: Any) -> Any:
    """A model of one segment, compiled anew as a new process would; returns what pg.compile returned."""
    torch._dynamo.reset()
    fast = compiled(model, **({"compiler": "inductor", "cache_dir": folder} | options))
    x = rows(count, torch.device("cpu"))
    assert_same(fast(x), model(x))
    return fast


def only_file(folder: Path, content: bytes | None = None) -> Path:
    if content is not None:
        file = folder / disk_cache.file_name(disk_cache.unpack(content).key)
        file.write_bytes(content)
        file.chmod(0o600)
    (file,) = folder.glob("*.segment")
    return file


def hit() -> Any:
    return pg.counters.expect(compiles=0, cache_hits=1, cache_misses=0, cache_rejected=0, cache_unsaved=0)


def missed(rejected: str | None = None, unsaved: str | None = None) -> Any:
    reasons = {f"cache_rejected:{rejected}": 1} if rejected else {}
    reasons |= {f"cache_unsaved:{unsaved}": 1} if unsaved else {}
    counts = {"cache_rejected": int(rejected is not None), "cache_unsaved": int(unsaved is not None)}
    return pg.counters.expect(compiles=1, cache_hits=0, cache_misses=1, **counts, **reasons)
