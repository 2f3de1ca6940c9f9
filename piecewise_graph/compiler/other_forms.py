"""Other forms of a program, made when calls show what the trace did not tell.

An op turns out to be uncapturable, an attribute changes with every call, a batch or a combination of sizes
returns: the trace is cut anew, or taken for a narrower one. What was compiled is shared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.blocked import WITHOUT_BUCKETS, blocked, blocked_at_any_size
from piecewise_graph.compiler.build_program import (
    compiled_fields,
    prove,
    report_split,
    static_tokens,
    writes_arguments,
)
from piecewise_graph.compiler.fixed_sizes import with_fixed_sizes
from piecewise_graph.compiler.judge import ProvedGraph
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.compiler.specialize import specialized
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.sizes import Sizes
from piecewise_graph.splitter.split import Unsplittable
from piecewise_graph.splitter.split_graph import with_numbers


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
    narrower = program.fixed and program.token is not None
    traced = with_fixed_sizes(program.traced, program.fixed) if narrower else program.traced
    made = _split_anew(program, traced, known, args, config, compiled)
    if made is not None and program.fixed and program.token is None:
        made = at_sizes(made, program.fixed) if has_exact_sizes(made) else None
    return None if made is None or made.blocked else made


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
    fixed = replace(program, fixed=dict(sizes))
    env = _torch.shape_env_of(program.traced)
    with _torch.conditions_undone(env), _torch.as_while_tracing():  # they hold for these sizes alone
        traced = with_fixed_sizes(program.traced, sizes)
        made = _split_anew(fixed, traced, program.uncapturable, args, config, compiled)
    return None if made is None or made.blocked else made


def _split_anew(
    program: Program,
    traced: GraphModule,
    uncapturable: Mapping[str, str],
    args: Sequence[Any],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program | None:
    """`program` for another form of its trace, made in the middle of a call; None if it has to stay whole."""
    with _torch.as_while_tracing():
        try:
            proved = prove(traced, args, config, uncapturable)
        except Unsplittable:
            return None
        made = of_proof(program, traced, proved, config, compiled)
        return specialized(replace(made, uncapturable=uncapturable), args, config, compiled)


def of_proof(
    program: Program,
    traced: GraphModule,
    proved: ProvedGraph,
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program:
    """`program` for another form of its trace, which was split and proved."""
    pairs = zip(proved.split.inputs, program.split.inputs, strict=True)
    inputs = tuple(replace(new, bound=old.bound) for new, old in pairs)  # see `with_activations`
    proved = replace(proved, split=replace(proved.split, inputs=inputs))
    breaks, contract = program.breaks, program.contract
    compared = frozenset(index for index, _ in contract.strides)
    fields = compiled_fields(
        traced, proved, config, compiled, breaks=breaks, is_whole=contract.is_whole, compared=compared
    )
    made = replace(program, **fields)
    report_split(made)
    return made


def at_numbers(program: Program, sizes: Sizes) -> Program | None:
    """The program with the symbols of `sizes` taken for numbers, but in its code; None where that is no use.

    Unlike `at_batch` nothing is split, proved or compiled: the program has to be proved for all its sizes.
    """
    if any(program.contract.outside_ranges(sizes)):
        return None
    graph, contract = with_numbers(program.split, sizes), program.contract.with_numbers(sizes)
    why = blocked(graph, program.compiled, program.writes_arguments, program.breaks)
    token = graph.symbols[0] if len(graph.symbols) == 1 else None
    made = replace(program, split=graph, contract=contract, token=token, blocked=why, fixed=dict(sizes))
    return None if why is not None or token is None else _without_exact_code(made)


def with_activations(program: Program, indices: Collection[int]) -> Program:
    """The program with arguments that were read by address copied instead, as activations are.

    One that is written in place blocks replays: a replay would write the copy.
    """
    inputs = tuple(
        replace(given, bound=given.bound and index not in indices)
        for index, given in enumerate(program.split.inputs)
    )
    graph = replace(program.split, inputs=inputs)
    writes = writes_arguments(graph, program.compiled)
    why = program.blocked or blocked(graph, program.compiled, writes, program.breaks)
    contract = program.contract.with_strides(graph.activations) if writes else program.contract
    return replace(program, split=graph, blocked=why, writes_arguments=writes, contract=contract)


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
    tokens = static_tokens(program.split, sizes)
    made = replace(program, token=None, fixed=dict(sizes), static_tokens=tokens, blocked=None)
    return _without_exact_code(made)


def _without_exact_code(program: Program) -> Program:
    """Another trace may have had it made for its token count. Here the size may be another one."""
    segments = {index: replace(segment, exact={}) for index, segment in program.compiled.items()}
    return replace(program, compiled=segments)
