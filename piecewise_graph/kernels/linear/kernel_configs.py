"""How a linear layer of a few rows may be computed: the candidates that are measured against each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

MAX_TOKENS = 64  # rows of x that every kernel serves
MANY_TOKENS = 128  # rows of x that a launch for several weights serves without cutting them in tiles
ALIGNMENT = 16  # columns; of a multiple of them the kernels load 16 bytes at a time
PROCESSORS = 132  # of an H100 or H200
_FULL = 0.8  # of the places of all rounds; between 0.75 and 0.82 of those measured
SHARED_MEMORY = 172032  # bytes that blocks without a ring take at most; Hopper has 232448
RING_TOKENS = 32  # rows of x that kernels with rings serve
# Bytes that a program's rings may take where one, two or three programs share a multiprocessor.
_ALONE, _HALF, _THIRD = 227 << 10, 113 << 10, 75 << 10
_STAGES = 10  # of a ring at most: the loop is unrolled by them


class KernelConfig(NamedTuple):
    """Blocks and launch of a kernel; an op takes it as a list of integers, empty = the library's kernel.

    Attributes:
        block_n: rows of the weight per program.
        block_k: columns per step and part.
        splits: parts into which the columns are cut (Note [Splits are summed by the reader]).
        warps: of 32 threads, per program.
        stages: loads in flight, of the kernel for several tokens.
        parts: of a step's columns, each for warps of its own; of the kernel for several tokens.
        ahead: lines of each row that are asked for before the kernel waits for the one before, where it does
            not read a whole tile; a power of 2.
        tile: rows of x per program; 0 = all of them.
        ring: 1 = of the kernel whose tiles begin to come before it waits (Note [Rings] in rings.py).
    """

    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int
    parts: int = 1
    ahead: int = 4
    tile: int = 0
    ring: int = 0

    @property
    def name(self) -> str:
        """Its fields as text, by which measured times are kept."""
        return " ".join(map(str, self))


PLAIN = KernelConfig(64, 128, 1, 4, 5)  # for up to MAX_TOKENS rows of x, where rings cannot serve them
# Blocks that serve any number of rows, each row alike, so that its sums have one order in all batches.
# Source: H. He, "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025).
INVARIANT = PLAIN._replace(tile=MAX_TOKENS)
IN_TILES = KernelConfig(128, 64, 1, 4, 5, tile=64)  # programs each compute some rows of x
_ONE_ROW = [KernelConfig(n, k, 1, 4, 1) for k in (1024, 2048) for n in (1, 2, 4, 8)]
_ONE_ROW += [KernelConfig(2, 512, 1, 4, 1), KernelConfig(1, 2048, 1, 8, 1)]
_ONE_ROW += [KernelConfig(n, 512, 4, 4, 1) for n in (1, 4)]
_FEW_ROWS = [KernelConfig(64, 128, splits, 4, s) for splits, s in ((1, 3), (1, 5), (2, 5), (4, 3), (4, 5))]
_FEW_ROWS += [KernelConfig(128, 128, *rest) for rest in ((1, 8, 3), (1, 4, 5), (2, 4, 5))]
_FEW_ROWS += [KernelConfig(64, 128, 1, 4, 7), KernelConfig(128, 64, 1, 4, 7)]
_FEW_ROWS += [KernelConfig(16, 128, 1, 4, s, parts=4, ahead=16) for s in (4, 5)]
_FEW_ROWS += [KernelConfig(16, 128, 1, 4, 4, parts=4)]
_FEW_ROWS += [KernelConfig(32, 128, 1, 4, 7, parts=2, ahead=16)]
_RINGS = ((16, 64, 4), (16, 128, 4), (32, 64, 4), (32, 128, 4), (64, 128, 1))  # rows, columns, parts


def candidates(tokens: int, rows: int, columns: int, *, rings: bool = False) -> list[KernelConfig]:
    """Configurations that can serve `x [tokens, columns]` and `weight [rows, columns]`, likely ones only.

    Args:
        rings: kernels with rings can be launched.
    """
    known = _ONE_ROW if tokens == 1 else _FEW_ROWS if tokens <= MAX_TOKENS else []
    if rings and 1 < tokens <= RING_TOKENS and columns % ALIGNMENT == 0:
        known = [*known, *rings_of(tokens)]
    fitting = (c for c in known if c.block_k * c.parts * c.splits <= columns and c.block_n <= rows)
    return [c for c in fitting if c.splits == 1 or rows // c.block_n * c.splits <= 16384]


def rings_of(tokens: int) -> list[KernelConfig]:
    """Blocks with rings, of which one, two or three fit a multiprocessor of Hopper."""
    made = [_ring(tokens, *block, room=room) for block in _RINGS for room in (_ALONE, _HALF, _THIRD)]
    return [config for config in made if config.stages > 2]


def ring_rows(tokens: int) -> int:
    """Rows of x that a kernel with rings computes for so many."""
    return max(8, 1 << (tokens - 1).bit_length())


def _ring(tokens: int, block_n: int, block_k: int, parts: int, *, room: int) -> KernelConfig:
    """With as many stages as there is room for."""
    stage = (block_n + ring_rows(tokens)) * block_k * parts * 2
    return KernelConfig(block_n, block_k, 1, 4, min(room // stage, _STAGES), parts, ring=1)


def usual_config(
    tokens: int,
    rows: Sequence[int],
    columns: int,
    *,
    gated: bool = False,
    processors: int = PROCESSORS,
    rings: bool = False,
) -> KernelConfig | None:
    """What is fastest for weights `[rows[i], columns]`, as measured on Hopper; None: the library's kernel.

    Measured were the four launches of a layer in turn, as a decode step has them, of models from 0.4 to 14
    billion weights on 132 multiprocessors (bench_linears). Where blocks would leave many multiprocessors
    without one, in one round of them or in the last of several, they are smaller. The bounds lie between
    sizes that were measured.

    Args:
        gated: the weights are those of a SwiGLU.
        processors: multiprocessors of the device. With other counts the rules are not measured.
        rings: kernels with rings can be launched.
    """
    if columns % ALIGNMENT:
        return None
    if tokens == 1 and min(rows) > 1 and columns >= 512:
        return _of_one_row(rows, columns, processors)
    if columns < 128 or sum(rows) < 512:
        return None
    if rings and 1 < tokens <= RING_TOKENS:
        return _of_ring(tokens, rows, columns, gated, processors)
    if tokens > MANY_TOKENS:
        return _in_tiles(tokens, rows, columns, processors) if len(rows) > 1 and not gated else None
    if tokens > MAX_TOKENS:
        return _of_many_tokens(sum(rows), columns, gated, processors) if len(rows) > 1 else None
    if gated and sum(rows) >= 32 * processors:
        return _of_swiglu(tokens, sum(rows), columns, processors)
    if tokens > 32 and len(rows) == 1 and rows[0] <= min(32 * processors, columns // 2):
        return None  # few blocks of long rows: cuBLAS cuts the columns, so that it has more of them
    in_parts = _in_parts(tokens, rows, processors) if columns >= 512 and tokens <= 32 else None
    return in_parts or KernelConfig(64, 128, 1, 4, _stages(tokens))


def _of_one_row(rows: Sequence[int], columns: int, processors: int) -> KernelConfig:
    """A program's registers hold its first tile: those of all programs together much of a small weight.

    Where all programs can be resident, tiles have 2048 columns: eight of 16 KiB fit a multiprocessor, or
    twelve of 8 KiB. These fill it better where there are at most 24 rows for it, and a program has few steps.
    Large weights are cut into tiles of 1024 columns. Of short columns one tile has all.
    """
    if columns < 2048:
        return KernelConfig(4, 1024 if columns <= 1024 else 2048, 1, 4, 1)
    if sum(rows) > 32 * processors:
        return KernelConfig(2 if sum(rows) > 64 * processors else 4, 1024, 1, 4, 1)
    smaller = sum(rows) <= 24 * processors and columns <= 4096
    return KernelConfig(2 if smaller else 4, 2048, 1, 4, 1)


def _of_ring(tokens: int, rows: Sequence[int], columns: int, gated: bool, processors: int) -> KernelConfig:
    """Blocks of 16 or 32 rows where those of 64 would be less than one round, or, in parts, read faster.

    What comes after the linears of an attention's input are short kernels. They begin early if there is room.
    """
    if columns < 512:  # a step of blocks in parts
        return _ring(tokens, 64, 128, 1, room=_HALF)
    count, long = sum(rows), columns >= 4096
    if count <= 32 * processors:
        if len(rows) > 1 and not gated:
            block = (32, 64) if tokens <= 8 else (16, 128) if tokens <= 16 else (16, 64)
            return _ring(tokens, *block, 4, room=_HALF)
        if long and count <= 16 * processors:
            return _ring(tokens, 16, 64 if tokens <= 8 else 128, 4, room=_ALONE)
        return _ring(tokens, 32, 128 if tokens <= 16 else 64, 4, room=_ALONE)
    if count <= 64 * processors:
        return _ring(tokens, 32, 64, 4, room=_HALF)
    if long and tokens <= 8:
        return _ring(tokens, 16, 64, 4, room=_THIRD)
    return _ring(tokens, 64, 128, 1, room=_HALF)


def _of_swiglu(tokens: int, rows: int, columns: int, processors: int) -> KernelConfig:
    """Blocks of 128 rows, unless they need several rounds and leave a fifth of these rounds' places empty.

    Then blocks are smaller, or pairs of them share a multiprocessor: its memory holds four stages of each.
    Where columns are long, blocks are smaller for 17 to 32 rows of x as well.
    """
    blocks = -(-rows // 128)
    rounds = -(-blocks // processors)
    idle, long = rounds > 1 and blocks < _FULL * rounds * processors, columns >= 4096
    if tokens > 16 and idle and rounds == 2 and not long:
        return KernelConfig(128, 64, 1, 4, 4)
    smaller = tokens <= 32 and (idle or (long and tokens > 16))
    block_n, block_k = (64, 128) if smaller else (128, 64)
    return KernelConfig(block_n, block_k, 1, 4, _stages(tokens))


def _of_many_tokens(rows: int, columns: int, gated: bool, processors: int) -> KernelConfig | None:
    """Only where one launch replaces several: a single product of cuBLAS reads x less often than ours.

    Measured with 128 rows of x on an H200. Blocks of 64 rows are at most one round, as are those of 128 for
    larger weights. Those of a SwiGLU have 128 rows and are at most two rounds. Where two rounds leave a fifth
    of their places empty, pairs of blocks share a multiprocessor, whose memory holds three stages of each.
    Few blocks of long rows are cuBLAS's, which cuts the columns.
    """
    block_n = 128 if gated or rows > 64 * processors else 64
    blocks = -(-rows // block_n)
    if blocks > (2 if gated else 1) * processors or (columns > 4096 and 2 * blocks < processors):
        return None
    if block_n == 64:
        return KernelConfig(64, 64, 1, 4, 6)
    paired = processors < blocks < _FULL * 2 * processors
    return KernelConfig(128, 64, 1, 4, 3 if paired else 5)


def _in_tiles(tokens: int, rows: Sequence[int], columns: int, processors: int) -> KernelConfig | None:
    """Only where one launch replaces several, and all its programs run at once.

    Measured with 256 and 512 rows of x on an H200, beside cuBLAS with one launch for two small weights. With
    two rounds of programs ours is slower, and so it is with larger tiles and for a SwiGLU. Few blocks of long
    rows are cuBLAS's, as with fewer rows of x.
    """
    programs = _blocks(IN_TILES, rows, False) * -(-tokens // IN_TILES.tile)
    few = columns > 4096 and 2 * programs < processors
    return None if few or programs > processors else IN_TILES


def larger_sizes(rows: Sequence[int], *, gated: bool, processors: int = PROCESSORS) -> list[int]:
    """Rows of x above MANY_TOKENS: one number for each choice that `usual_config` makes for these weights."""
    if gated:
        return [MANY_TOKENS + 1]
    end = IN_TILES.tile * (processors // max(_blocks(IN_TILES, rows, gated), 1))
    return [end, end + 1] if end > MANY_TOKENS else [MANY_TOKENS + 1]


def _blocks(config: KernelConfig, rows: Sequence[int], gated: bool) -> int:
    return sum(-(-count // config.block_n) for count in ([sum(rows)] if gated else rows))


def _in_parts(tokens: int, rows: Sequence[int], processors: int) -> KernelConfig | None:
    """Blocks so small that one round of them, or of pairs that share a multiprocessor, fills the device."""
    if sum(rows) <= 16 * processors:
        return KernelConfig(16, 128, 1, 4, 5 if tokens <= 16 else 4, parts=4, ahead=16)
    if len(rows) > 1 or tokens > 16 or sum(rows) > 32 * processors:
        return None
    if sum(rows) <= 24 * processors:
        return KernelConfig(16, 128, 1, 4, 4, parts=4, ahead=16)
    return KernelConfig(32, 128, 1, 4, 7, parts=2, ahead=16)


def _stages(tokens: int) -> int:
    """As many as fit the shared memory."""
    return 7 if tokens <= 32 else 5


def is_config(text: str) -> bool:
    """Whether `text` is the name of one of the candidates."""
    return text in _names()


@cache
def _names() -> frozenset[str]:
    rings = [config for tokens in (8, 16, 32) for config in rings_of(tokens)]
    return frozenset(config.name for config in (*_ONE_ROW, *_FEW_ROWS, *rings))
