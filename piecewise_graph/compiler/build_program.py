"""Dynamo's graph -> Program: merge, split and compile, then derive what dispatch and capture need to know."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.blocked import WITHOUT_BUCKETS, blocked, blocked_at_any_size
from piecewise_graph.compiler.fixed_sizes import Fixed, with_fixed_sizes
from piecewise_graph.compiler.judge import ProvedGraph
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.prove_padding import Unproved, prove_padding
from piecewise_graph.compiler.segments import CompiledSegment, compile_split
from piecewise_graph.compiler.specialize import specialized
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.errors import LeakWarning
from piecewise_graph.sizes import ShapeContract, Sizes, evaluate, relaxed_range
from piecewise_graph.splitter.merge_linears import merge_linears
from piecewise_graph.splitter.merged_weights import Merge
from piecewise_graph.splitter.source_names import readable_source
from piecewise_graph.splitter.split import Unsplittable
from piecewise_graph.splitter.split_graph import Ref, SegmentStep, SplitGraph, references
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments

log = logging.getLogger(__name__)


def build_program(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program | str:
    """The program of one trace, or the reason why the trace must be compiled as one graph.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its arguments; with `merge_linears` its parameters are moved.
        compiled: structures by key, shared by the traces of one model; grows here.
    """
    reason = _keeps_whole(gm, example_inputs)
    if reason is not None:
        return reason
    is_whole = _torch.takes_all_sizes(gm)  # asked before segments are compiled, which may add sizes
    merged, merge = merge_linears(gm, example_inputs) if config.merge_linears else (gm, Merge())
    try:
        proved = _proved(merged, example_inputs, config)
    except Unsplittable as error:
        return error.reason
    graph = proved.split
    for op in graph.leaks:
        warnings.warn(LeakWarning.inside_segment(op), stacklevel=2)
    segments = compile_split(graph, config.compiler, compiled, config.cache_dir, proved.keys, proved.facts)
    writes, breaks = _writes_arguments(graph, segments), _torch.returns_intermediates(gm)
    token = graph.symbols[0] if len(graph.symbols) == 1 else None
    contract = _contract(gm, graph, is_whole)
    program = Program(
        merged,
        graph,
        segments,
        contract,
        token,
        None if contract.symbols else _static_tokens(graph),
        _device(graph),
        _last_use(graph, segments),
        blocked(graph, segments, writes, breaks),
        writes,
        proved.unproved,
        proved.unpaddable,
        merge,
        breaks,
        tuple(map(readable_source, _torch.changed_objects())),
    )
    _report(program)
    return specialized(program, example_inputs, config, compiled)


def without_uncapturable(
    program: Program,
    uncapturable: Mapping[str, str],
    args: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program | None:
    """The program with these nodes cut out of its segments; None where that is impossible, or no news.

    Args:
        uncapturable: names of nodes of `program.traced` that no graph can hold, and why.
        args, config, compiled: see `build_program`; of `args` only what graphs read by address is used.
    """
    known = {**program.uncapturable, **uncapturable}
    if len(known) == len(program.uncapturable):
        return None
    return _split_anew(program, program.traced, known, args, config, compiled)


def at_batch(
    program: Program,
    sizes: Sizes,
    args: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program | None:
    """The program with the symbols of `sizes` taken for numbers; None where no graph can hold it.

    Args:
        args, config, compiled: see `without_uncapturable`.
    """
    traced, fixed = fixed_in_a_call(program, sizes), replace(program, fixed=dict(sizes))
    return _split_anew(fixed, traced, program.uncapturable, args, config, compiled)


def fixed_in_a_call(program: Program, sizes: Fixed) -> GraphModule:
    """The program's trace with the symbols of `sizes` fixed."""
    with _torch.functions_while_tracing():
        return with_fixed_sizes(program.traced, sizes)


def _split_anew(
    program: Program,
    traced: GraphModule,
    uncapturable: Mapping[str, str],
    args: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program | None:
    """`program` for another form of its trace, made in the middle of a call."""
    with _torch.functions_while_tracing():
        try:
            proved = _proved(traced, args, config, uncapturable)
        except Unsplittable:
            return None
        graph = proved.split
        segments = compile_split(
            graph, config.compiler, compiled, config.cache_dir, proved.keys, proved.facts
        )
        writes = _writes_arguments(graph, segments)
        contract = _contract(traced, graph, program.contract.is_whole)
        made = replace(
            program,
            traced=traced,
            split=graph,
            compiled=segments,
            contract=contract,
            token=graph.symbols[0] if len(graph.symbols) == 1 else None,
            static_tokens=None if contract.symbols else _static_tokens(graph),
            last_use=_last_use(graph, segments),
            blocked=blocked(graph, segments, writes, program.breaks),
            writes_arguments=writes,
            unproved=proved.unproved,
            unpaddable=proved.unpaddable,
            uncapturable=uncapturable,
        )
        _report(made)
        return None if made.blocked else specialized(made, args, config, compiled)


def _proved(
    gm: GraphModule,
    args: Sequence[Any],
    config: PiecewiseConfig,
    uncapturable: Mapping[str, str] | None = None,
) -> ProvedGraph:
    unproved, largest = _for_unproved(config), max(config.sizes)
    return prove_padding(
        gm, args, config.compiler, largest, unproved=unproved, uncapturable=uncapturable or {}
    )


def _report(program: Program) -> None:
    graph = program.split
    ops = ", ".join(f"{count} x {name}" for name, count in Counter(c.op.name for c in graph.op_calls).items())
    log.info(
        "split into %d steps: %d segments, %d of them distinct, %s; replayed: %s", len(graph.steps),
        len(graph.segments), len(program.distinct), ops or "no splitting op", program.blocked or "yes",
    )  # fmt: skip


def _for_unproved(config: PiecewiseConfig) -> Unproved:
    """Without graphs, a cut would only make more segments."""
    if config.padding == "tried":
        return "tried"
    return "exact" if config.cuda_graphs == "off" else "cut"


def with_activations(program: Program, indices: Collection[int]) -> Program:
    """The program with arguments that were read by address copied instead, as activations are.

    One that is written in place blocks replays: a replay would write the copy.
    """
    inputs = tuple(
        replace(given, bound=given.bound and index not in indices)
        for index, given in enumerate(program.split.inputs)
    )
    graph = replace(program.split, inputs=inputs)
    writes = _writes_arguments(graph, program.compiled)
    why = program.blocked or blocked(graph, program.compiled, writes, program.breaks)
    return replace(program, split=graph, blocked=why, writes_arguments=writes)


def has_exact_sizes(program: Program) -> bool:
    """The trace has no buckets, and graphs can hold each combination of its sizes (`at_sizes`)."""
    graph, known = program.split, set(program.contract.symbols)
    return (
        program.blocked in WITHOUT_BUCKETS
        and all(spec.symbols <= known for spec in graph.specs if spec is not None)
        and not blocked_at_any_size(graph, program.compiled, program.writes_arguments, program.breaks)
    )


def at_sizes(program: Program, sizes: Sizes) -> Program:
    """The program for one combination of its sizes."""
    tokens = _static_tokens(program.split, sizes)
    return replace(program, token=None, fixed=dict(sizes), static_tokens=tokens, blocked=None)


def _keeps_whole(gm: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Why a trace must be compiled as one graph."""
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "grad_enabled"
    switch = _torch.grad_mode_function()
    turns_on = any(node.target is switch and node.args == (True,) for node in gm.graph.nodes)
    if turns_on and not torch.is_grad_enabled():
        return "grad_enabled_inside"
    if not all(map(_torch.is_plain_tensor, tensors)):
        return "tensor_subclass"
    kinds = {x.device.type for x in tensors if torch.amp.is_autocast_available(x.device.type)}
    return "autocast" if any(map(torch.is_autocast_enabled, kinds)) else None


def _contract(gm: GraphModule, graph: SplitGraph, is_whole: bool) -> ShapeContract:
    shape_env = _torch.shape_env_of(gm)
    symbolic = _symbolic_dims(gm)
    dims = [
        (index, dim, size)
        for index, spec in graph.activations
        for dim, size in enumerate(spec.shape)
        if (index, dim) in symbolic
    ]
    sources: dict[sympy.Symbol, tuple[int, int | None]] = {
        given.symbol: (index, None) for index, given in enumerate(graph.inputs) if given.symbol is not None
    }
    sources.update((size, (index, dim)) for index, dim, size in reversed(dims) if size.is_Symbol)
    known = [symbol for symbol in graph.symbols if symbol in sources]
    guards = _torch.shape_guards(shape_env) if shape_env is not None else ()
    return ShapeContract(
        tuple(known),
        tuple(sources[symbol] for symbol in known),
        tuple(dims),
        tuple(guard for guard in guards if guard.free_symbols <= set(known)),
        tuple(relaxed_range(_torch.value_range(shape_env, symbol)) for symbol in known),
        tuple(given.name for given in graph.inputs),
        is_whole,
    )


def _symbolic_dims(gm: GraphModule) -> frozenset[tuple[int, int]]:
    """(argument index, dim) of the sizes that Dynamo made a symbol of, also where it is one number by now.

    Dynamo's guards on a tensor check the other sizes.
    """
    return frozenset(
        (index, dim)
        for index, value in enumerate(_torch.argument_values(gm))
        if isinstance(value, Tensor)
        for dim, size in enumerate(value.shape)
        if isinstance(size, torch.SymInt)
    )


def _static_tokens(graph: SplitGraph, sizes: Sizes | None = None) -> int:
    """Token count of a trace of fixed shapes, or at `sizes`, for limits and reports: its longest activation.

    The last dimension of a float activation holds features; integer ones (ids, positions) have none.
    """
    specs = [spec for _, spec in graph.activations]
    integer = [spec.shape for spec in specs if not spec.dtype.is_floating_point]
    floating = [spec.shape[: max(len(spec.shape) - 1, 1)] for spec in specs]
    return max((evaluate(x, sizes or {}) for shape in integer or floating for x in shape[:2]), default=1)


def _device(graph: SplitGraph) -> torch.device:
    devices = [given.spec.device for given in graph.inputs if given.spec is not None]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))


def _last_use(graph: SplitGraph, segments: Mapping[int, CompiledSegment]) -> dict[int, int]:
    """Last reader of every slot, where a view keeps what it views alive."""
    steps = graph.steps
    last = dict.fromkeys(references(graph.outputs), len(steps))
    for index in reversed(range(len(steps))):
        step = steps[index]
        until = index
        if isinstance(step, SegmentStep):
            read = references(step.inputs)
            facts = segments[step.index].facts
            if facts.entangled_outputs or not facts.computes:
                until = max([index, *(last.get(slot, index) for slot in step.outputs)])
        else:
            read = [slot for call in step.calls for slot in references((call.args, call.kwargs))]
        for slot in read:
            last[slot] = max(last.get(slot, until), until)
    return last


def _writes_arguments(graph: SplitGraph, segments: Mapping[int, CompiledSegment]) -> bool:
    """A segment or an op writes an argument that replays would copy.

    Tensors that are bound by address may be written (a KV cache in a module's buffer): it is the real one.
    """
    by_segments = [
        item.slot
        for step in graph.segments
        for index in segments[step.index].facts.written
        if isinstance(item := step.inputs[index], Ref)
    ]
    by_ops = [
        slot
        for call in graph.op_calls
        for name, value in bind_arguments(call.target, call.args, call.kwargs)
        if name in written_arguments(call.target)
        for slot in references(value)
    ]
    return any(not given.bound for given in graph.arguments_sharing_storage([*by_ops, *by_segments]))
