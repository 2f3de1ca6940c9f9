"""Dynamo's graph -> Program: merge, split and compile, then derive what dispatch and capture need to know."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.blocked import blocked
from piecewise_graph.compiler.judge import ProvedGraph
from piecewise_graph.compiler.program import Program, written_slots
from piecewise_graph.compiler.prove_padding import Unproved, prove_padding
from piecewise_graph.compiler.segments import CompiledSegment, compile_split
from piecewise_graph.compiler.specialize import specialized
from piecewise_graph.compiler.view_or_copy import (
    Writes,
    copies_several_rows,
    decided_by_strides,
    writes_a_dropout,
    writes_of,
)
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.errors import LeakWarning
from piecewise_graph.ranks.exchange import ALONE, Ranks
from piecewise_graph.sizes import ShapeContract, Sizes, evaluate, relaxed_range
from piecewise_graph.splitter.decode_steps import with_attention_inside
from piecewise_graph.splitter.merge_linears import merge_linears
from piecewise_graph.splitter.merged_weights import Merge
from piecewise_graph.splitter.source_names import readable_source
from piecewise_graph.splitter.split import Unsplittable
from piecewise_graph.splitter.split_graph import SegmentStep, SplitGraph, references
from piecewise_graph.splitter.splitting_ops import (
    changes_shape_in_place,
    compile_ops_ahead,
)
from piecewise_graph.splitter.unread_numbers import without_unread_numbers

log = logging.getLogger(__name__)


def build_program(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
    ranks: Ranks = ALONE,
) -> Program | str:
    """The program of one trace, or the reason why the trace must be compiled as one graph.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its arguments; with `merge_linears` its parameters are moved.
        compiled: structures by key, shared by the traces of one model; grows here.
        ranks: the processes that run the trace together.
    """
    writes = writes_of(gm)
    reason = _keeps_whole(gm, example_inputs, writes)
    if reason is not None:
        return reason
    # Asked before segments are compiled, which may add sizes.
    asked = _torch.layout_questions()
    steered = "storage_offset" in asked or _torch.is_behind_a_break()
    is_whole = _torch.takes_all_sizes(gm) and not steered
    by_layout = bool(asked) or decided_by_strides(gm, writes)
    merged, merge = merge_linears(gm, example_inputs) if config.merge_linears else (gm, Merge())
    try:
        traced = with_attention_inside(without_unread_numbers(merged))
        proved = prove(traced, example_inputs, config)
    except Unsplittable as error:
        return error.reason
    graph, breaks = proved.split, _torch.returns_intermediates(gm)
    compile_ops_ahead(traced)
    for op in graph.leaks:
        warnings.warn(LeakWarning.inside_segment(op), stacklevel=2)
    compared = frozenset(index for index, spec in graph.activations if by_layout or 0 in spec.stride)
    program = Program(
        **compiled_fields(
            traced, proved, config, compiled, breaks=breaks, is_whole=is_whole, compared=compared
        ),
        device=graph.device,
        merge=merge,
        breaks=breaks,
        changed=tuple(map(readable_source, _torch.changed_objects())),
        ranks=ranks,
    )
    report_split(program)
    return specialized(program, example_inputs, config, compiled)


def compiled_fields(
    traced: GraphModule,
    proved: ProvedGraph,
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
    *,
    breaks: bool,
    is_whole: bool,
    compared: frozenset[int],
) -> dict[str, Any]:
    """The fields of a Program that follow from how its trace was split; the segments are compiled."""
    graph = proved.split
    segments = compile_split(graph, config, compiled, proved.keys, proved.facts)
    writes = writes_arguments(graph, segments)
    trusted = config.one_token == "trusted"
    compared = frozenset(dict(graph.activations)) if writes else compared
    one_row = not copies_several_rows(traced, writes_of(traced))
    contract = contract_of(
        traced, graph, is_whole, compared=compared, may_be_one_row=one_row, any_size_may_be_one=trusted
    )
    return {
        "traced": traced,
        "split": graph,
        "compiled": segments,
        "contract": contract,
        "token": graph.symbols[0] if len(graph.symbols) == 1 else None,
        "static_tokens": None if contract.symbols else static_tokens(graph),
        "last_use": _last_use(graph, segments),
        "blocked": blocked(graph, segments, writes, breaks),
        "writes_arguments": writes,
        "unproved": proved.unproved,
        "unpaddable": proved.unpaddable,
    }


def prove(
    gm: GraphModule,
    args: Sequence[Any],
    config: PiecewiseConfig,
    uncapturable: Mapping[str, str] | None = None,
) -> ProvedGraph:
    unproved, largest = _for_unproved(config), max(config.sizes)
    return prove_padding(
        gm, args, config.compiler, largest, unproved=unproved, uncapturable=uncapturable or {}
    )


def report_split(program: Program) -> None:
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


def _keeps_whole(gm: GraphModule, example_inputs: Sequence[Any], writes: Writes) -> str | None:
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
    if writes_a_dropout(gm, writes):
        return "writes_an_input"
    if any(map(changes_shape_in_place, gm.graph.nodes)):
        return "changes_a_shape_in_place"
    kinds = {x.device.type for x in tensors if torch.amp.is_autocast_available(x.device.type)}
    return "autocast" if any(map(torch.is_autocast_enabled, kinds)) else None


def contract_of(
    gm: GraphModule,
    graph: SplitGraph,
    is_whole: bool,
    *,
    compared: frozenset[int] = frozenset(),
    may_be_one_row: bool = True,
    any_size_may_be_one: bool = False,
) -> ShapeContract:
    """For which arguments the trace is valid, as far as is known by now.

    Args:
        compared: indices of arguments that have to come in these strides.
        may_be_one_row: it may serve one token, as far as its writes say.
        any_size_may_be_one: not only the token count, which is compared at one token.
    """
    shape_env = _torch.shape_env_of(gm)
    symbolic = _symbolic_dims(gm)
    dims = [
        (index, dim, size)
        for index, spec in graph.activations
        for dim, size in enumerate(spec.shape)
        if (index, dim) in symbolic
    ]
    numbers = [(index, None, x.symbol) for index, x in enumerate(graph.inputs) if x.symbol is not None]
    read = [*dims, *numbers]  # a number may be one that is a size, or another number
    sources = {size: (index, dim) for index, dim, size in reversed(read) if size.is_Symbol}
    known = [symbol for symbol in graph.symbols if symbol in sources]
    guards = [*_torch.shape_guards(shape_env), *_torch.found_sizes(shape_env, known)] if known else []
    ranges = [_torch.value_range(shape_env, symbol) for symbol in known]
    if may_be_one_row and (len(known) == 1 or any_size_may_be_one):
        ranges = list(map(relaxed_range, ranges))
    return ShapeContract(
        tuple(known),
        tuple(sources[symbol] for symbol in known),
        tuple(read),
        tuple(guard for guard in guards if guard.free_symbols <= set(known)),
        tuple(ranges),
        tuple(given.name for given in graph.inputs),
        is_whole,
    ).with_strides((index, spec) for index, spec in graph.activations if index in compared)


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


def static_tokens(graph: SplitGraph, sizes: Sizes | None = None) -> int:
    """Token count of a trace of fixed shapes, or at `sizes`, for limits and reports: its longest activation.

    The last dimension of a float activation holds features; integer ones (ids, positions) have none.
    """
    specs = [spec for _, spec in graph.activations]
    integer = [spec.shape for spec in specs if not spec.dtype.is_floating_point]
    floating = [spec.shape[: max(len(spec.shape) - 1, 1)] for spec in specs]
    return max((evaluate(x, sizes or {}) for shape in integer or floating for x in shape[:2]), default=1)


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


def writes_arguments(graph: SplitGraph, segments: Mapping[int, CompiledSegment]) -> bool:
    """A segment or an op writes an argument that replays would copy.

    Tensors that are bound by address may be written (a KV cache in a module's buffer): it is the real one.
    """
    return any(not given.bound for given in graph.arguments_sharing_storage(written_slots(graph, segments)))
