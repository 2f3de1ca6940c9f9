"""How the Triton kernel cuts a batch into tiles, from shapes and bounds that the host knows.

Note [Splits]
The device cuts the tokens of a batch into about `target` work items (per KV head) of equal size, none
smaller than `min_tiles` tiles, and each request gets at least one per row block. So there are never more than
`target` plus the number of row blocks, whatever the lengths are: that many programs are launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton


@dataclass(frozen=True)
class Tiling:
    """Constants of a variant of the kernel.

    Attributes:
        block_m: packed rows (rows x query heads of one KV head) per tile.
        block_n: tokens per tile.
        split: a request's tokens may be split over programs.
        rows, parts: packed rows and partial results that are combined at a time.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    split: bool
    rows: int
    parts: int


@dataclass(frozen=True)
class Plan:
    """A tiling, and what follows from the batch's bounds.

    Attributes:
        items: work items per KV head to launch programs for.
        target, min_tiles: see Note [Splits].
    """

    tiling: Tiling
    items: int
    target: int
    min_tiles: int


@dataclass(frozen=True)
class Problem:
    """What the plan depends on; `span` is the most tokens that one row block may see."""

    group: int
    kv_heads: int
    head_dim: int
    itemsize: int
    requests: int
    num_tokens: int
    max_query_len: int
    span: int
    processors: int


@lru_cache(maxsize=1024)
def plan(problem: Problem) -> Plan:
    """Tiling and number of programs."""
    packed = problem.max_query_len * problem.group
    block_m = max(_block_m(packed), triton.next_power_of_2(problem.group))
    block_n, warps, stages = _tile(block_m, problem.head_dim, problem.itemsize)
    block_q = block_m // problem.group
    each = -(-problem.max_query_len // block_q)
    blocks = max(min(problem.requests * each, problem.num_tokens // block_q + problem.requests), 1)
    min_tiles = max(_MIN_SPLIT // block_n, 1)
    tiles = -(-problem.span // block_n)
    slots = problem.processors * _PROGRAMS_EACH.get(block_m, 1)
    most = (tiles + 1) // min_tiles  # splits of one row block; a window begins within a tile
    split = most > 1 and (block_m <= 32 or blocks * problem.kv_heads < slots)
    target = max(slots // problem.kv_heads, 1)
    items = min(blocks * max(most, 1), blocks + target) if split else blocks
    dim = triton.next_power_of_2(problem.head_dim)
    rows = min(triton.next_power_of_2(min(block_q, problem.max_query_len) * problem.group), 16, 4096 // dim)
    parts = max(min(_COMBINED // (rows * dim), 32), 1)
    tiling = Tiling(block_m, block_n, warps, stages, split, rows, parts)
    return Plan(tiling, items, target, min_tiles)


_MIN_SPLIT = 128  # tokens; below, combining costs more than the split saves
_PROGRAMS_EACH = {16: 4, 32: 3, 64: 2}  # programs that one multiprocessor runs at a time, by block_m
_COMBINED = 8192  # floats of partial results in registers, over all threads


def _block_m(packed: int) -> int:
    """Packed rows per tile: 16 is the least that tensor cores take."""
    return next((block for block in (16, 32, 64) if packed <= block), 128)


def _tile(block_m: int, head_dim: int, itemsize: int) -> tuple[int, int, int]:
    """block_n, warps, stages: what fits into registers and shared memory, and was fast."""
    wide = head_dim * itemsize > 256  # bytes of a row of K
    warps = 8 if block_m == 128 else 4
    if itemsize == 4:
        return 32, warps, 2
    return (32 if wide else 64), warps, 3
