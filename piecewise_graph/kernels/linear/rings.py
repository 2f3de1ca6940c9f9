"""Linear layers of 2 to 32 rows on Hopper, in Gluon: Triton's dialect whose programs place their data.

Note [Rings]
Tiles of the weight and of x come by asynchronous copies into shared memory, STAGES steps ahead of the
products. Triton's own pipeline asks for both side by side, so a weight comes no earlier than x. Here the
first STAGES tiles of a weight that may be read early are asked for before the kernel waits for the one
before, and those of x after it (Note [Weight first] in linear_kernels.py). The programs of the next kernel
begin early only where shared memory is left, so the rings of large weights take no more than half of it.

A slot of a ring is filled again one step after its products: the barrier of that step tells that all warps
are done with it. The loop is unrolled by slots, each an allocation of its own: so Triton knows that a copy
into one touches no other, and adds no barriers.

With one part, products are those of a warpgroup, whose left side is 64 rows of the weight. Blocks of fewer
rows have as many PARTS of columns as warps: each warp multiplies its own, and the sums are added in the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def _let_dependents_start():
    """As in dependent.py; Gluon has no name for it."""
    _control("griddepcontrol.launch_dependents; mov.u32 $0, 0;")


@gluon.jit
def _wait():
    _control("griddepcontrol.wait; mov.u32 $0, 0;")


@gluon.jit
def _control(CODE: gl.constexpr):
    """An instruction that no access to memory is moved across."""
    gl.inline_asm_elementwise(CODE, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _ring(like, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    ring = ()
    for _ in gl.static_range(STAGES):
        ring = ring + (gl.allocate_shared_memory(like.dtype.element_ty, SHAPE, LAYOUT),)  # type: ignore[assignment]  # noqa: RUF005
    return ring


@gluon.jit
def _copy_weight(slot, pointers, k, first, columns, EVEN: gl.constexpr):
    if EVEN:
        async_copy.async_copy_global_to_shared(slot, pointers + first)
    else:
        async_copy.async_copy_global_to_shared(slot, pointers + first, mask=first + k < columns)


@gluon.jit
def _copy_x(slot, pointers, there, k, first, columns, EVEN: gl.constexpr):
    mask = there if EVEN else there & (first + k < columns)
    async_copy.async_copy_global_to_shared(slot, pointers + first, mask=mask)


@gluon.jit
def _rows_of(local, weights, first, rows, columns, BLOCK_N: gl.constexpr, GATED: gl.constexpr):
    """Pointers to a block's rows of the weight. Rows past the last one are the last one again.

    `weights`: gate and up where GATED, whose block is as many rows of the one and of the other.
    """
    if GATED:
        n = gl.minimum(first + local % (BLOCK_N // 2), rows - 1).to(gl.int64)
        return gl.where(local < BLOCK_N // 2, weights[0], weights[1]) + n * columns
    else:
        return weights[0] + gl.minimum(first + local, rows - 1).to(gl.int64) * columns


@gluon.jit
def begin(
    x,
    weights,
    first,
    rows,
    early,
    tokens,
    columns,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
    GATED: gl.constexpr,
):
    """Asks for the first tiles, and waits before those of x; without `early` before those of the weight too.

    Returns rings of weight and x, pointers to the first tile of each, its columns, which rows of x there are.
    """
    _let_dependents_start()
    if early == 0:
        _wait()
    WARPS: gl.constexpr = gl.num_warps()
    LANES: gl.constexpr = BLOCK_K // 8  # along a row, 16 bytes each; at most 32
    kind: gl.constexpr = x.dtype.element_ty
    if PARTS == 1:
        copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
        of_weight: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], kind)
        of_x: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, BLOCK_K], kind)
        ring = _ring(x, [BLOCK_N, BLOCK_K], of_weight, STAGES)
        ring_of_x = _ring(x, [TOKENS, BLOCK_K], of_x, STAGES)
        k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))[None, :]
        m = gl.arange(0, TOKENS, gl.SliceLayout(1, copied))[:, None]
        local = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))
        row = _rows_of(local, weights, first, rows, columns, BLOCK_N, GATED)[:, None]
    else:
        in_warps: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0]
        )
        of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, in_warps))
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        ring = _ring(x, [PARTS, BLOCK_N, BLOCK_K], swizzled, STAGES)
        ring_of_x = _ring(x, [PARTS, TOKENS, BLOCK_K], swizzled, STAGES)
        part = gl.arange(0, PARTS, gl.SliceLayout(1, gl.SliceLayout(2, in_warps)))[:, None, None]
        column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, gl.SliceLayout(1, in_warps)))[None, None, :]
        k = part * BLOCK_K + column
        m = gl.arange(0, TOKENS, of_rows)[None, :, None]
        local = gl.arange(0, BLOCK_N, of_rows)
        row = _rows_of(local, weights, first, rows, columns, BLOCK_N, GATED)[None, :, None]
    of_tile, of_x_tile, there = row + k, x + gl.minimum(m, tokens - 1) * columns + k, m < tokens
    for s in gl.static_range(STAGES):
        _copy_weight(ring[s], of_tile, k, gl.to_tensor(s * PARTS * BLOCK_K), columns, EVEN)
        async_copy.commit_group()
    _wait()
    for s in gl.static_range(STAGES):
        _copy_x(ring_of_x[s], of_x_tile, there, k, gl.to_tensor(s * PARTS * BLOCK_K), columns, EVEN)
        async_copy.commit_group()
    return ring, ring_of_x, of_tile, of_x_tile, k, there


@gluon.jit
def _multiplied(tile, x_tile, total, PARTS: gl.constexpr):
    if PARTS == 1:
        hopper.fence_async_shared()
        return hopper.warpgroup_mma(tile, x_tile.permute([1, 0]), total)
    else:
        left = tile.load(gl.DotOperandLayout(0, total.type.layout, 2))
        right = x_tile.permute([0, 2, 1]).load(gl.DotOperandLayout(1, total.type.layout, 2))
        return ampere.mma_v2(left, right, total)


@gluon.jit
def _step(
    slots,
    pointers,
    step,
    columns,
    total,
    STEP: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Adds the products of a step's slots, and fills those of the step before.

    It is a function for the sake of the compiler, which reads its code once and not for each slot.
    """
    tile, x_tile, free, x_free = slots
    of_tile, of_x_tile, k, there = pointers
    async_copy.wait_group(STAGES - 2)  # and a barrier, behind which the slots of the step before are free
    first = (step + STAGES - 1) * STEP
    if step > 0:
        if first < columns:
            _copy_weight(free, of_tile, k, first, columns, EVEN)
            _copy_x(x_free, of_x_tile, there, k, first, columns, EVEN)
        async_copy.commit_group()
    return _multiplied(tile, x_tile, total, PARTS)


@gluon.jit
def products(
    begun,
    columns,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PARTS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Products of what was `begun`: float32 `[BLOCK_N, TOKENS]`, or that many of each of several PARTS."""
    ring, ring_of_x = begun[0], begun[1]
    STEP: gl.constexpr = PARTS * BLOCK_K
    WARPS: gl.constexpr = gl.num_warps()
    if PARTS == 1:
        of_group: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TOKENS, 16])
        total = gl.zeros([BLOCK_N, TOKENS], gl.float32, of_group)
    else:
        of_warps: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
        total = gl.zeros([PARTS, BLOCK_N, TOKENS], gl.float32, of_warps)
    steps = gl.cdiv(columns, STEP)
    for i in range(0, steps, STAGES):
        for s in gl.static_range(STAGES):
            if i + s < steps:
                before: gl.constexpr = (s + STAGES - 1) % STAGES
                slots = ring[s], ring_of_x[s], ring[before], ring_of_x[before]
                total = _step(slots, begun[2:], i + s, columns, total, STEP, PARTS, STAGES, EVEN)
    async_copy.wait_group(0)  # what follows may use the memory of slots that zeros are still copied to
    return total


@gluon.constexpr_function
def stored_layout(rows, warps):
    """Threads of a warp have neighbouring rows of the weight, which are neighbours in the result."""
    across = min(rows, 32)
    down = min(rows // across, warps)
    return gl.BlockedLayout([1, 1], [across, 32 // across], [down, warps // down], [0, 1])


@gluon.constexpr_function
def in_parts(parts, of):
    """Each thread has all `parts` of what it has in layout `of`."""
    lanes, warps, order = of.threads_per_warp, of.warps_per_cta, [1 + each for each in of.order]
    return gl.BlockedLayout([parts, *of.size_per_thread], [1, *lanes], [1, *warps], [0, *order])


@gluon.constexpr_function
def paired_layout(of):
    """Each thread has gate and up, `[..., 2]`, of what it has in layout `of`."""
    return gl.BlockedLayout(
        [*of.size_per_thread, 2], [*of.threads_per_warp, 1], [*of.warps_per_cta, 1], [2, *of.order]
    )


@gluon.jit
def summed(total, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """`[BLOCK_N, TOKENS]` in LAYOUT, of products in any. A thread has all parts of a sum."""
    if PARTS == 1:
        return gl.convert_layout(total, LAYOUT)
    else:
        return gl.convert_layout(gl.sum(gl.convert_layout(total, in_parts(PARTS, LAYOUT)), 0), LAYOUT)


@gluon.jit
def halves(total, PARTS: gl.constexpr, NUMBER: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Gate and up, `[NUMBER, TOKENS]` each, of products of both."""
    paired: gl.constexpr = paired_layout(LAYOUT)
    if PARTS == 1:
        both = gl.convert_layout(gl.permute(gl.reshape(total, [2, NUMBER, TOKENS]), (1, 2, 0)), paired)
    else:
        apart = gl.permute(gl.reshape(total, [PARTS, 2, NUMBER, TOKENS]), (0, 2, 3, 1))
        both = gl.convert_layout(gl.sum(gl.convert_layout(apart, in_parts(PARTS, paired)), 0), paired)
    gate, up = gl.split(both)
    return gl.convert_layout(gate, LAYOUT), gl.convert_layout(up, LAYOUT)
