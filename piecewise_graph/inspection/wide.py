"""The reference: one trace in float64.

Segments run node by node. Their floats are wide from the first node on, and a cast to a 16 or 32-bit float is
a cast to the wide type. A node that has no kernel for it runs in its own precision, and so do splitting ops
that write (a KV cache, an `out`); their results are widened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program, run_steps
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.inspection.steps import See, made_by_op, made_by_segment
from piecewise_graph.sizes import Sizes, overwrite
from piecewise_graph.splitter.split_graph import OpCall, OpStep, Ref, SegmentStep
from piecewise_graph.splitter.splitting_ops import written_arguments

_NARROW = (torch.float16, torch.bfloat16, torch.float32)
_CASTS = ("float", "half", "bfloat16")


def wide_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has none."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def run_wide(program: Program, args: Sequence[Any], sizes: Sizes, dtype: torch.dtype, see: See) -> list[Any]:
    """Run the trace in `dtype`, and show what every step made."""
    place = {id(call): i for i, step in enumerate(program.split.steps) if isinstance(step, OpStep)
             for call in step.calls}  # fmt: skip

    def run_segment(step: SegmentStep, segment: CompiledSegment, inputs: list[Any]) -> Sequence[Tensor]:
        widened = [_cast(value, dtype) for value in inputs]
        with _torch.functions_of_wrappers(step.gm):
            outputs = _Wide(step.gm, dtype).run(*widened)
        for index in segment.facts.written:
            if widened[index] is not inputs[index]:
                overwrite(inputs[index], widened[index])
        for slot, tensor in made_by_segment(step, segment, outputs):
            see(step.index, slot, tensor)
        return list(outputs)

    def run_op(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = _run_op(call, args, kwargs, program, dtype)
        for slot, tensor in made_by_op(call, result, args, kwargs, program):
            see(place[id(call)], slot, _cast(tensor, dtype))
        return result

    return run_steps(
        program,
        args,
        sizes,
        run_segment=run_segment,
        run_op=run_op,
        settle=lambda op, result, spec, sizes: _cast(result, dtype),
    )


def _run_op(
    call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], program: Program, dtype: torch.dtype
) -> Any:
    leaves, structure = _torch.flatten((args, kwargs))
    if not written_arguments(call.target):
        wide_args, wide_kwargs = _torch.unflatten([_cast(leaf, dtype) for leaf in leaves], structure)
        with suppress(RuntimeError, TypeError, ValueError):  # it has no kernel for the wide type
            return call.target(*wide_args, **wide_kwargs)
    items, _ = _torch.flatten((call.args, call.kwargs))
    own = [
        _cast(value, program.split.spec(item.slot).dtype, of=(dtype,)) if isinstance(item, Ref) else value
        for value, item in zip(leaves, items, strict=True)
    ]
    own_args, own_kwargs = _torch.unflatten(own, structure)
    result = call.target(*own_args, **own_kwargs)
    for value, lowered in zip(leaves, own, strict=True):
        _carry_over(lowered, value)
    return result


class _Wide(Interpreter):
    """Runs a segment with every 16 and 32-bit float in a wider type."""

    def __init__(self, gm: GraphModule, dtype: torch.dtype) -> None:
        super().__init__(gm)
        self.dtype = dtype

    def run_node(self, n: Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return _cast(super().run_node(n), self.dtype)
        try:
            return self._call(n, self.env, wide=True)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError):
            own = {node: _cast(value, _dtype_of(node), of=(self.dtype,)) for node, value in self.env.items()
                   if node in n.all_input_nodes}  # fmt: skip
            result = self._call(n, own, wide=False)
            for node, lowered in own.items():
                _carry_over(lowered, self.env[node])
        leaves, structure = _torch.flatten(result)
        return _torch.unflatten([_cast(leaf, self.dtype) for leaf in leaves], structure)

    def _call(self, n: Node, values: Mapping[Node, Any], *, wide: bool) -> Any:
        args = torch.fx.node.map_arg(n.args, values.__getitem__)
        kwargs = torch.fx.node.map_arg(dict(n.kwargs), values.__getitem__)
        target = n.target
        if wide:
            args, kwargs = self._widened(args), self._widened(kwargs)
            target = "to" if n.op == "call_method" and target in _CASTS else target
            args = (args[0], self.dtype) if target != n.target else args
        return getattr(self, n.op)(target, args, kwargs)

    def _widened(self, arguments: Any) -> Any:
        leaves, structure = _torch.flatten(arguments)
        return _torch.unflatten([self._wide(leaf) for leaf in leaves], structure)

    def _wide(self, leaf: Any) -> Any:
        return self.dtype if isinstance(leaf, torch.dtype) and leaf in _NARROW else leaf


def _carry_over(lowered: Any, wide: Any) -> None:
    """Bring what was written to a copy of lower precision to the wide tensor; unwritten ones keep theirs."""
    if lowered is not wide and not torch.equal(lowered, wide.to(lowered.dtype)):
        overwrite(wide, lowered)


def _dtype_of(node: Node) -> torch.dtype | None:
    return getattr(_torch.example_value(node), "dtype", None)


def _cast(value: Any, dtype: torch.dtype | None, of: Sequence[torch.dtype] = _NARROW) -> Any:
    """`value` in `dtype` where it is a tensor of one of the types `of`; else itself, as wrappers are."""
    is_one = isinstance(value, Tensor) and not _torch.is_wrapper(value)
    is_one = is_one and dtype is not None and value.dtype in of
    return value.to(dtype) if is_one else value
