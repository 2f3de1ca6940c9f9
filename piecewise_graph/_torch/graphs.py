"""What Dynamo says of the graph that it hands to a backend: values, sources, effects, errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import is_opaque_value_type
from torch.fx import GraphModule, Node


def example_value(node: Node) -> Any:
    """What Dynamo saw flow out of `node`: FakeTensor, SymInt, torch.Size, ... or None."""
    return node.meta.get("example_value")


def is_opaque(value: Any) -> bool:
    """An object that torch passes through a graph as it is: a registered opaque type, a script object."""
    return isinstance(value, (FakeScriptObject, torch.ScriptObject))


def real_object(value: Any) -> Any:
    """The object that an opaque value of a trace stands for."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def may_keep_state(value: Any) -> bool:
    """An opaque object that an op may change: torch compares it by identity, not by what it holds."""
    return is_opaque(value) and not is_opaque_value_type(type(real_object(value)))


def comparable(value: Any) -> Any:
    """What an opaque argument is compared by: a registered value by `==`, any other object by identity."""
    return value if is_opaque_value_type(type(value)) else SameObject(value)


@dataclass(frozen=True, eq=False)
class SameObject:
    """Equal to those of the same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def argument_values(gm: GraphModule) -> list[Any]:
    """`example_value` of each argument of the graph, in order."""
    return [example_value(node) for node in gm.graph.find_nodes(op="placeholder")]


def returned_values(gm: GraphModule) -> list[Any]:
    """`example_value` of each result of the graph, in order."""
    results: Any = gm.graph.output_node().args[0]
    return [example_value(item) if isinstance(item, Node) else item for item in results]


def fake_mode_of(gm: GraphModule) -> Any | None:
    modes = (getattr(example_value(node), "fake_mode", None) for node in gm.graph.nodes)
    return next((mode for mode in modes if mode is not None), None)


def placeholder_source(node: Node) -> tuple[str, bool]:
    """(source text such as `L['self']._parameters['w']`, whether it is a tensor of a module or a global)."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return node.name, False
    name = source_text(source)
    where = source.guard_source if not callable(source.guard_source) else source.guard_source()
    of_module = "NN_MODULE" in where.name or where.name.startswith("GLOBAL")
    return name, of_module and not name.startswith("___from_numpy")  # an array's tensor is made by each call


@dataclass(frozen=True)
class OpenFloat:
    """A float that Dynamo left open: an argument of the graph that holds it as a tensor, and reads it back.

    Attributes:
        symbol: its name among the symbols of the trace.
        source: where it comes from, as text.
        value: in the call that is traced.
    """

    symbol: str
    source: str
    value: float


def open_floats(gm: GraphModule) -> list[OpenFloat]:
    """The floats of a trace that Dynamo left open, could take for constants, and was not asked to."""
    from torch._dynamo.symbolic_convert import TensorifyState

    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        memo = getattr(example_value(node), "item_memo", None)
        if isinstance(memo, torch.SymFloat) and all(user.target == "item" for user in node.users):
            source, _ = placeholder_source(node)
            found.append(OpenFloat(str(memo.node._expr), source, float(memo.node.hint)))
    return [each for each in found if not TensorifyState.should_specialize(each.symbol)]


def trace_with_constants(floats: Sequence[OpenFloat]) -> NoReturn:
    """Have Dynamo trace the function anew, and take these for constants; it guards their values."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    for each in floats:
        TensorifyState.specialize(each.symbol)
    raise TensorifyScalarRestartAnalysis(restart_reason="floats are constants in graphs")


@contextmanager
def constants_of_one_trace() -> Iterator[None]:
    """Around the compilation of one trace: afterwards torch forgets which floats were asked to be constants.

    It goes by the names of their symbols, which the next trace uses for others. Compilation may itself have
    Dynamo trace anew for constants (Inductor does); then both are remembered.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    try:
        yield
    except TensorifyScalarRestartAnalysis:
        raise
    except BaseException:
        TensorifyState.clear()
        raise
    TensorifyState.clear()


def is_marked_static(node: Node) -> bool:
    """The argument is one whose address its owner keeps (`torch._dynamo.mark_static_address`)."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {})


def module_source(node: Node) -> str:
    """Source of the innermost module that called what `node` calls, such as `L['self'].layers.0`; or ""."""
    stack = node.meta.get("nn_module_stack") or {"": ("", None)}
    return str(next(reversed(stack.values()))[0])


def assigned_attributes() -> frozenset[str]:
    """Source texts of the attributes that the traced code assigns, such as `L['self'].state`."""
    output = graph_in_the_making()
    if output is None:
        return frozenset()
    found = set()
    for owner, names in output.side_effects.store_attr_mutations.items():
        with suppress(AttributeError, NotImplementedError):  # made in the frame
            found |= {f"{source_text(owner.source)}.{name}" for name in names}
    return frozenset(found)


_OF_TRANSFORMERS = "G['__import_transformers_dot_"


def changed_objects() -> tuple[str, ...]:
    """Source texts of what the traced code changes in Python: `L['self']` of the caller's, globals, classes.

    Dynamo makes these changes after every call of its graph. Left out are the containers of `*args` and
    `**kwargs`, and globals of transformers, which sets a context variable, and sets it back.
    """
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    output = graph_in_the_making()
    if output is None:
        return ()
    code, effects = output.root_tx.f_code, output.side_effects
    of_call = {f"L['{name}']" for name in code.co_varnames[code.co_argcount + code.co_kwonlyargcount :]}
    made_here = (AttributeMutationNew, ValueMutationNew)
    given = [item for item in effects.id_to_variable.values() if item.source is not None]
    changed = [x for x in given if not isinstance(x.mutation_type, made_here) and _is_changed(x, output)]
    texts = {source_text(item.source) for item in changed}
    return tuple(sorted(text for text in texts - of_call if text and not text.startswith(_OF_TRANSFORMERS)))


def _is_changed(item: Any, output: Any) -> bool:
    """An attribute that gets the constant that it has, at the end of the trace, is not changed.

    Nor is a dict whose entries are what they were (transformers puts other tensors in the place of parameters
    while a module runs).
    """
    effects, its_globals, missing = output.side_effects, output.root_tx.f_globals, object()
    assigned = effects.store_attr_mutations.get(item)
    if not assigned:
        return bool(effects.is_modified(item)) and not _is_as_it_was(item)
    holder = getattr(item, "value", None)  # None: the variable stands for the globals
    for name, value in assigned.items():
        now = its_globals.get(name, missing) if holder is None else getattr(holder, name, missing)
        if not value.is_python_constant() or repr(value.as_python_constant()) != repr(now):
            return True
    return False


def _is_as_it_was(item: Any) -> bool:
    from torch._dynamo.variables import ConstDictVariable

    is_dict = isinstance(item, ConstDictVariable) and len(item.items) == len(item.original_items)
    return is_dict and not item.has_new_items()


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


def ending_like(gm: GraphModule, other: GraphModule) -> GraphModule:
    """`other`, made of `gm`, with Dynamo's note of why the graph ends where it does."""
    other.compile_subgraph_reason = getattr(gm, "compile_subgraph_reason", None)  # type: ignore[assignment]
    return other


def source_text(source: Any) -> str:
    """The source as Dynamo writes it; "" of one without a name, such as a cell behind a graph break."""
    try:
        return source.name if isinstance(source.name, str) else source.name()
    except NotImplementedError:
        return ""


def graph_in_the_making() -> Any | None:
    """Dynamo's own object of the graph that it is tracing right now; None outside of a trace."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx().output
    except AttributeError:
        return None


def current_root_code() -> CodeType | None:
    """The code object whose frame Dynamo is compiling right now; None outside of a trace."""
    output = graph_in_the_making()
    return None if output is None else output.root_tx.f_code


def function_code(code: CodeType | None) -> CodeType | None:
    """The code of the function that `code` is a part of: what is behind a graph break has one of its own."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    known = ContinueExecutionCache.generated_code_metadata
    while code in known:
        code = known[code].code
    return code


_awaited: dict[CodeType, Callable[[CodeType], None]] = {}


def await_code(then: Callable[[CodeType], None]) -> None:
    """Have `then` called with the code that Dynamo makes of the frame being traced; for backends."""
    code = current_root_code()
    if code is not None:
        _watch_code()
        _awaited[code] = then


@cache
def _watch_code() -> None:
    from torch._dynamo.convert_frame import register_bytecode_hook

    def hook(code: CodeType, new_code: CodeType) -> Any:
        _awaited.pop(code, lambda new_code: None)(new_code)

    register_bytecode_hook(hook)


def original_callable(compiled: Any) -> Any | None:
    """What torch.compile wrapped: the module of an OptimizedModule, or the function."""
    module = getattr(compiled, "_orig_mod", None)
    return getattr(compiled, "_torchdynamo_orig_callable", None) if module is None else module


def is_compiled_in_place(module: Any) -> bool:
    """`module.compile(...)` was called."""
    return isinstance(module, torch.nn.Module) and module._compiled_call_impl is not None


def is_dynamo_control_flow(error: BaseException) -> bool:
    """Exceptions by which Dynamo restarts the trace in the making; Inductor raises some. Never swallow them.

    In the middle of a call there is no trace to restart: they are errors like others.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch._guards import TracingContext

    return isinstance(error, TorchDynamoException) and TracingContext.try_get() is not None


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


def publish_graph(name: str, gm: GraphModule) -> None:
    """Show a graph to depyf, which replaces the function called here by one that writes files."""
    from torch._dynamo.utils import lazy_format_graph_code

    lazy_format_graph_code(name, gm)
