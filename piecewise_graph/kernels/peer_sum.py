"""The sum of a few rows over GPUs that write to each other's memory, in one launch.

Note [One shot]
A library's all-reduce of a few KiB takes longer for its own steps than for the transfer. Here every program
writes its block to all ranks, and adds up the blocks that the others have written to this one. That is one
crossing of the link. The data itself says that it is there: memory that waits for data holds -0.0, which no
rank sends (it sends 0.0 in its place). So there are no flags, and no order among stores matters.

(Waiting for a value that is never sent: the LL protocol of NCCL, and the Lamport all-reduce of TensorRT-LLM.)

Note [Three cells]
Each program has cells of its own, which take turns: call n uses cell n mod 3, and empties the one of call
n - 1, which this rank has read. A rank is in call n only when it has the data of call n - 1 of all others;
they then had ended call n - 2, in which they emptied the cell that call n writes to. Two cells would be too
few: a rank in call n - 1 still empties. Turns are counted in memory, so that a captured graph goes on
counting. They are equal on all ranks, because all make the same calls.

Note [Bounded]
A rank that died never writes. A program that has waited for too long gives up and says so in memory that the
host reads. From then on no program waits.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

from piecewise_graph.kernels.dependent import start_dependent


@triton.jit(do_not_specialize=["size", "rank", "patience"])
def sum_over_peers(
    x, total, size, cells, peers, turns, late, told, rank, patience,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, TIMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One block: `total = sum of the ranks' x`.

    Args:
        x, total: `[size]`, contiguous, of 16 or 32 bits.
        cells: this rank's, `[programs, 3, RANKS, BLOCK]` integers of x's width.
        peers: int64 `[RANKS]`, how many elements behind these each rank's cells lie; a multiple of 16.
        turns: int32 `[programs]`, calls so far.
        late: int32 `[1]`, 1 + the rank that was waited for in vain. told: the same, in memory of the host.
        patience: milliseconds that a program waits for a rank; thousands of looks where not TIMED.
        EVEN: BLOCK divides size.
    """
    start_dependent(DEPENDENT)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    mine = tl.load(x + place) if EVEN else tl.load(x + place, inside, other=0.0)
    result = _sum(mine, cells, peers, turns, late, told, rank, patience, RANKS, BLOCK, TIMED)
    if EVEN:
        tl.store(total + place, result.to(total.dtype.element_ty))
    else:
        tl.store(total + place, result.to(total.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["rank", "patience", "epsilon"])
def add_and_norm(
    x, residual, weight, hidden, normed, cells, peers, turns, late, told, rank, patience, epsilon,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One row: `hidden = residual + sum of the ranks' x`, `normed = weight * hidden / rms(hidden)`.

    It rounds where PyTorch does: the sum, `hidden`, and what `weight` is multiplied by.

    Args:
        x, residual, hidden, normed: `[rows, COLUMNS]`, contiguous; weight: `[COLUMNS]`; of one dtype.
        cells, peers, turns, late, told, rank, patience: see `sum_over_peers`.
        epsilon: added to the mean of squares.
        RANKS: with 1, x is the sum already, and memory of peers is not looked at.
        BLOCK: a power of two, COLUMNS or more.
    """
    start_dependent(DEPENDENT)
    column = tl.arange(0, BLOCK)
    place, inside = tl.program_id(0).to(tl.int64) * COLUMNS + column, column < COLUMNS
    mine = tl.load(x + place, inside, other=0.0)
    added = tl.load(residual + place, inside, other=0.0)
    scale = tl.load(weight + column, inside, other=0.0)
    kind: tl.constexpr = mine.dtype
    if RANKS > 1:
        mine = _sum(mine, cells, peers, turns, late, told, rank, patience, RANKS, BLOCK, TIMED).to(kind)
    row = (added.to(tl.float32) + mine.to(tl.float32)).to(kind)
    wide = row.to(tl.float32)
    unit = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / COLUMNS + epsilon)).to(kind)
    tl.store(hidden + place, row, inside)
    tl.store(normed + place, (scale.to(tl.float32) * unit.to(tl.float32)).to(kind), inside)


@triton.jit
def _sum(
    mine, cells, peers, turns, late, told, rank, patience,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """What this program's `mine` is on all ranks, added in float32 in the order of ranks."""
    word: tl.constexpr = cells.dtype.element_ty
    empty: tl.constexpr = -(2 ** (word.primitive_bitwidth - 1))  # the bits of -0.0
    kind: tl.constexpr = mine.dtype
    program = tl.program_id(0)
    turn = tl.load(turns + program)
    bits = mine.to(word, bitcast=True)
    bits = tl.where(bits == empty, 0, bits).to(word)
    first = program * 3 * RANKS * BLOCK + tl.arange(0, BLOCK)
    now, before = first + turn % 3 * RANKS * BLOCK, first + (turn + 2) % 3 * RANKS * BLOCK
    for peer in tl.static_range(RANKS):
        there = cells + tl.multiple_of(tl.load(peers + peer), 16)
        tl.store(there + now + rank * BLOCK, bits)
    result = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        bits = _arrived(cells + now + peer * BLOCK, peer, late, told, patience, empty, TIMED)
        result += bits.to(kind, bitcast=True).to(tl.float32)
        tl.store(cells + before + peer * BLOCK, tl.full([BLOCK], empty, word))
    tl.store(turns + program, turn + 1)
    return result


@triton.jit
def _arrived(cell, peer, late, told, patience, empty: tl.constexpr, TIMED: tl.constexpr):
    """What `peer` has written to a cell, once it is there (Note [Bounded])."""
    bits = tl.load(cell, volatile=True)
    missing = tl.max((bits == empty).to(tl.int32), 0)
    if missing != 0:
        limit = tl.where(tl.load(late) == 0, patience, 0).to(tl.int64) * (1000000 if TIMED else 1000)
        began = cuda.globaltimer() if TIMED else tl.full([], 0, tl.int64)
        now = began
        while missing != 0:
            bits = tl.load(cell, volatile=True)
            missing = tl.max((bits == empty).to(tl.int32), 0)
            now = cuda.globaltimer() if TIMED else now + 1
            if (missing != 0) & (now - began > limit):
                missing = 0
                tl.store(late, peer + 1)
                tl.store(told, peer + 1)
    return bits
