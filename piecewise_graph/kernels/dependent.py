"""How a kernel that is launched as a dependent of the one before it has to begin.

Note [Dependent launches]
A decode step is a chain of short kernels, and the memory idles while one ends and the next starts. A kernel
launched as a dependent of the one before (Hopper's programmatic dependent launch) is resident already when
that one ends. It may read the results of the kernel before only after it has waited. It lets its own
dependents start after the wait, never sooner, so that they may rely on all kernels before this one being
done; Inductor's kernels rely on that. A captured graph keeps such a launch as a programmatic edge.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def start_dependent(DEPENDENT: tl.constexpr, TRIGGER: tl.constexpr):
    """Wait for the kernel before, then let dependents start; to be called before memory is touched.

    Args:
        DEPENDENT: the kernel is launched as a dependent; without, nothing is done.
        TRIGGER: let dependents start now, not when this kernel ends.
    """
    if DEPENDENT:
        cuda.gdc_wait()
        if TRIGGER:
            cuda.gdc_launch_dependents()
