"""How a kernel that is launched as a dependent of the one before it has to begin.

Note [Dependent launches]
A decode step is a chain of short kernels, and the memory idles while one ends and the next starts. A kernel
launched as a dependent of the one before (Hopper's programmatic dependent launch) is resident already when
that one ends. It may read the results of the kernel before only after it has waited, and every program waits.
So a kernel is done only after the one before it, and whoever waits for it relies on all kernels before. That
is why its own dependents may start at once: they wait too. Inductor's kernels are made to
(_torch.kernels_wait_first). Kernels of others that are launched as dependents have to wait before they read
what any kernel of the graph writes. A captured graph keeps such a launch as a programmatic edge.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr):
    """Let dependents start, then wait for the kernel before; to be called before memory is touched.

    Args:
        DEPENDENT: the kernel is launched as a dependent; without, nothing is done.
    """
    let_dependents_start(DEPENDENT)
    wait(DEPENDENT)


@triton.jit
def let_dependents_start(DEPENDENT: tl.constexpr):
    """The first half of `start_dependent`."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """The second half. Once a program has waited, it costs nothing."""
    if DEPENDENT:
        cuda.gdc_wait()


@triton.jit
def prefetch(lines):
    """Ask for lines of memory, by pointers into them, before the wait.

    They come as far as the L2 cache, which sees what other kernels write. So it is right for whatever memory.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )
