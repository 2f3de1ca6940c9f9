"""Whether the trace of many tokens is also the trace of one (Note [One trace] in frontend/compile.py).

A dynamic size is assumed to be at least 2 while it is traced, so `if T > 1`, `bool(T - 1)` or `x.squeeze(0)`
are decided for T >= 2 and leave neither a guard nor a branch behind. What they decided shows in one place: a
trace at T = 1 has other calls, other constants or other shapes.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.sizes import is_scalar

Signature = tuple[Any, ...]


def is_of_transformers(model: Any) -> bool:
    """Its models do the same with one token (Note [One trace] in frontend/compile.py). So do adapters."""
    if type(model).__module__.startswith("peft.") and _only_adapts_layers(model):
        model = model.get_base_model()
    return type(model).__module__.startswith("transformers.")


def _only_adapts_layers(model: Any) -> bool:
    """Prompt learning adds tokens to the input, other adapters add to what a layer returns."""
    configs = getattr(model, "peft_config", {}).values()
    return bool(configs) and not any(config.is_prompt_learning for config in configs)


def signature(gm: GraphModule) -> Signature:
    """The graph's calls with their constants and shapes, every size replaced by its value at one token."""
    numbers: dict[Node, int] = {}
    calls: list[Any] = []
    for node in gm.graph.nodes:
        value = _torch.example_value(node)
        if node.op in ("call_function", "call_method") and not is_scalar(value):
            operands = map_arg((node.args, dict(node.kwargs)), lambda arg: _operand(arg, numbers))
            numbers[node] = len(calls)
            calls.append((node.op, _target(node), repr(_plain(operands)), _shapes(value)))
    return tuple(calls)


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
