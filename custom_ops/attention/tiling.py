"""How the Triton kernel cuts a batch into tiles, from shapes and bounds that the host knows.

Note [Splits]
The device cuts the tokens of a batch into about `target` work items (per KV head) of equal size, none
smaller than `min_tiles` tiles, and each request gets at least one per row block. So there are never more than
`target` plus the number of row blocks, whatever the lengths are: that many programs are launched.
Requests of equal length get equally many items, so `target` is a multiple of the row blocks, chosen so that
the programs fill whole rounds of those that run at a time: a last round that is half empty reads memory at
half the speed.
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
    """What the plan depends on; `span` is the most tokens that the rows of one request may see."""

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
    dim = triton.next_power_of_2(problem.head_dim)
    block_m = _block_m(problem)
    block_q = block_m // problem.group
    each = -(-problem.max_query_len // block_q)
    blocks = max(min(problem.requests * each, problem.num_tokens // block_q + problem.requests), 1)
    lonely = blocks * problem.kv_heads * 8 <= problem.processors
    block_n, warps, stages = _tile(block_m, dim * problem.itemsize, problem.itemsize, lonely)
    min_tiles = max(_MIN_SPLIT // block_n, 1)
    rows = min(triton.next_power_of_2(min(block_q, problem.max_query_len) * problem.group), 16, 4096 // dim)
    parts = max(min(_COMBINED * max(warps, 4) // (rows * dim), 32), 1)
    # One tile more than the span fills: a window may begin within one.
    tiles = -(-problem.span // block_n) + 1
    most = min(-(-tiles // min_tiles), parts + tiles // 16)  # as the kernel has it
    slots = max(problem.processors * _PROGRAMS_EACH[block_m] // problem.kv_heads, 1)
    split = problem.span > _MIN_SPLIT and (block_m <= 32 or blocks < slots)
    target = blocks * _splits(blocks, slots, most)
    items = min(blocks * most, blocks + target) if split else blocks
    return Plan(Tiling(block_m, block_n, warps, stages, split, rows, parts), items, target, min_tiles)


_MIN_SPLIT = 128  # tokens; below, combining costs more than the split saves
_COMBINED = 2048  # floats of partial results in registers, per warp

# Programs that one multiprocessor runs at a time, by block_m: limited by registers and shared memory.
_PROGRAMS_EACH = {16: 4, 32: 2, 64: 2, 128: 1}


def _splits(blocks: int, slots: int, most: int) -> int:
    """Into how many splits row blocks of equal length are cut, when `slots` of them run at a time."""
    fill: dict[int, float] = {}
    for rounds in range(1, 5):
        splits = max(min(rounds * slots // blocks, most), 1)
        fill.setdefault(splits, blocks * splits / (-(-blocks * splits // slots) * slots))
    enough = 0.9 * max(fill.values())
    return next(splits for splits, filled in fill.items() if filled >= enough)


def _block_m(problem: Problem) -> int:
    """Packed rows per tile: 16 is the least that tensor cores take, and as many as fit into registers."""
    packed = max(problem.max_query_len, 1) * problem.group
    fits = 128 if problem.itemsize < 4 else 32
    block = next((block for block in (16, 32, 64) if packed <= block), 128)
    return max(min(block, fits), triton.next_power_of_2(problem.group))


def _tile(block_m: int, row_bytes: int, itemsize: int, lonely: bool) -> tuple[int, int, int]:
    """block_n, warps, stages: what was fastest among those that fit.

    Decode wants small tiles, of which many are on their way at a time; more rows want larger ones. Where
    there are programs for a few multiprocessors only, `lonely`, more warps make each faster. float32 stays on
    the ordinary units, whose operands take many registers.
    """
    if itemsize == 4:
        return 32 if block_m == 16 else 16, 8, 2
    if block_m == 16:
        return max(min(8192 // row_bytes, 64), 32), 4, 3
    warps = 8 if block_m == 128 or (block_m == 32 and lonely) else 4
    return 64 if row_bytes <= 256 else 32, warps, 3
