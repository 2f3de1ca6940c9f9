"""Triton kernels without the JIT's dispatch, which costs more host time than the launch itself.

`kernel[grid](...)` inspects every argument on every call to find its compiled variant: 14 to 20 us. A serving
loop launches one variant with the same addresses again and again. So a `Launcher` finds the variant once, and
`bind` fixes grid and addresses; a launch is then one call of Triton's own C launcher. A variant is
specialised on whether pointers are multiples of 16 bytes, and never on the values of integers. The
interpreter (TRITON_INTERPRET=1) has no variants; there a bound launch is the plain call.

Note [The C launcher]
`CompiledKernel.run` is a Python object around the launcher that Triton compiled for the kernel's signature.
It allocates scratch memory for kernels that need it. For a kernel that needs none, in a Triton version with
known argument order, the C function underneath is called directly.

Note [The interpreter]
It holds scalars as arrays of one element and converts them with `int` for the bounds of loops; numpy 2.4
refuses that. It holds bfloat16 as integers, and multiplies matrices of these integers. Until Triton mends
both, `_mend_interpreter` does.

Note [Ahead]
Triton compiles a variant in the thread that first asks for it: 0.2 to 2 s. Who knows beforehand which
variants will be asked for has them compiled in other threads (`ahead`). Most of the time goes to LLVM and
ptxas, which do not hold Python's lock.

Note [First-level cache]
It and shared memory are one memory of a multiprocessor, parted while no kernel runs there. For a kernel with
more than 48 KiB of shared memory Triton asks for as little cache as there may be. In a chain of dependent
launches no multiprocessor is ever idle, and so kernels that read through the cache have to live with that.
A launcher that is told how many programs run at a time has what they need set aside, and no more.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Grid = tuple[int, int, int]
Launch = Callable[[], None]
Enqueue = Callable[[Grid, tuple[Any, ...]], None]

_DIRECT = ("3.6.",)  # see Note [The C launcher]
_RESERVED = 1 << 10  # bytes of shared memory that a program has beside its own
_NO_PREFERENCE = 0  # CU_FUNC_CACHE_PREFER_NONE
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


class Planned(NamedTuple):
    """A launch that has not been made: the arguments of `Launcher.bind`, by their names there."""

    launcher: Launcher
    grid: Grid
    args: tuple[Tensor | int | float, ...]
    constants: tuple[Any, ...]

    def bind(self) -> Launch:
        """As `Launcher.bind`."""
        return self.launcher.bind(self.grid, self.args, *self.constants)

    def compile_ahead(self) -> None:
        """As `Launcher.ahead`; nothing is compiled for a launch of no programs."""
        if 0 not in self.grid:
            self.launcher.ahead(self.args, *self.constants)


class Launcher:
    """A Triton kernel and its compiled variants.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters come last and whose integer parameters are
            all in `do_not_specialize`.
        set_aside: programs of one multiprocessor that shared memory is set aside for, which leaves the rest
            to the cache (Note [First-level cache]); 0 = as Triton has it. No other launcher may have the same
            kernel with the same options and constants: they would share one variant, and this with it.
        options: num_warps, num_stages, launch_pdl (launch as a dependent of the kernel before).
    """

    def __init__(self, kernel: Any, set_aside: int = 0, **options: int) -> None:
        self._kernel, self._programs, self._options = kernel, set_aside, options
        self.dependent = bool(options.get("launch_pdl", False))
        self._variants: dict[tuple[Any, ...], Enqueue] = {}
        self._coming: dict[tuple[Any, ...], Future[Enqueue]] = {}  # see Note [Ahead]

    def bind(self, grid: Grid, args: Sequence[Tensor | int | float], *constants: Any) -> Launch:
        """A zero-argument launch.

        Args:
            grid: programs along each axis; a launch of no programs does nothing.
            args: the kernel's arguments before its constexprs. The caller keeps the tensors alive.
            constants: its constexprs, in order.
        """
        if 0 in grid:
            return lambda: None
        enqueue, arguments = self.variant(args, *constants), (*map(address, args), *constants)
        return lambda: enqueue(grid, arguments)

    def __call__(self, grid: Grid, args: Sequence[Tensor | int | float], *constants: Any) -> None:
        """Launch once."""
        self.bind(grid, args, *constants)()

    def variant(self, args: Sequence[Tensor | int | float], *constants: Any) -> Enqueue:
        """The variant that serves `args`: `enqueue(grid, arguments)` with a grid of at least one program.

        `arguments` are the kernel's, constexprs included, tensors as what `address` makes of them. They may
        be others than `args` as long as dtypes and constants are the same, and pointers (those in
        `do_not_specialize_on_alignment` apart) are as aligned.
        """
        if interpreted():
            _mend_interpreter()
            return lambda grid, arguments: self._kernel[grid](*arguments)
        key = _key(args, constants)
        enqueue = self._variants.get(key)
        if enqueue is None:
            enqueue = self._compiled_ahead(key) or self._compile(key[0], args, constants)
            self._variants[key] = enqueue
        return enqueue

    def ahead(self, args: Sequence[Tensor | int | float], *constants: Any) -> None:
        """Have the variant that serves `args` compiled in another thread; `variant` waits for what was begun.

        Raises nothing: a variant that cannot be compiled raises where it is asked for.
        """
        key = _key(args, constants)
        if interpreted() or key in self._variants or key in self._coming:
            return  # the interpreter compiles nothing
        _ = self._kernel.cache_key  # the hash of the source, which is made once and not for several threads
        coming = _compilers().submit(self._compile, key[0], args, constants)
        self._coming[key] = coming
        coming.add_done_callback(lambda done: self._forget_failed(key, done))

    def _forget_failed(self, key: tuple[Any, ...], done: Future[Enqueue]) -> None:
        """Its exception holds on to the arguments."""
        if not done.cancelled() and done.exception() is not None:
            self._coming.pop(key, None)

    def _compiled_ahead(self, key: tuple[Any, ...]) -> Enqueue | None:
        coming = self._coming.pop(key, None)
        if coming is None or coming.cancel():  # others are compiled before it, which nobody waits for
            return None
        with suppress(Exception):
            return coming.result()
        return None

    def _compile(self, device: torch.device, args: Sequence[Any], constants: Sequence[Any]) -> Enqueue:
        with torch.cuda.device(-1 if device.index is None else device.index):
            variant = self._kernel.warmup(*args, *constants, grid=(1, 1, 1), **self._options)
            enqueue = _enqueue(variant, device.index or 0)
            if self._programs and torch.version.hip is None:
                _set_aside(variant, self._programs, device)
            return enqueue


@cache
def _compilers() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(cores, 16), "piecewise-graph-triton")


def _key(args: Sequence[Any], constants: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a variant depends on; the device is the first."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    return tensors[0].device, aligned, tuple(tensor.dtype for tensor in tensors), constants


def address(value: Any) -> Any:
    """A launch argument for `Launcher.variant`; its caller keeps the tensor alive."""
    return value.data_ptr() if isinstance(value, Tensor) and not interpreted() else value


@cache
def dependent_launches(device: torch.device) -> bool:
    """Whether kernels may be launched as dependents of the ones before them (Hopper and later)."""
    return (
        device.type == "cuda"
        and not interpreted()
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@cache
def multiprocessors(device: torch.device) -> int:
    """How many there are; 8 in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have; in Triton's interpreter as on Hopper."""
    if device.type != "cuda":
        return 227 << 10
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    try:
        from triton import knobs
    except ImportError:  # torch for CPUs comes without it
        return False
    return bool(knobs.runtime.interpret)


def kernels_serve(tensor: Tensor) -> bool:
    """Whether kernels can read it: they run on a GPU, and in Triton's interpreter."""
    return tensor.is_cuda or interpreted()


@cache
def _mend_interpreter() -> None:
    """See Note [The interpreter]."""
    from triton import language as tl
    from triton.runtime import interpreter

    builder: Any = getattr(interpreter, "InterpreterBuilder", None)
    patch: Any = getattr(interpreter, "_patch_lang_tensor", None)
    product: Any = getattr(builder, "create_dot", None)

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def product_of_floats(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = (self.cast_impl(v, tl.float32) if v.dtype.scalar == tl.bfloat16 else v for v in (a, b))
        return product(self, *wide, *rest)

    if patch is not None:
        interpreter._patch_lang_tensor = patch_and_mend
    if product is not None:
        builder.create_dot = product_of_floats


def _enqueue(variant: Any, device: int) -> Enqueue:
    import triton
    from triton.runtime import driver

    run, stream_of = variant.run, driver.active.get_current_stream
    function, metadata = variant.function, variant.packed_metadata
    if not (triton.__version__.startswith(_DIRECT) and _wants_no_scratch(run)):

        def through_run(grid: Grid, arguments: tuple[Any, ...]) -> None:
            run(*grid, stream_of(device), function, metadata, None, None, None, *arguments)

        return through_run
    launch, cooperative, dependent = run.launch, run.launch_cooperative_grid, run.launch_pdl

    def enqueue(grid: Grid, arguments: tuple[Any, ...]) -> None:
        launch(
            *grid, stream_of(device), function, cooperative, dependent, None, None, metadata,
            None, None, None, *arguments,
        )  # fmt: skip

    return enqueue


def _set_aside(variant: Any, programs: int, device: torch.device) -> None:
    """Have a multiprocessor keep shared memory for so many programs: a hint to the driver."""
    every = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    with suppress(OSError):  # it has another name on other systems
        driver, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(variant.function)
        driver.cuFuncSetCacheConfig(function, _NO_PREFERENCE)
        driver.cuFuncSetAttribute(function, CARVEOUT, carveout(variant.metadata.shared, programs, every))


def carveout(shared: int, programs: int, every: int) -> int:
    """Percent of a multiprocessor's shared memory, `every` bytes, that programs of `shared` bytes take."""
    return min(-(-100 * programs * (shared + _RESERVED) // every), 100)


def _wants_no_scratch(run: Any) -> bool:
    needs = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    known = all(hasattr(run, name) for name in ("launch", "launch_cooperative_grid", "launch_pdl"))
    return known and needs == [0, 0]
