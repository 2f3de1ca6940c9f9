"""SplitGraph -> CompiledGraph: one compile per distinct segment structure.

Note [Structure, not weights]
A segment takes its weights as arguments, so two layers whose graphs are equal up to names share one
compiled function. The key spells out everything that the compiled code depends on: ops, constants,
dtypes, devices, layouts, the pattern in which inputs share storage, and the ranges of size symbols,
with symbols renamed in order of appearance. Names of nodes, stack traces and the values that symbols
had while tracing are left out.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.analysis import SegmentFacts, analyse
from piecewise_graph.split_graph import SegmentStep, SplitGraph
from piecewise_graph.telemetry import counters


@dataclass(frozen=True)
class CompiledSegment:
    """One distinct structure.

    Attributes:
        key: hash of the structure (Note [Structure, not weights]).
        run: takes the segment's inputs, returns a sequence of tensors. For a segment without compute
            it is the graph itself.
        seconds: what compiling took.
        gm: kept so that the constants whose identity is in the key live as long as the key does.
    """

    key: str
    gm: GraphModule
    run: Callable[..., Sequence[Tensor]]
    facts: SegmentFacts
    seconds: float


@dataclass(frozen=True)
class CompiledGraph:
    """A SplitGraph whose segments can run; `segments[i]` belongs to `split.segments[i]`."""

    split: SplitGraph
    segments: Mapping[int, CompiledSegment]  # by SegmentStep.index

    @property
    def distinct(self) -> tuple[CompiledSegment, ...]:
        return tuple({s.key: s for s in self.segments.values() if s.facts.computes}.values())


def compile_split(split: SplitGraph, compiler: str, cache: dict[str, CompiledSegment]) -> CompiledGraph:
    """Compile every segment of `split`, each structure once.

    Args:
        cache: compiled structures by key, shared by the traces of one model; grows here.
    """
    segments = {}
    for step in split.segments:
        key = structure_key(step.gm, compiler)
        if key not in cache:
            cache[key] = _compile(step, key, compiler)
        segments[step.index] = cache[key]
    return CompiledGraph(split, segments)


def _compile(step: SegmentStep, key: str, compiler: str) -> CompiledSegment:
    inputs = [_torch.example_value(node) for node in _placeholders(step.gm)]
    facts = analyse(step.gm, inputs)
    if not facts.computes:
        return CompiledSegment(key, step.gm, step.gm.forward, facts, 0.0)
    # AOTAutograd mistakes two inputs of one storage, one of them written, for unrelated tensors.
    chosen = "eager" if facts.aliased_write else compiler
    _torch.publish_graph(f"segment_{step.index}", step.gm)
    began = time.perf_counter()
    run = _torch.compile_segment(step.gm, inputs, chosen)
    counters.add("compiles")
    return CompiledSegment(key, step.gm, run, facts, time.perf_counter() - began)


def structure_key(gm: GraphModule, compiler: str) -> str:
    """Hash of everything that code compiled from `gm` depends on."""
    return hashlib.sha256("\n".join(_KeyWriter(gm, compiler).lines()).encode()).hexdigest()[:16]


class _KeyWriter:
    def __init__(self, gm: GraphModule, compiler: str) -> None:
        self.gm, self.compiler = gm, compiler
        self.index = {node: i for i, node in enumerate(gm.graph.nodes)}
        self.symbols: dict[sympy.Symbol, sympy.Symbol] = {}
        self.storages: dict[int, int] = {}

    def lines(self) -> list[str]:
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.compiler, torch.__version__)
        body = [self._line(node) for node in self.gm.graph.nodes]
        return [repr(state), *body, *self._ranges()]

    def _line(self, node: Node) -> str:
        if node.op == "placeholder":
            return f"placeholder {self._value(_torch.example_value(node))}"
        if node.op == "get_attr":
            # Bodies and constants have no structure to compare: equal only where they are one object.
            return f"get_attr {id(getattr(self.gm, str(node.target)))}"
        return f"{node.op} {_target(node)} {self._operand(node.args)} {self._operand(node.kwargs)}"

    def _value(self, value: Any) -> str:
        if not isinstance(value, Tensor):
            return self._operand(value)
        storage = self.storages.setdefault(_torch.storage_id(value), len(self.storages))
        layout = [self._operand(list(part)) for part in (value.shape, value.stride())]
        offset = self._operand(value.storage_offset())
        kind = f"{type(value).__name__} {value.dtype} {value.device} {value.requires_grad}"
        return f"{kind} {layout} {offset} s{storage}"

    def _operand(self, value: Any) -> str:
        if isinstance(value, Node):
            return f"%{self.index[value]}"
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._expression(value.node.expr)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k}: {self._operand(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (tuple, list)):
            return f"{type(value).__name__}[" + ", ".join(map(self._operand, value)) + "]"
        if isinstance(value, slice):
            return f"slice{self._operand((value.start, value.stop, value.step))}"
        return f"{type(value).__name__}:{value!r}"

    def _expression(self, expr: sympy.Expr) -> str:
        for symbol in sorted(expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, sympy.Symbol(f"c{len(self.symbols)}"))
        return str(expr.xreplace(self.symbols))

    def _ranges(self) -> list[str]:
        shape_env = _torch.shape_env_of(self.gm)
        if shape_env is None:
            return []
        return [f"{new} {_torch.value_range(shape_env, old)}" for old, new in self.symbols.items()]


def _target(node: Node) -> str:
    target = node.target
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')} {target}".split(
        " at 0x"
    )[0]


def _placeholders(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if node.op == "placeholder"]
