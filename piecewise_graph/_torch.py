"""The only file that touches private torch API.

Everything here was tried on torch 2.11 and 2.13 (`tests/test_torch_gates.py` tests each use). Differences
between versions are handled here and nowhere else.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._sympy.symbol import SymT, symbol_is_type

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket

# --- what Dynamo knows about a graph ------------------------------------------------------------


def example_value(node: Node) -> Any:
    """What Dynamo saw flow out of `node`: FakeTensor, SymInt, torch.Size, ... or None."""
    return node.meta.get("example_value")


def shape_env_of(gm: GraphModule) -> Any | None:
    """The ShapeEnv of the graph's fake tensors and sizes; None for a graph that has neither."""
    values = [example_value(node) for node in gm.graph.nodes]
    owners = (getattr(value, "fake_mode", getattr(value, "node", None)) for value in values)
    return next(filter(None, (getattr(owner, "shape_env", None) for owner in owners)), None)


def fake_mode_of(gm: GraphModule) -> Any | None:
    modes = (getattr(example_value(node), "fake_mode", None) for node in gm.graph.nodes)
    return next((mode for mode in modes if mode is not None), None)


def shape_guards(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """The boolean expressions over size symbols that the trace relies on, so far.

    A symbol that was later found to equal another one stands in none of them, as it stands in no shape.
    """
    return tuple(shape_env.replace(guard.expr) for guard in shape_env.guards)


def takes_all_sizes(gm: GraphModule) -> bool:
    """Each size and number that Dynamo made a symbol of is an argument of the graph, or a size of one.

    Others steered the trace and left the graph, or never entered it, or were found to be one number: only
    Dynamo's own guards check them. Where an argument is a view, the sizes of what it views have symbols too,
    which no forward asks for.
    """
    from torch._dynamo.source import TensorProperty
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    fake_mode = context.fake_mode if context is not None else None
    shape_env = fake_mode.shape_env if fake_mode is not None else None  # a graph that takes nothing has none
    if shape_env is None:
        return True
    arguments = [node.meta.get("grapharg") for node in gm.graph.nodes if node.op == "placeholder"]
    taken = {_source_text(arg.source) for arg in arguments if arg is not None}

    def is_taken(symbol: sympy.Symbol, source: Any) -> bool:
        tensor = getattr(source, "base", source)
        if _source_text(tensor) in taken and getattr(source, "prop", None) is TensorProperty.SIZE:
            return True
        found = {_source_text(source), _source_text(tensor)} & taken
        return bool(found) and not shape_env.replace(symbol).is_number

    return all(
        symbol.is_integer and is_taken(symbol, source)
        for symbol, sources in shape_env.var_to_sources.items()
        for source in sources
        if "._base." not in _source_text(source)
    )


def value_range(shape_env: Any, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """(lowest, highest) value of a size symbol for which the trace is valid; None where unbounded."""
    bounds = shape_env.var_to_range[symbol]
    return tuple(int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))  # type: ignore[return-value]


def expression(value: Any) -> sympy.Expr:
    """The sympy expression of an int, a SymInt or an expression."""
    return value.node.expr if isinstance(value, torch.SymInt) else sympy.sympify(value)


def size_of_symbol(shape_env: Any, symbol: sympy.Symbol) -> torch.SymInt:
    """The size that `symbol` stands for."""
    return shape_env.create_symintnode(symbol, hint=None)


def add_size(graph: Graph, size: torch.SymInt, symbols: Mapping[sympy.Symbol, Node]) -> Node:
    """Append nodes that compute `size` from the sizes in its expression; returns the last one."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    known = set(graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    last = sympy_interp(PythonReferenceAnalysis, proxies, expression(size)).node
    for node in graph.nodes:
        if node not in known:
            args = map_arg(node.args, example_value)
            node.meta["example_value"] = node.target(*args)
    return last


def is_constant(value: torch.SymInt | torch.SymFloat) -> bool:
    return bool(value.node.expr.is_number)


def placeholder_source(node: Node) -> tuple[str, bool]:
    """(source text such as `L['self']._parameters['w']`, whether it belongs to an nn.Module or a global)."""
    arg = node.meta.get("grapharg")
    source = getattr(arg, "source", None)
    if source is None:
        return node.name, False
    name = _source_text(source)
    where = source.guard_source if not callable(source.guard_source) else source.guard_source()
    return name, "NN_MODULE" in where.name or where.name.startswith("GLOBAL")


def assigned_attributes() -> frozenset[str]:
    """Source texts of the attributes that the traced code assigns, such as `L['self'].state`."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        assigned = InstructionTranslator.current_tx().output.side_effects.store_attr_mutations
    except AttributeError:
        return frozenset()
    found = set()
    for owner, names in assigned.items():
        with suppress(AttributeError, NotImplementedError):  # made in the frame
            found |= {f"{_source_text(owner.source)}.{name}" for name in names}
    return frozenset(found)


def returns_intermediates(gm: GraphModule) -> bool:
    """The forward goes on with what Dynamo's graph returns: behind a graph break, or in a frame that called.

    Of a forward that Dynamo cannot trace (a graph break in a loop), it traces the functions that it calls.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    library, is_caller, frame = torch.__path__[0], False, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != "compile_wrapper":
        file = frame.f_code.co_filename
        if is_caller and not file.startswith(library):
            return True
        is_caller |= file.endswith("convert_frame.py")
        frame = frame.f_back
    return False


def changed_objects() -> tuple[str, ...]:
    """Source texts of the caller's objects that the traced code changes in Python, such as `L['self']`.

    Dynamo makes these changes after every call of its graph. Left out are globals (transformers sets a
    context variable, and sets it back), and the containers of `*args` and `**kwargs`.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    code = current_root_code()
    if code is None:
        return ()
    effects = InstructionTranslator.current_tx().output.side_effects
    of_call = {f"L['{name}']" for name in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]}
    made_here = (AttributeMutationNew, ValueMutationNew)
    given = [item for item in effects.id_to_variable.values() if item.source is not None]
    changed = [x for x in given if not isinstance(x.mutation_type, made_here) and _is_changed(x, effects)]
    texts = {_source_text(item.source) for item in changed}
    return tuple(sorted(text for text in texts - of_call if text.startswith("L[")))


def _is_changed(item: Any, effects: Any) -> bool:
    """An attribute that gets the constant that it has, at the end of the trace, is not changed."""
    assigned, missing = effects.store_attr_mutations.get(item), object()
    if not assigned:
        return bool(effects.is_modified(item))
    for name, value in assigned.items():
        now = getattr(getattr(item, "value", None), name, missing)
        if not value.is_python_constant() or repr(value.as_python_constant()) != repr(now):
            return True
    return False


def _source_text(source: Any) -> str:
    return source.name if isinstance(source.name, str) else source.name()


def module_source(node: Node) -> str:
    """Source of the innermost module that called what `node` calls, such as `L['self'].layers.0`; or ""."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(next(reversed(stack.values()))[0])


def current_root_code() -> CodeType | None:
    """The code object whose frame Dynamo is compiling right now; None outside of a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output.root_tx.f_code
    except AttributeError:
        return None


def is_dynamo_control_flow(error: BaseException) -> bool:
    """Exceptions by which Dynamo restarts a trace; Inductor raises some. They must never be swallowed."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def is_specialization_error(error: BaseException) -> bool:
    """A dimension that was marked dynamic turned out constant."""
    return "Constraints violated" in str(error) or "ConstraintViolation" in type(error).__name__


def backend_error(error: BaseException) -> BaseException:
    """What a backend raised, where Dynamo wrapped it; else the error itself."""
    return getattr(error, "inner_exception", error)


def is_trace_error(error: BaseException) -> bool:
    """Errors by which torch says that a call could not be traced (not those of running it)."""
    from torch._dynamo import exc

    return isinstance(error, (exc.TorchRuntimeError, exc.Unsupported, exc.UserError))


def original_callable(compiled: Any) -> Any | None:
    """What torch.compile wrapped: the module of an OptimizedModule, or the function."""
    module = getattr(compiled, "_orig_mod", None)
    return getattr(compiled, "_torchdynamo_orig_callable", None) if module is None else module


# --- dynamic dimensions ---------------------------------------------------------------------------


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Ask Dynamo to trace `tensor.size(dim)` as a symbol. Cheap when it was marked before."""
    marked = getattr(tensor, "_dynamo_dynamic_indices", None)
    if marked is None or dim not in marked:
        torch._dynamo.mark_dynamic(tensor, dim)


def maybe_mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Like mark_dynamic, but the model may fix the size without an error."""
    marked = getattr(tensor, "_dynamo_weak_dynamic_indices", None)
    if marked is None or dim not in marked:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def drop_shape_guards(guards: Sequence[Any]) -> list[bool]:
    """A `guard_filter_fn` that keeps everything but SHAPE_ENV (the Notes in frontend/compile.py say why)."""
    return [guard.guard_type != "SHAPE_ENV" for guard in guards]


def raise_recompile_limit() -> None:
    """Dynamo counts traces per code object, which all models of a class share; 8 are few for a server."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)


def tell_of_reset(backend: Any) -> None:
    """Have the next torch._dynamo.reset() call `backend.reset()`.

    Dynamo itself remembers a backend from torch.compile to its first reset only, and not from trace to trace.
    """
    torch._dynamo.eval_frame.cached_backends.setdefault(id(backend), backend)


def floats_stay_constants() -> AbstractContextManager[Any]:
    """Trace a module's numbers (an attention's scale) as they are.

    Dynamo remembers per line of code what differed between two traces. A second model of a class with another
    scale would get the scale as a symbol, and symbolic floats cannot cross a cut.
    """
    return torch._dynamo.config.patch(specialize_float=True)


def guard_every_weight() -> None:
    """Have Dynamo check weights on every call, as torch 2.13 does by default.

    Torch 2.11 assumes that a module's tensors are unchanged if its dictionaries are. After `p.data = ...`
    with another dtype or shape, a call would reach the trace compiled for the old one. The setting is
    process-wide.
    """
    config = torch._dynamo.config
    for shortcut in ("use_recursive_dict_tags_for_guards", "skip_tensor_guards_with_matching_dict_tags"):
        if hasattr(config, shortcut):
            setattr(config, shortcut, False)


# --- compilers ------------------------------------------------------------------------------------

# We capture graphs, so Inductor's own capture (a global reduce-overhead) must not nest in them. Freezing
# would bake the weights of one layer into code that all equal layers share.
_PATCHES = {"triton.cudagraphs": False, "freezing": False}


def start_compile_workers() -> None:
    """Have the processes that compile Triton kernels start, as torch's own backend does; returns at once."""
    if torch.cuda.is_available():
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def compile_segment(gm: GraphModule, inputs: Sequence[Any], compiler: str) -> Callable[..., Any]:
    """Compile one segment for dynamic sizes. The result takes `*inputs` and returns a sequence.

    Raises:
        torch's own compile errors; Dynamo's restart exceptions pass through.
    """
    if compiler == "eager":
        return gm.forward
    if compiler == "aot_eager":
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(inputs))
    from torch._inductor import standalone_compile

    has_outputs = bool(next(iter(reversed(gm.graph.nodes))).args[0])
    source: Any = "from_graph" if has_outputs else "from_tracing_context"
    return standalone_compile(gm, list(inputs), dynamic_shapes=source, options={"config_patches": _PATCHES})


def compile_exact(
    gm: GraphModule, inputs: Sequence[Tensor], *, dependent_launches: bool = False
) -> Callable[..., Any]:
    """Compile one segment for exactly the sizes of `inputs` (real tensors), with kernels tuned by trying.

    Args:
        dependent_launches: let kernels start while the one before them ends (Hopper and later); they wait for
            it before they touch memory.
    """
    from torch._inductor import config, standalone_compile

    wanted = {
        "coordinate_descent_tuning": True,
        "combo_kernels": True,  # what several small kernels would do side by side, in one
        "triton.enable_pdl": dependent_launches,
        # Inductor's cache must not give us kernels that it made without `kernels_wait_first`: another key.
        "kernel_name_max_ops": 11,
    }
    patches = _PATCHES | {name: value for name, value in wanted.items() if _has_option(config, name)}
    options = {"config_patches": patches}
    with kernels_wait_first():
        return standalone_compile(gm, list(inputs), dynamic_shapes="from_example_inputs", options=options)


@contextmanager
def kernels_wait_first() -> Iterator[None]:
    """Triton kernels that Inductor makes for dependent launches begin with their wait.

    Inductor has them wait where they first read results of the kernel before. That is never if they read
    none, and too late if they overwrite memory that the kernel before still reads.
    """
    from torch._inductor.codegen import triton

    kernel: Any = triton.TritonKernel
    theirs = kernel._filter_pdl

    def wait_first(self: Any, code: Any) -> None:
        theirs(self, code)
        if self._enable_pdl_codegen():
            marks = self.GDC_WAIT, self.GDC_LAUNCH
            code._lines = [*marks, *(line for line in code._lines if str(line).strip() not in marks)]

    kernel._filter_pdl = wait_first
    try:
        yield
    finally:
        kernel._filter_pdl = theirs


def _has_option(config: Any, name: str) -> bool:
    first, _, rest = name.partition(".")
    return hasattr(config, first) and (not rest or hasattr(getattr(config, first), rest))


def propagate(gm: GraphModule, inputs: Sequence[Tensor]) -> None:
    """Give every node of `gm` the fake value that it has for `inputs`; runs nothing."""
    from torch._subclasses import FakeTensorMode

    class Propagation(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            n.meta["example_value"] = value = super().run_node(n)
            return value

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        Propagation(gm).run(*[mode.from_tensor(tensor) for tensor in inputs])


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


def publish_graph(name: str, gm: GraphModule) -> None:
    """Show a graph to depyf, which replaces the function called here by one that writes files."""
    from torch._dynamo.utils import lazy_format_graph_code

    lazy_format_graph_code(name, gm)


# --- compiled segments on disk --------------------------------------------------------------------


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


def op_schemas(target: Any) -> list[str] | None:
    """Signatures of an op, or of all its overloads; None for other callables and ops that tracing opens."""
    names = target.overloads() if isinstance(target, OpOverloadPacket) else ()
    ops = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in names]
    foreign = [op for op in ops if op.namespace not in ("aten", "prims")]
    opened = any(op._can_decompose() or op.python_key_table for op in foreign)
    return None if opened or not ops else [str(op._schema) for op in ops]


def size_hint(shape_env: Any, symbol: sympy.Symbol) -> int | None:
    """The value of a size symbol while tracing; None for one that has none (unbacked)."""
    value = shape_env.backed_var_to_val.get(symbol)
    return None if value is None else int(value)


def named_range(name: str) -> AbstractContextManager[Any]:
    """Mark a block in the trace of a profiler; free of cost where none records this thread."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(name)


def is_fixed(shape_env: Any, symbol: sympy.Symbol) -> bool:
    """A trace has taken the symbol for a number: it holds for that number alone."""
    return symbol in shape_env.replacements and shape_env.replacements[symbol].is_number


def holds(shape_env: Any, condition: sympy.Basic) -> bool:
    """Whether a condition on sizes is true of the values while tracing; assumes nothing."""
    return bool(condition.xreplace(shape_env.backed_var_to_val) == sympy.true)


def assume(shape_env: Any, condition: sympy.Basic) -> None:
    """Make a condition that holds part of what the trace relies on."""
    shape_env.evaluate_expr(condition)


# --- looking at what a segment does ---------------------------------------------------------------


@contextmanager
def observe_ops(on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
    """Call `on_op(op, args, kwargs, result)` after every op that runs inside the block.

    Ops inside of wrapper subclasses are seen, those that the subclasses stand for are not. Of an op that runs
    graphs only the op itself is seen.

    Runs under the Python dispatcher, as Dynamo runs fake tensors. Without it composite ops written in C++
    (matmul) would ask for plain integers and so fix a symbolic size to its value.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            on_op(func, args, kwargs or {}, result)
            return result

    with enable_python_dispatcher(), Observer():
        yield


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Run real tensors in a block that lies inside of a fake mode and of observers."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
        yield


def is_wrapped(tensor: Tensor) -> bool:
    """Inside of a transform of functions (vmap): it has no storage, and cannot leave the transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass is made of; of any other tensor itself."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def has_unknown_size(tensor: Tensor) -> bool:
    """Some size of a fake tensor depends on data (an unbacked symbol that its op made)."""
    symbols = set().union(*(expression(size).free_symbols for size in tensor.shape))
    return any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in symbols)


def storage_holders(tensor: Tensor) -> int:
    """How many tensors, and storage objects of Python, hold the storage of `tensor`, itself included.

    The look itself adds holders, and their number depends on the version; a new tensor shows how many.
    """
    return _references(tensor) - _references(torch.empty(1, device="cpu")) + 1


def _references(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def storage_id(tensor: Tensor) -> int:
    """Identifies the storage that `tensor` views; works for fake tensors too."""
    return tensor.untyped_storage()._cdata


def weak_alias(tensor: Tensor) -> Tensor:
    """A tensor over the same device memory that does not keep the memory alive.

    The pool of the captured graphs keeps the memory mapped. The next capture may reuse it, because the alias
    does not own it.
    """
    storage = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(alias, tensor.storage_offset(), tensor.shape, tensor.stride())


def clear_cublas_workspaces() -> None:
    """See Note [cuBLAS workspaces] in recorder.py."""
    torch._C._cuda_clearCublasWorkspaces()


def pool_bytes(pool_id: tuple[int, int]) -> int:
    """Bytes of device memory that a graph pool holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool_id))


def flatten(structure: Any) -> tuple[list[Any], Any]:
    """(leaves, structure) of nested containers, ModelOutput included."""
    return torch.utils._pytree.tree_flatten(structure)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    return torch.utils._pytree.tree_unflatten(leaves, structure)


def capturing() -> bool:
    """The current stream is capturing a graph; what torch.cuda's function of that name asks."""
    return torch._C._cuda_isCurrentStreamCapturing()


def stream_address(device: torch.device) -> int:
    """Tells the caller's stream from others (0 is CUDA's legacy default stream).

    It is ten times cheaper than comparing stream objects.
    """
    return torch._C._cuda_getCurrentRawStream(device.index or 0)


def is_plain_tensor(tensor: Tensor) -> bool:
    """No subclass (Parameters count as plain): a subclass hides its storages."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def autocast_functions() -> tuple[Any, Any]:
    """(enter, exit): the graph nodes between which autocast is on."""
    autocast = torch.amp.autocast_mode
    return autocast._enter_autocast, autocast._exit_autocast


def grad_mode_function() -> Any:
    return torch._C._set_grad_enabled


def is_higher_order(target: Any) -> bool:
    """An op that runs graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def droppable_functions() -> frozenset[Any]:
    """Graph nodes without effect on an inference graph: grad mode switches and usage logging."""
    return frozenset({torch._C._set_grad_enabled, torch._C._log_api_usage_once})


def inner_graphs(gm: GraphModule, names: Iterable[str]) -> Iterator[GraphModule]:
    """Those attributes of `gm` that are graphs themselves (bodies of higher-order ops)."""
    found = (getattr(gm, name, None) for name in names)
    return (inner for inner in found if isinstance(inner, GraphModule))
