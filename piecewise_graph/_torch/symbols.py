"""Sizes as symbols: the ShapeEnv of a trace, and what the trace assumes of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._sympy.symbol import SymT, symbol_is_type

from piecewise_graph._torch.graphs import example_value, source_text


def shape_env_of(gm: GraphModule) -> Any | None:
    """The ShapeEnv of the graph's fake tensors and sizes; None for a graph that has neither."""
    values = (example_value(node) for node in gm.graph.nodes)
    owners = (getattr(value, "fake_mode", getattr(value, "node", None)) for value in values)
    return next(filter(None, (getattr(owner, "shape_env", None) for owner in owners)), None)


def shape_guards(shape_env: Any) -> tuple[sympy.Basic, ...]:
    """The boolean expressions over size symbols that the trace relies on, so far.

    A symbol that was later found to equal another one stands in none of them, as it stands in no shape.
    """
    conditions = (shape_env.replace(guard.expr) for guard in shape_env.guards)
    return tuple(condition for condition in conditions if condition.free_symbols)


def guards_since(shape_env: Any, given: int) -> list[sympy.Basic]:
    """What the trace relies on beyond its first `given` guards, in the symbols of the time of each."""
    return [guard.expr for guard in shape_env.guards[given:]]


def found_sizes(shape_env: Any, symbols: Iterable[sympy.Symbol]) -> list[sympy.Basic]:
    """Of each symbol that the trace has taken for a number or for another symbol: the equation that says so.

    `shape_guards` has nothing about it.
    """
    found = shape_env.replacements
    return [sympy.Eq(symbol, found[symbol]) for symbol in symbols if symbol in found]


def takes_all_sizes(gm: GraphModule) -> bool:
    """Each size and number that Dynamo made a symbol of is an argument of the graph, or a size of one.

    Others steered the trace and left the graph, or never entered it, or were found to be one number or to
    follow from others: only Dynamo's own guards check them. So are strides, which results inherit. Where an
    argument is a view, the sizes of what it views have symbols too, which no forward asks for.
    """
    from torch._dynamo.source import TensorProperty
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    fake_mode = context.fake_mode if context is not None else None
    shape_env = fake_mode.shape_env if fake_mode is not None else None  # a graph that takes nothing has none
    if shape_env is None:
        return True
    arguments = [node.meta.get("grapharg") for node in gm.graph.nodes if node.op == "placeholder"]
    taken = {source_text(arg.source) for arg in arguments if arg is not None}

    def is_taken(symbol: sympy.Symbol, source: Any) -> bool:
        tensor, prop = getattr(source, "base", source), getattr(source, "prop", None)
        if source_text(tensor) in taken and prop is TensorProperty.SIZE:
            return True
        if prop is TensorProperty.STRIDE:
            return False
        stands_for = shape_env.replace(symbol)
        if source_text(source) in taken:
            return bool(stands_for.is_Symbol)
        return source_text(tensor) in taken and not stands_for.is_number

    return all(
        symbol.is_integer and is_taken(symbol, source)
        for symbol, sources in shape_env.var_to_sources.items()
        for source in sources
        if "._base." not in source_text(source)
    )


def value_range(shape_env: Any, symbol: sympy.Symbol) -> tuple[int | None, int | None]:
    """(lowest, highest) value of a size symbol for which the trace is valid; None where unbounded."""
    bounds = shape_env.var_to_range[symbol]
    return tuple(int(b) if b.is_Integer else None for b in (bounds.lower, bounds.upper))  # type: ignore[return-value]


def expression(value: Any) -> sympy.Expr:
    """The sympy expression of an int, a SymInt, a SymBool or an expression."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymBool)) else sympy.sympify(value)


def size_of(shape_env: Any, expr: sympy.Expr) -> int | torch.SymInt:
    """The size that an expression over symbols stands for."""
    return int(expr) if expr.is_Integer else shape_env.create_symintnode(expr, hint=None)


def has_float_steps(size: torch.SymInt | torch.SymBool | sympy.Expr) -> bool:
    """The size is computed by way of floats (`int(x.shape[0] * 0.5)`); `add_size` cannot write that down."""
    steps = expression(size).atoms(sympy.Float, sympy.Function)
    return any(not step.is_integer or type(step).__name__.endswith("ToInt") for step in steps)


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


def has_unknown_size(tensor: Tensor) -> bool:
    """Some size of a fake tensor depends on data (an unbacked symbol that its op made)."""
    symbols = set().union(*(expression(size).free_symbols for size in tensor.shape))
    return any(symbol_is_type(symbol, SymT.UNBACKED_INT) for symbol in symbols)


def size_hint(shape_env: Any, symbol: sympy.Symbol) -> int | None:
    """The value of a size symbol while tracing; None for one that has none (unbacked)."""
    value = shape_env.backed_var_to_val.get(symbol)
    return None if value is None else int(value)


def is_fixed(shape_env: Any, symbol: sympy.Symbol) -> bool:
    """A trace has taken the symbol for a number: it holds for that number alone."""
    return symbol in shape_env.replacements and shape_env.replacements[symbol].is_number


def holds(shape_env: Any, condition: sympy.Basic) -> bool:
    """Whether a condition on sizes is true of the values while tracing; assumes nothing."""
    return bool(condition.xreplace(shape_env.backed_var_to_val) == sympy.true)


def assume(shape_env: Any, condition: sympy.Basic) -> None:
    """Make a condition that holds part of what the trace relies on."""
    shape_env.evaluate_expr(condition)


@contextmanager
def conditions_undone(shape_env: Any) -> Iterator[None]:
    """What work on the trace assumes of its sizes inside of the block is forgotten at its end."""
    guards, ranges = list(shape_env.guards), dict(shape_env.var_to_range)
    replacements, divisible = dict(shape_env.replacements), set(shape_env.divisible)
    try:
        yield
    finally:
        shape_env.guards[:] = guards
        for kept, was in ((shape_env.var_to_range, ranges), (shape_env.replacements, replacements)):
            kept.clear()
            kept.update(was)
        shape_env.divisible.clear()
        shape_env.divisible.update(divisible)
        shape_env._update_version_counter()
