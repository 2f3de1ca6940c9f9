"""Triton kernels without the JIT's dispatch, which costs more host time than the launch itself.

Note [Bound launches]
`kernel[grid](...)` looks at every argument on every call to find its compiled variant: 14 to 20 us. A serving
loop launches one variant with the same addresses over and over. So a `Launcher` finds the variant once, and
`bind` fixes grid and addresses; what is left per launch is one call of Triton's own C launcher.
A variant is specialised for pointers that are multiples of 16 bytes or not, and never on the values of
integers. The interpreter (TRITON_INTERPRET=1) has no variants; there a bound launch is the plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Grid = tuple[int, int, int]
Launch = Callable[[], None]


class Launcher:
    """A Triton kernel and its compiled variants.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters come last and whose integer parameters are
            all in `do_not_specialize`.
        options: num_warps, num_stages.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        self._kernel, self._options = kernel, options
        self._variants: dict[tuple[Any, ...], Any] = {}

    def bind(self, grid: Grid, args: Sequence[Tensor | int | float], *constants: Any) -> Launch:
        """A zero-argument launch.

        Args:
            grid: programs along each axis; a launch of no programs does nothing.
            args: the kernel's arguments before its constexprs. The caller keeps the tensors alive.
            constants: its constexprs, in order.
        """
        if 0 in grid:
            return _nothing
        if not hasattr(self._kernel, "warmup"):
            return lambda: self._kernel[grid](*args, *constants)
        tensors = [value for value in args if isinstance(value, Tensor)]
        pointers = [value.data_ptr() if isinstance(value, Tensor) else value for value in args]
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        key = tensors[0].device, aligned, tuple(tensor.dtype for tensor in tensors), constants
        variant = self._variants.get(key)
        if variant is None:
            variant = self._kernel.warmup(*args, *constants, grid=grid, **self._options)
            self._variants[key] = variant
        return _bound(variant, grid, tensors[0].device.index or 0, (*pointers, *constants))

    def __call__(self, grid: Grid, args: Sequence[Tensor | int | float], *constants: Any) -> None:
        """Launch once."""
        self.bind(grid, args, *constants)()


def _bound(variant: Any, grid: Grid, device: int, arguments: tuple[Any, ...]) -> Launch:
    from triton.runtime import driver

    run, stream_of = variant.run, driver.active.get_current_stream
    function, metadata = variant.function, variant.packed_metadata
    x, y, z = grid

    def launch() -> None:
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *arguments)

    return launch


def _nothing() -> None:
    pass
