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
    x, total, cells, peers, turns, late, told, size, rank, patience,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr, TIMED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One block: `total = sum of the ranks' x`, added in float32 in the order of ranks.

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
    word: tl.constexpr = cells.dtype.element_ty
    empty: tl.constexpr = -(2 ** (word.primitive_bitwidth - 1))  # the bits of -0.0
    program, column = tl.program_id(0), tl.arange(0, BLOCK)
    place = program * BLOCK + column
    inside = column >= 0 if EVEN else place < size
    turn = tl.load(turns + program)
    mine = (tl.load(x + place) if EVEN else tl.load(x + place, inside, other=0.0)).to(word, bitcast=True)
    mine = tl.where(mine == empty, 0, mine).to(word)
    first = program * 3 * RANKS * BLOCK + column
    now, before = first + turn % 3 * RANKS * BLOCK, first + (turn + 2) % 3 * RANKS * BLOCK
    for peer in tl.static_range(RANKS):
        there = cells + tl.multiple_of(tl.load(peers + peer), 16)
        tl.store(there + now + rank * BLOCK, mine)
    result = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(RANKS):
        bits = _arrived(cells + now + peer * BLOCK, peer, late, told, patience, empty, TIMED)
        result += bits.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        tl.store(cells + before + peer * BLOCK, tl.full([BLOCK], empty, word))
    if EVEN:
        tl.store(total + place, result.to(total.dtype.element_ty))
    else:
        tl.store(total + place, result.to(total.dtype.element_ty), inside)
    tl.store(turns + program, turn + 1)


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
