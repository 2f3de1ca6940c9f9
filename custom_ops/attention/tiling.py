"""How the Triton kernel cuts a batch into tiles, from shapes and bounds that the host knows.

Note [Splits]
The device cuts the tokens of a batch into about `target` work items (per KV head) of equal size. No item is
smaller than `min_tiles` tiles, and each request gets at least one per row block. So whatever the lengths are,
there are at most `target` items plus one per row block. That many programs are launched.
Requests of equal length get equally many items. So `target` is a multiple of the row blocks, chosen such that
the programs fill whole rounds of those that run at a time. A last round that is half empty would read memory
at half the speed.

Note [One order]
In deterministic calls the sums over a row's tokens have one order, whatever batch the row is in. Tiles have
one size, begin at multiples of it, and are not split over programs. The same code computes all of them: with
no mask in between, a compiler may fuse a multiplication with the subtraction after it. A tile that a row sees
nothing of changes nothing. Few requests with long contexts then leave most multiprocessors idle.

Note [Shared memory beside one row]
Linears of one row read their weight through the first-level cache. Beside an attention kernel that has most
of a multiprocessor's memory kept for it they lost up to a fifth of their speed (Llama-3-8B, one request: a
step of 3.92 ms became 4.15). So large tiles have no more set aside than they take (Note [First-level cache]
in launch.py): the same step took 3.87 ms. With up to 16 query heads per KV head, and heads of up to 128
elements, other tiles of one row take less than 48 KiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import triton

from .call import Traits


class Tile(NamedTuple):
    """Tokens that a program computes at a time, and what it takes for that.

    Attributes:
        block_n: tokens.
        resident: programs per multiprocessor that splits are made for. In decode so many run at a time; for
            more rows registers may hold fewer.
        set_aside: programs that shared memory is kept for (Note [Shared memory beside one row]); 0 = all of
            it, where one takes more than 48 KiB.
    """

    block_n: int
    warps: int
    stages: int
    resident: int
    set_aside: int = 0


@dataclass(frozen=True)
class Tiling:
    """Constants of a variant of the kernel.

    Attributes:
        block_m: packed rows (rows x query heads of one KV head) per tile.
        split: a request's tokens may be split over programs.
        unmasked: tiles that all rows see, most of a prefill, are computed without a mask; not with a window.
        rows, parts: packed rows and partial results that are combined at a time.
    """

    block_m: int
    tile: Tile
    split: bool
    unmasked: bool
    rows: int
    parts: int


@dataclass(frozen=True)
class TiledBatch:
    """A tiling, and what follows from the batch's bounds.

    Attributes:
        items: work items per KV head to launch programs for.
        target, min_tiles: see Note [Splits].
        partials, counters: numbers in the workspace.
    """

    tiling: Tiling
    items: int
    target: int
    min_tiles: int
    partials: int
    counters: int


@lru_cache(maxsize=1024)
def tile_batch(
    traits: Traits, requests: int, num_tokens: int, max_query_len: int, span: int, processors: int,
    *, large: bool = False, apart: bool = False,
) -> TiledBatch:  # fmt: skip
    """Tiling and number of programs.

    Args:
        span: upper bound of the tokens that the rows of one request see.
        processors: multiprocessors of the GPU.
        large: tiles may be large. Not for batches of prompts, which so have one variant less, nor on GPUs
            with less memory than those that were measured.
        apart: pages of K do not lie side by side, nor those of V.
    """
    dim, group, itemsize = triton.next_power_of_2(traits.head_dim), traits.group, traits.dtype.itemsize
    packed = _INVARIANT_ROWS if traits.deterministic else max(max_query_len, 1) * group
    block_m = _block_m(packed, group, dim, itemsize)
    block_q = block_m // group
    each = -(-max_query_len // block_q)
    blocks = max(min(requests * each, num_tokens // block_q + requests), 1)
    programs = blocks * traits.kv_heads / processors
    tile = _tile(block_m, dim * itemsize, itemsize, programs, large, num_tokens == 1, apart)
    min_tiles = max(_MIN_SPLIT // tile.block_n, 1)
    rows = min(triton.next_power_of_2(min(block_q, max_query_len) * group), 16, 4096 // dim)
    parts = max(min(_COMBINED * tile.warps // (rows * dim), 32), 1)
    # One tile more than the span fills: a window may begin within one.
    tiles = -(-span // tile.block_n) + 1
    max_splits = min(-(-tiles // min_tiles), parts + tiles // 16)  # as the kernel has it
    slots = max(processors * tile.resident // traits.kv_heads, 1)
    split = not traits.deterministic and span > _MIN_SPLIT and (block_m <= 32 or blocks < slots)
    target = blocks * _splits(blocks, slots, max_splits)
    items = min(blocks * max_splits, blocks + target) if split else blocks
    unmasked = block_m >= 64 and traits.window is None and not traits.deterministic
    rows, parts = (rows, parts) if split else (1, 1)  # one variant where nothing is combined
    tiling = Tiling(block_m, tile, split, unmasked, rows, parts)
    counters = items * traits.kv_heads if split else 1
    return TiledBatch(tiling, items, target, min_tiles, counters * block_m * (dim + 2), counters)


_INVARIANT_ROWS = 64  # packed rows per tile; see Note [One order]
_MIN_SPLIT = 128  # tokens; below, combining costs more than the split saves
_COMBINED = 2048  # floats of partial results in registers, per warp

# Programs that one multiprocessor runs at a time, by block_m: limited by registers and shared memory.
_RESIDENT = {16: 4, 32: 2, 64: 2, 128: 1}


def _splits(blocks: int, slots: int, max_splits: int) -> int:
    """Into how many splits row blocks of equal length are cut, when `slots` of them run at a time."""
    fill: dict[int, float] = {}
    for rounds in range(1, 5):
        splits = max(min(rounds * slots // blocks, max_splits), 1)
        fill.setdefault(splits, blocks * splits / (-(-blocks * splits // slots) * slots))
    enough = 0.9 * max(fill.values())
    return next(splits for splits, filled in fill.items() if filled >= enough)


def _block_m(packed: int, group: int, dim: int, itemsize: int) -> int:
    """Packed rows per tile: at least 16, which tensor cores need, and at most what is fast.

    A multiprocessor runs one program of 128 rows at a time, or two of 64. Those were faster with heads of 64,
    and with a KV head of its own for each query head, where decoding requests beside a prompt are many
    programs of one row each.
    """
    most = 32 if itemsize == 4 else 64 if dim <= 64 or group == 1 else 128
    block = next((block for block in (16, 32, 64) if packed <= block), 128)
    return max(min(block, most), triton.next_power_of_2(group))


def _tile(
    block_m: int, row_bytes: int, itemsize: int, programs: float, large: bool, one_row: bool, apart: bool
) -> Tile:
    """The fastest measured, on Hopper with heads of 64 and 128 elements, for few programs with 256 too.

    Decode wants small tiles, many of them in flight at a time; more rows want larger ones. Larger tiles and
    more warps make a single program faster. Decode and short verifications gain by that where `few` programs
    leave most multiprocessors idle, decode also where one or two programs on each are a round that is nearly
    full. It does not where K and V of a page lie together (16 or 32 requests of 4,096 tokens took 13 %
    longer). float32 stays on the ordinary units, whose operands take many registers.

    Args:
        row_bytes: of K, of one token and head, padding included.
        programs: per multiprocessor, where nothing is split.
        one_row: the batch has a single row, beside which twice as many programs are few.
        apart: as of `tile_batch`.
    """
    few, resident = programs <= 1 / 8, _RESIDENT[block_m]
    if itemsize == 4:
        return Tile(32 if block_m == 16 else 16, 8, 2, resident)
    if block_m == 16 and large and programs <= (1 / 4 if one_row else 1 / 8) and row_bytes in (256, 512):
        return Tile(32768 // row_bytes, 8, 3, resident=1, set_aside=1)
    is_full = large and not apart and 0.9 * math.ceil(programs) <= programs <= 2
    if block_m == 16 and row_bytes in (128, 256) and (few or is_full):
        return Tile(16384 // row_bytes, 8, 2 if few else 3, 2)
    if block_m == 16:
        return Tile(max(min(8192 // row_bytes, 64), 32), 4, 3, resident)
    if block_m == 32 and few:
        return Tile(max(min(16384 // row_bytes, 128), 32), 8, 3, resident)
    return Tile(64 if row_bytes <= 256 else 32, 8 if block_m == 128 else 4, 3, resident)
