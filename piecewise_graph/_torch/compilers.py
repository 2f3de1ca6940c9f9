"""Inductor and the other compilers: compiling a segment, its code, and what lies on disk."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph._torch.ops import is_foreign, is_higher_order
from piecewise_graph._torch.wrappers import uncompiled

# We capture graphs, so Inductor's own capture (a global reduce-overhead) must not nest in them. Freezing
# would bake the weights of one layer into code that all equal layers share.
_PATCHES = {"triton.cudagraphs": False, "freezing": False}

# Inductor tunes a kernel on random arguments before it is stored. Those as large as a table of embeddings
# would be most of what a start needs beside the model; such a segment's kernels are tuned when it first runs.
# What only ops of other libraries read is no argument of Inductor's kernels. Symbolic sizes do not count.
_LARGEST_SAMPLE = 2**28  # bytes

# Inductor's cache must not give us kernels that it made without `kernels_wait_first`: another key.
_KEY = {"kernel_name_max_ops": 12}
_WAITING_FIRST = threading.RLock()  # one at a time changes Inductor's class


def start_compile_workers() -> None:
    """Have the processes that compile Triton kernels start, as torch's own backend does; returns at once."""
    if torch.cuda.is_available():
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def agree_on_assembler() -> None:
    """Have Triton use the ptxas in this process that Inductor's processes use.

    Triton asks for its version once, and keeps kernels on disk under keys that hold it. A process in which a
    kernel is compiled before Inductor chooses never finds what the others have compiled. The choice is an
    environment variable, TRITON_PTXAS_PATH, which processes started later inherit.
    """
    if torch.cuda.is_available():
        from torch._inductor.runtime import compile_tasks

        choose = getattr(compile_tasks, "_set_triton_ptxas_path", None)
        if choose is not None:
            choose()


def inductor_settings(settings: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """What Inductor compiles inside the block has these options of its config.

    Raises:
        torch's AttributeError: it has no such option.
    """
    from torch._inductor import config

    return config.patch(dict(settings))


def inductor_tunes_products() -> bool:
    """Whether its options have it try kernels of its own for matrix products."""
    from torch._inductor import config

    return bool(config.max_autotune or config.max_autotune_gemm)


def compile_segment(gm: GraphModule, inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile one segment for dynamic sizes. The result takes `*inputs` and returns a sequence.

    Its kernels start while the ones before them end (Note [Waiting first]).

    Raises:
        torch's own compile errors; Dynamo's restart exceptions pass through.
    """
    # Given a part of a trace, AOTAutograd takes a float that Dynamo left open for one that data decide.
    keeps_floats = compiler == "aot_eager" and any(gm.graph.find_nodes(op="call_method", target="item"))
    if compiler == "eager" or keeps_floats:
        return uncompiled(gm)
    if compiler == "aot_eager":
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(inputs))
    has_outputs = bool(next(iter(reversed(gm.graph.nodes))).args[0])
    source: Any = "from_graph" if has_outputs else "from_tracing_context"
    return _standalone(gm, inputs, source, {})


def compile_exact(gm: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile one segment for exactly the sizes of `inputs` (real tensors), with kernels tuned by trying."""
    wanted = {
        "coordinate_descent_tuning": True,
        "combo_kernels": True,  # what several small kernels would do side by side, in one
    }
    return _standalone(gm, inputs, "from_example_inputs", wanted)


def _standalone(
    gm: GraphModule, inputs: Sequence[Any], shapes: Any, wanted: Mapping[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import config, standalone_compile

    # A kernel of the user's in it may not wait.
    dependent = {"triton.enable_pdl": not any(is_higher_order(node.target) for node in gm.graph.nodes)}
    targets = [{user.target for user in node.users} for node in gm.graph.find_nodes(op="placeholder")]
    read = zip(targets, inputs, strict=True)
    samples = [_bytes(value) for users, value in read if not all(map(is_foreign, users))]
    tuned = {"triton.autotune_at_compile_time": max(samples, default=0) <= _LARGEST_SAMPLE}
    asked = {**_PATCHES, **wanted, **dependent, **tuned, **_KEY}
    patches = {name: value for name, value in asked.items() if _has_option(config, name)}
    with kernels_wait_first():
        return standalone_compile(
            gm, list(inputs), dynamic_shapes=shapes, options={"config_patches": patches}
        )


@contextmanager
def kernels_wait_first() -> Iterator[None]:
    """Triton kernels that Inductor makes for dependent launches first signal dependents, then wait.

    Note [Waiting first]
    On Hopper and later a kernel may be launched as a dependent of the one before. It is resident when that
    one ends, and waits for it before it touches memory (kernels/dependent.py). Inductor has its kernels wait
    where they first read results of the kernel before. That is never if they read none, and too late if they
    overwrite memory that the kernel before still reads. And they signal their own dependents after the wait
    only, although those wait too.
    """
    from torch._inductor.codegen import triton

    kernel: Any = triton.TritonKernel

    def wait_first(self: Any, code: Any) -> None:
        theirs(self, code)
        if self._enable_pdl_codegen():
            marks = self.GDC_LAUNCH, self.GDC_WAIT
            code._lines = [*marks, *(line for line in code._lines if str(line).strip() not in marks)]

    with _WAITING_FIRST:
        theirs, kernel._filter_pdl = kernel._filter_pdl, wait_first
        try:
            yield
        finally:
            kernel._filter_pdl = theirs


def _bytes(value: Any) -> int:
    """Of a tensor whose sizes are known; 0 of anything else."""
    count = value.numel() if isinstance(value, Tensor) else None
    return count * value.element_size() if isinstance(count, int) else 0


def _has_option(config: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    return hasattr(config, first) and (not rest or hasattr(getattr(config, first), rest))


def compile_whole(gm: GraphModule, inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile an unsplit graph the way torch.compile does (autograd included)."""
    if compiler == "eager":
        return gm.forward
    return torch._dynamo.lookup_backend(compiler)(gm, list(inputs))


def generated_code(run: Callable[..., Any]) -> str | None:
    """The Python that Inductor wrote for a segment; None where another compiler made it, or a cache did.

    AOTAutograd wraps what Inductor returns in functions that call one another.
    """
    seen, waiting = set[int](), [run]
    while waiting:
        inner = waiting.pop(0)
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        if type(inner).__name__ == "CompiledFxGraph":
            return getattr(inner, "source_code", None) or None
        held = [getattr(inner, name, None) for name in ("_compiled_fn", "compiled_fn", "__wrapped__")]
        for cell in getattr(inner, "__closure__", None) or ():
            with suppress(ValueError):  # a cell may be empty
                held.append(cell.cell_contents)
        waiting += filter(callable, held)
    return None


def load_artifact(path: str) -> Callable[..., Any]:
    """Load what a segment's `save(path=..., format="binary")` wrote; a bad file may raise anything."""
    from torch._inductor import CompiledArtifact, config

    with config.patch(_PATCHES):
        return CompiledArtifact.load(path=path, format="binary")


def inductor_cache_dir() -> str:
    return str(importlib.import_module("torch._inductor.runtime.cache_dir_utils").cache_dir())


def code_modules() -> list[Any]:
    """Python modules that Inductor has generated and loaded in this process, oldest first."""
    codecache = sys.modules.get("torch._inductor.codecache")
    return [] if codecache is None else codecache.PyCodeCache.modules


def compile_options() -> list[str]:
    """Options of Inductor and AOTAutograd that change generated code; objects show as ` at 0x`."""
    from torch._functorch import config as aot
    from torch._inductor import config

    passes = [name for name in config._cache_config_ignore_prefix if name.endswith("_pass")]
    portable = config.save_config_portable(ignore_private_configs=False), aot.save_config_portable()
    return [repr(sorted(options.items())) for options in portable] + [
        repr([(name, getattr(config, name)) for name in passes])
    ]
