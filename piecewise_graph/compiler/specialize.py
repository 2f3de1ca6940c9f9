"""Code for the exact size of a bucket (option `specialize`).

A segment is compiled once for all sizes. At one small size faster code is possible: Inductor knows every
shape and tunes its kernels by trying (coordinate descent). A linear of few rows mostly reads its weight;
whether cuBLAS, Inductor or one of our kernels does that fastest is measured per shape (linear_choice.py). All
that takes seconds per size and distinct segment, so it is an option.

The same answers: such code is another compile of the same graph. Before it serves, it runs beside the code
for all sizes on random inputs, and both must agree within rounding. Code that disagrees, or does not compile,
is not used; pg.explain shows the reason. The proof of padding runs it too (recorder/padding.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.compiler.agreement import agree
from piecewise_graph.compiler.disk_cache import Folder
from piecewise_graph.compiler.graph_timing import graph_microseconds
from piecewise_graph.compiler.linear_choice import PREFERENCES, Times, choose, config_of, preferred
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment, ExactCode
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.kernels.linear import MAX_TOKENS, KernelConfig
from piecewise_graph.sizes import Sizes, TensorSpec, evaluate, overwrite, same_layout
from piecewise_graph.splitter.merge_linears import drop_copies, linear_operands
from piecewise_graph.splitter.split_graph import SegmentStep, Size
from piecewise_graph.telemetry import counters

log = logging.getLogger(__name__)
RunSegment = Callable[..., Sequence[Tensor]]


def specialized(
    program: Program, args: Sequence[Any], config: PiecewiseConfig, compiled: dict[str, CompiledSegment]
) -> Program:
    """`program` with code for each of `config.specialize` in its segments.

    Args:
        args: of a call; kernels are measured on the weights among them.
        compiled: structures by key, shared by the traces of one model; what is made is put back there.
    """
    sizes = [size for size in config.specialize if _serves(program, size)]
    if not sizes or program.blocked or config.compiler != "inductor":
        return program
    if program.ranks.several:  # each would choose by its own timing, and round otherwise than the others
        log.info("no code for exact sizes: the model runs on %d ranks", program.ranks.count)
        return program
    if torch.are_deterministic_algorithms_enabled():  # such code would sum in an order of its own
        log.info("no code for exact sizes under torch.use_deterministic_algorithms")
        return program
    bound = _bound(program, args)
    with torch.cuda.device(program.device) if program.device.type == "cuda" else nullcontext():
        for step in program.split.segments:
            segment = compiled[program.compiled[step.index].key]
            missing = [size for size in sizes if segment.facts.computes and size not in segment.exact]
            made = {n: _make(program, step, segment, bound, n, config.cache_dir) for n in missing}
            compiled[segment.key] = replace(segment, exact={**segment.exact, **made})
    segments = {index: compiled[segment.key] for index, segment in program.compiled.items()}
    return replace(program, compiled=segments)


def _serves(program: Program, size: int) -> bool:
    if program.token is None:
        return size == program.static_tokens
    return program.contract.size_violation(program.sizes_at(size)) is None


def _bound(program: Program, args: Sequence[Any]) -> dict[int, Any]:
    """Everything that is the same in every call, by slot: what segments read by address, and objects."""
    constants = ((slot, given.constant) for slot, given in enumerate(program.split.inputs))
    weights = dict(program.bound_arguments(program.with_merged(args)))
    objects = {slot: args[slot] for slot in program.split.opaque}
    return weights | objects | {slot: value for slot, value in constants if value is not None}


def _make(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    bound: Mapping[int, Any],
    size: int,
    cache_dir: Folder | None,
) -> ExactCode:
    began = time.perf_counter()
    found = _unsuited(program, step, segment)
    try:
        if found is None:
            given = partial(_inputs, program, step, segment, bound, size)
            run, linears = _compile(step.gm, given(), cache_dir)
            if _agrees(segment, run, given(), given()):
                counters.add("specialized")
                return ExactCode(run, linears, time.perf_counter() - began)
            found = "differs"
    except Exception as error:  # any failure: the code for all sizes serves
        if _torch.is_dynamo_control_flow(error):
            raise
        found = f"{type(error).__name__}: {error}"[:300]
    counters.add("not_specialized")
    return ExactCode(None, (), time.perf_counter() - began, found)


def _unsuited(program: Program, step: SegmentStep, segment: CompiledSegment) -> str | None:
    """Why exact code, in which only tensors vary, would not serve every segment of the structure."""
    if any(item.slot in program.split.opaque for item in step.inputs if not isinstance(item, Size)):
        return "reads_an_object"
    return None if segment.facts.compiles else "runs_uncompiled"


def _compile(
    gm: GraphModule, given: Sequence[Any], cache_dir: Folder | None
) -> tuple[RunSegment, tuple[str, ...]]:
    """`gm` for exactly the sizes of `given`, and which kernels serve its linears."""
    made: dict[tuple[str, ...], RunSegment] = {}
    kept = [index for index, value in enumerate(given) if isinstance(value, Tensor)]
    tensors = [given[index] for index in kept]
    for handicaps in PREFERENCES:
        exact = _at_size(gm, given)
        _torch.propagate(exact, tensors)
        drop_copies(exact.graph)
        linears = _choose_linears(exact, tensors, cache_dir, handicaps)
        if linears not in made:
            made[linears] = partial(_run_on, _torch.compile_exact(exact, tensors), kept)
    times = {w: graph_microseconds(partial(run, *given)) if len(made) > 1 else 0.0 for w, run in made.items()}
    fastest = min(times, key=times.__getitem__)
    return made[fastest], fastest


def _run_on(run: RunSegment, kept: Sequence[int], *args: Any) -> Sequence[Tensor]:
    return run(*[args[index] for index in kept])


def _inputs(
    program: Program, step: SegmentStep, segment: CompiledSegment, bound: Mapping[int, Any], size: int
) -> list[Any]:
    """What the segment gets at `size`: real weights, the same random activations every time, sizes.

    What it writes is a copy.
    """
    sizes = program.sizes_at(size)
    found: list[Any] = []
    generators: dict[torch.device, torch.Generator] = {}
    for index, item in enumerate(step.inputs):
        if isinstance(item, Size):
            found.append(evaluate(item.expr, sizes))
        elif item.slot in bound:
            given = bound[item.slot]
            found.append(given.clone() if index in segment.facts.written else given)
        else:
            spec = program.split.spec(item.slot)
            generator = generators.setdefault(spec.device, torch.Generator(spec.device).manual_seed(0))
            # An integer, or a float that the segment casts, may be an index: 0 is a legal one.
            is_free = spec.dtype.is_floating_point and not segment.facts.floats_become_integers
            found.append(_random(spec, sizes, generator) if is_free else spec.empty(sizes).zero_())
    return found


def _random(spec: TensorSpec, sizes: Sizes, generator: torch.Generator) -> Tensor:
    made = spec.empty(sizes)
    noise = torch.randn(made.shape, generator=generator, device=spec.device)
    overwrite(made, noise.to(spec.dtype))
    return made


def _agrees(segment: CompiledSegment, run: RunSegment, given: Sequence[Any], same: Sequence[Any]) -> bool:
    """`run` does to `given` what the segment's code for all sizes does to `same`, inputs included."""
    found, expected = run(*given), segment.run(*same)
    outputs = list(zip(found, expected, strict=True))
    filled = [pair for index, pair in enumerate(outputs) if index not in segment.facts.uninitialised]
    written = [(got, want) for got, want in zip(given, same, strict=True) if isinstance(got, Tensor)]
    return (
        all(same_layout(got, want.stride()) for got, want in outputs)
        and _shared(given, found) == _shared(same, expected)
        and _overlaps(found) == _overlaps(expected)
        and all(got is want or agree(want, got) for got, want in (*written, *filled))
    )


def _shared(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[bool]:
    """Which outputs lie in the memory of an input."""
    held = {_torch.storage_id(value) for value in inputs if isinstance(value, Tensor)}
    return [_torch.storage_id(output) in held for output in outputs]


def _overlaps(outputs: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Which outputs have elements in common; those of one storage are taken to fill the part they span."""
    begins = [output.storage_offset() for output in outputs]
    ends = [begin + TensorSpec.of(x).storage_numel({}) for begin, x in zip(begins, outputs, strict=True)]
    return [
        (i, j)
        for i, j in combinations(range(len(outputs)), 2)
        if _torch.share_storage(outputs[i], outputs[j]) and begins[i] < ends[j] and begins[j] < ends[i]
    ]


def _at_size(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule:
    """A copy of `gm` with its integer inputs replaced by their values."""
    graph = Graph()
    placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
    pairs = zip(placeholders, inputs, strict=True)
    values: dict[Node, Any] = {node: value for node, value in pairs if not isinstance(value, Tensor)}
    graph.output(graph.graph_copy(gm.graph, values))
    return GraphModule(gm, graph, class_name="ExactSegment")


def _choose_linears(
    gm: GraphModule, inputs: Sequence[Tensor], cache_dir: Folder | None, handicaps: Times
) -> tuple[str, ...]:
    """Have the fastest way serve each linear of a few rows on a weight; descriptions for people."""
    weights = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    found: dict[str, str] = {}
    for node in list(gm.graph.nodes):
        operands = linear_operands(node)
        parameters = [operand for operand in operands[1:] if operand is not None]
        given = [weights[p] for p in parameters if p in weights and weights[p].is_contiguous()]
        if not given or len(given) < len(parameters):
            continue
        x, weight, bias = _torch.example_value(operands[0]), given[0], given[1] if given[1:] else None
        tokens = x.numel() // x.shape[-1]
        times = choose(tokens, weight, bias, cache_dir) if tokens <= MAX_TOKENS else None
        if times is None:
            continue
        way = preferred(times, handicaps)
        found[f"{tokens}x{weight.shape[1]} -> {weight.shape[0]}"] = f"{way} ({times[way]:.1f} us)"
        config = config_of(way)
        if config is not None:
            _replace_linear(gm.graph, node, operands, config)
    gm.graph.lint()
    gm.recompile()
    _torch.propagate(gm, inputs)
    return tuple(f"{shape}: {way}" for shape, way in found.items())


def _replace_linear(graph: Graph, node: Node, operands: tuple[Any, Any, Any], config: list[int]) -> None:
    dtype = _torch.example_value(node).dtype
    with graph.inserting_before(node):
        new = graph.call_function(torch.ops.piecewise.linear_few.default, (*operands, config))
        if config and KernelConfig(*config).splits > 1:
            new = graph.call_method("to", (graph.call_function(torch.sum, (new, 0)), dtype))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
