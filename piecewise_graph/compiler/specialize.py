"""Code for the exact size of a bucket (option `specialize`).

Note [One size]
A segment is compiled once for all sizes. At a small size more can be had: Inductor knows every shape, tunes
its kernels by trying (coordinate descent), and lets them start while the one before them ends (programmatic
dependent launch, Hopper). And a linear of few rows does little else than read its weight, which cuBLAS, a
kernel that Inductor generates and kernels of ours do at different speeds. Which is the fastest is measured
for each shape (linear_choice.py). All that takes seconds per size and distinct segment, so it has to be
asked for.

Note [Waiting first]
A kernel that starts while the one before it ends must not touch memory before that one is done, and lets its
own dependents start only then: so whoever starts may rely on everything before its predecessor being done.
Our kernels do (kernels/dependent.py), Inductor's are made to (_torch.kernels_wait_first). A segment
with a Triton kernel of the user's in it, which may not, is compiled without dependent launches.

Note [The same answers]
Such code is another compile of the same graph; before it may serve, it runs beside the code for all sizes on
random inputs, and both have to agree within rounding. What disagrees, or does not compile, is not used, with
the reason in pg.explain. The proof of padding runs it too (recorder/padding.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph import _torch
from piecewise_graph.compiler.agreement import agree
from piecewise_graph.compiler.linear_choice import PREFERENCES, Times, choose, plan_of, preferred
from piecewise_graph.compiler.program import Program
from piecewise_graph.compiler.segments import CompiledSegment, ExactCode
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.kernels.linear import MAX_TOKENS, Plan, tuning
from piecewise_graph.sizes import Sizes, TensorSpec, evaluate, overwrite, same_layout
from piecewise_graph.splitter.merge_linears import drop_copies, linear_operands
from piecewise_graph.splitter.split_graph import Ref, SegmentStep
from piecewise_graph.telemetry import counters

RunSegment = Callable[..., Sequence[Tensor]]


def specialized(
    program: Program,
    static_tokens: int | None,
    bound: Mapping[int, Tensor],
    config: PiecewiseConfig,
    compiled: dict[str, CompiledSegment],
) -> Program:
    """`program` with code for each of `config.specialize` in its segments.

    Args:
        static_tokens: token count of a trace of fixed shapes, the only one that it can serve.
        bound: slot -> weight; kernels are measured on real ones.
        compiled: structures by key, shared by the traces of one model; what is made is put back there.
    """
    sizes = [size for size in config.specialize if _serves(program, static_tokens, size)]
    if not sizes or program.blocked or config.compiler != "inductor":
        return program
    with torch.cuda.device(program.device) if program.device.type == "cuda" else nullcontext():
        for step in program.split.segments:
            segment = compiled[program.compiled.segments[step.index].key]
            missing = [size for size in sizes if size not in segment.exact]
            if segment.facts.computes and missing:
                made = {n: _make(program, step, segment, bound, n, config.artifact_dir) for n in missing}
                compiled[segment.key] = replace(segment, exact={**segment.exact, **made})
    segments = {index: compiled[segment.key] for index, segment in program.compiled.segments.items()}
    return replace(program, compiled=replace(program.compiled, segments=segments))


def _serves(program: Program, static_tokens: int | None, size: int) -> bool:
    if program.token is None:
        return size == static_tokens
    return program.contract.size_violation(program.sizes_at(size)) is None


def _make(
    program: Program,
    step: SegmentStep,
    segment: CompiledSegment,
    bound: Mapping[int, Tensor],
    size: int,
    cache_dir: str | None,
) -> ExactCode:
    began = time.perf_counter()
    try:
        given = partial(_inputs, program, step, segment, bound, size)
        run, linears = _compile(step.gm, given(), cache_dir)
        why = None if _agrees(segment, run, given(), given()) else "differs"
    except Exception as error:  # whatever it was: there is code for all sizes
        if _torch.is_dynamo_control_flow(error):
            raise
        why = f"{type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - began
    if why is not None:
        counters.add("not_specialized")
        return ExactCode(None, (), seconds, why)
    counters.add("specialized")
    return ExactCode(run, linears, seconds)


def _compile(
    gm: GraphModule, given: Sequence[Any], cache_dir: str | None
) -> tuple[RunSegment, tuple[str, ...]]:
    """`gm` for exactly the sizes of `given`, and which kernels serve its linears."""
    made: dict[tuple[str, ...], RunSegment] = {}
    for handicaps in PREFERENCES:
        exact, kept = _at_size(gm, given)
        tensors = [given[index] for index in kept]
        _torch.propagate(exact, tensors)
        drop_copies(exact.graph)
        linears = _choose_linears(exact, tensors, cache_dir, handicaps)
        if linears not in made:
            foreign = any(_torch.is_higher_order(node.target) for node in exact.graph.nodes)
            run = _torch.compile_exact(exact, tensors, dependent_launches=not foreign)
            made[linears] = partial(_run_on, run, kept)
    if len(made) == 1:
        return next((run, linears) for linears, run in made.items())
    times = {linears: tuning.graph_microseconds(partial(run, *given)) for linears, run in made.items()}
    fastest = min(times, key=times.__getitem__)
    return made[fastest], fastest


def _run_on(run: RunSegment, kept: Sequence[int], *args: Any) -> Sequence[Tensor]:
    return run(*[args[index] for index in kept])


def _inputs(
    program: Program, step: SegmentStep, segment: CompiledSegment, bound: Mapping[int, Tensor], size: int
) -> list[Any]:
    """What the segment gets at `size`: real weights, the same random activations every time, sizes."""
    sizes = program.sizes_at(size)
    found: list[Any] = []
    generators: dict[torch.device, torch.Generator] = {}
    for item in step.inputs:
        if not isinstance(item, Ref):
            found.append(evaluate(item.expr, sizes))
        elif item.slot in bound:
            found.append(bound[item.slot])
        else:
            spec = program.split.spec(item.slot)
            generator = generators.setdefault(spec.device, torch.Generator(spec.device).manual_seed(0))
            # An integer may be an index, and so may a float that the segment casts: 0 is a legal one.
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
    inputs = zip(given, same, strict=True)
    written = all(agree(want, got) for got, want in inputs if isinstance(got, Tensor) and got is not want)
    pairs = enumerate(zip(expected, found, strict=True))
    return (
        written
        and _shared(given, found) == _shared(same, expected)
        and all(
            same_layout(got, want.stride()) and (index in segment.facts.uninitialised or agree(want, got))
            for index, (want, got) in pairs
        )
    )


def _shared(inputs: Sequence[Any], outputs: Sequence[Tensor]) -> list[bool]:
    """Which outputs lie in the memory of an input."""
    held = {_torch.storage_id(value) for value in inputs if isinstance(value, Tensor)}
    return [_torch.storage_id(output) in held for output in outputs]


def _at_size(gm: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[int]]:
    """A copy of `gm` with its integer inputs replaced by their values; the indices of its other inputs."""
    graph = Graph()
    kept: list[int] = []
    copied: dict[Node, Any] = {}
    placeholders = iter(range(len(inputs)))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            index = next(placeholders)
            is_tensor = isinstance(inputs[index], Tensor)
            copied[node] = graph.placeholder(f"a{len(kept)}") if is_tensor else inputs[index]
            kept += [index] * is_tensor
        elif node.op == "output":
            graph.output(map_arg(node.args[0], copied.__getitem__))
        else:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), copied.__getitem__)
            copied[node] = graph.create_node(node.op, node.target, args, kwargs)
    return GraphModule(gm, graph, class_name="ExactSegment"), kept


def _choose_linears(
    gm: GraphModule, inputs: Sequence[Tensor], cache_dir: str | None, handicaps: Times
) -> tuple[str, ...]:
    """Replace each linear of a few rows on a weight by the way to take; descriptions for people."""
    weights = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=True))
    found: dict[str, str] = {}
    for node in list(gm.graph.nodes):
        given = linear_operands(node)
        if not isinstance(given[0], Node) or not all(a is None or a in weights for a in given[1:]):
            continue
        x, (weight, bias) = _torch.example_value(given[0]), (weights.get(a) for a in given[1:])
        tokens = x.numel() // x.shape[-1]
        if weight is None or tokens > MAX_TOKENS:
            continue
        if not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
            continue
        times = choose(tokens, weight, bias, cache_dir)
        if times is None:
            continue
        way = preferred(times, handicaps)
        found[f"{tokens}x{weight.shape[1]} -> {weight.shape[0]}"] = f"{way} ({times[way]:.1f} us)"
        plan = plan_of(way)
        if plan is not None:
            _replace_linear(gm.graph, node, given, plan)
    gm.graph.lint()
    gm.recompile()
    _torch.propagate(gm, inputs)
    return tuple(f"{shape}: {way}" for shape, way in found.items())


def _replace_linear(graph: Graph, node: Node, given: tuple[Any, Any, Any], plan: list[int]) -> None:
    dtype = _torch.example_value(node).dtype
    with graph.inserting_before(node):
        new = graph.call_function(torch.ops.piecewise.linear_few.default, (*given, plan))
        if plan and Plan(*plan).splits > 1:
            new = graph.call_method("to", (graph.call_function(torch.sum, (new, 0)), dtype))
    node.replace_all_uses_with(new)
    graph.erase_node(node)
