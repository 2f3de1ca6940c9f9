"""Whether the trace of many tokens is also the trace of one (Note [One trace] in frontend/compile.py).

A dynamic size is assumed to be at least 2 while it is traced, so `if T > 1`, `bool(T - 1)` or `x.squeeze(0)`
are decided for T >= 2 and leave neither a guard nor a branch behind. What they decided shows in two places. A
trace at T = 1 has other calls, other constants or other shapes. Or Dynamo's code does something else with the
results of the graph: it returns them in another order, beside other constants, or stores them elsewhere.
"""

from __future__ import annotations

import dis
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.runtime.side_channel import TracedOnly
from piecewise_graph.sizes import is_scalar

Signature = tuple[Any, ...]
_MAX_TRACES = 8
# Names that each code of Dynamo has for itself, and what tells its names of objects from those of another.
_OWN_NAMES = re.compile(r"\b(tmp|__compiled_fn)_\w+|_c[0-9]+\b")


def is_of_transformers(model: Any) -> bool:
    """Its models do the same with one token (Note [One trace] in frontend/compile.py). So do adapters."""
    if type(model).__module__.startswith("peft.") and _only_adapts_layers(model):
        model = model.get_base_model()
    return type(model).__module__.startswith("transformers.")


def _only_adapts_layers(model: Any) -> bool:
    """Prompt learning adds tokens to the input, other adapters add to what a layer returns."""
    configs = getattr(model, "peft_config", {}).values()
    return bool(configs) and not any(config.is_prompt_learning for config in configs)


class OneTokenTraces:
    """What Dynamo makes of a model's calls of one token, which are not run.

    Each trace has Dynamo's guards. What the model asks only where it has one token (a flag, another argument)
    is not guarded by the trace of several tokens.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self._noting = _Noting()
        self._trace = torch.compile(model, backend=self._noting, dynamic=False, fullgraph=True)
        self._failures = 0

    def signature(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
        """Of the trace that fits this call; None where Dynamo makes no graph of it, or too many of others."""
        if self._noting.traces + self._failures >= _MAX_TRACES:
            return None
        try:
            self._trace(*args, **kwargs)
        except TracedOnly as stopped:
            (signatures,) = stopped.args
            return signatures[0]
        except RuntimeError:
            self._failures += 1
        else:
            self._failures = _MAX_TRACES  # without a graph it ran, and may not run twice again
        return None


class _Noting:
    """A backend whose code tells a trace's signature in place of running it.

    Dynamo holds it as long as the code that was traced, so it may not hold the model.
    """

    traces = 0

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., NoReturn]:
        signatures: list[Signature] = []
        note_signature(signatures, gm)
        self.traces += 1

        def stop(*_: Any) -> NoReturn:
            raise TracedOnly(signatures)

        return stop


def note_signature(signatures: list[Signature], gm: GraphModule) -> None:
    """Append the signature of the trace that Dynamo makes a backend's argument of.

    What Dynamo's code does with the results follows when that code is made.
    """
    calls, place, results = _calls(gm), len(signatures), _results(gm)
    signatures.append(calls)

    def note_code(code: CodeType) -> None:
        if signatures[place:] == [calls]:  # Dynamo was not reset since
            signatures[place] = (*calls, *_after_graph(code, results))

    _torch.await_code(note_code)


def _calls(gm: GraphModule) -> Signature:
    """The graph's calls with their constants and shapes, every size replaced by its value at one token.

    The last is what the graph returns, apart from sizes.
    """
    numbers: dict[Node, int] = {}
    calls: list[Any] = []
    for node in gm.graph.nodes:
        value = _torch.example_value(node)
        if node.op in ("call_function", "call_method") and not is_scalar(value):
            operands = map_arg((node.args, dict(node.kwargs)), lambda arg: _operand(arg, numbers))
            numbers[node] = len(calls)
            calls.append((node.op, _target(node), repr(_plain(operands)), _shapes(value)))
    returned: Any = gm.graph.output_node().args[0]
    tensors = [x for x in returned if isinstance(x, Node) and not is_scalar(_torch.example_value(x))]
    return *calls, tuple(_operand(node, numbers) for node in tensors)


def _results(gm: GraphModule) -> list[str]:
    """The results of a graph, in order: a size as it is at one token, tensors by number."""
    tensor = itertools.count()
    return [
        _at_one(value) if is_scalar(value) else f"tensor {next(tensor)}"
        for value in _torch.returned_values(gm)
    ]


def _after_graph(code: CodeType, results: Sequence[str]) -> Iterator[str]:
    """What code of Dynamo does when the graph has returned, as text; results by their names in `results`."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("PRECALL", "CACHE")]
    stored = [i for i, step in enumerate(steps) if step.opname == "STORE_FAST" and _is_output(step)]
    calls = [i for i, step in enumerate(steps) if step.opname.startswith("CALL")]
    rest = iter(steps[max(stored or calls, default=-1) + 1 :])
    for step in rest:
        if step.opname.startswith("LOAD_") and _is_output(step):
            index = next(rest, step).argval
            next(rest, None)  # takes the item
            yield results[index] if index in range(len(results)) else str(index)
        elif step.opname.startswith("LOAD_") and isinstance(step.argval, int):
            yield step.argrepr
        elif "JUMP" in step.opname or step.opname == "FOR_ITER":
            yield step.opname  # where to depends on the code before the graph
        elif not _is_output(step):
            yield f"{step.opname} {_OWN_NAMES.sub('', step.argrepr)}"


def _is_output(step: dis.Instruction) -> bool:
    """It concerns the variable that Dynamo keeps a graph's results in."""
    return str(step.argval).startswith("graph_out_")


def _target(node: Node) -> str:
    """What a node calls. Torch 2.11 makes a function for each call of a method of DTensor, "prim m"."""
    function = node.target
    if not isinstance(function, FunctionType) or not function.__name__.startswith("prim"):
        return str(function)
    held = [str(_plain(_at_one(cell.cell_contents))) for cell in function.__closure__ or ()]
    return f"{function.__qualname__} {function.__name__} {[text for text in held if ' at 0x' not in text]}"


def _operand(node: Node, numbers: dict[Node, int]) -> Any:
    """A size as the number it is for one token, a tensor as the number of the call that made it."""
    value = _torch.example_value(node)
    if is_scalar(value):
        return _at_one(value)
    return f"call {numbers[node]}" if node in numbers else _torch.placeholder_source(node)[0]


def _plain(operands: Any) -> Any:
    """Numbers as text, as `_at_one` writes sizes; torch.Size as the tuple that it is."""
    if isinstance(operands, (tuple, list)):
        return tuple(map(_plain, operands))
    if isinstance(operands, dict):
        return {name: _plain(value) for name, value in operands.items()}
    if isinstance(operands, slice):
        return "slice", _plain((operands.start, operands.stop, operands.step))
    return str(operands)


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(map(_at_one, value.shape))
    return tuple(map(_shapes, value)) if isinstance(value, (tuple, list)) else None


def _at_one(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(map(_at_one, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expr = value.node.expr
        try:
            value = expr.xreplace({symbol: sympy.Integer(1) for symbol in expr.free_symbols})
        except ZeroDivisionError:  # x // (T - 1): no trace at one token has that
            value = "undefined"
    return str(value)
