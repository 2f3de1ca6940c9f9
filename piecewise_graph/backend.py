"""The Dynamo backend: composition of the stages, and the reasons for which a trace stays uncaptured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.program import Program, liveness
from piecewise_graph.compiler.segments import CompiledGraph, compile_split
from piecewise_graph.compiler.specialize import specialized
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.errors import ConfigError, LeakWarning
from piecewise_graph.runtime.model_state import FindState, all_states, state_for_trace
from piecewise_graph.runtime.per_model import per_model
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.runtime.unsplit import UnsplitRuntime
from piecewise_graph.sizes import ShapeContract, relaxed_range
from piecewise_graph.splitter.merge_linears import merge_linears
from piecewise_graph.splitter.merged_weights import Merge, with_merged
from piecewise_graph.splitter.split import Unsplittable, split
from piecewise_graph.splitter.split_graph import Ref, SplitGraph, references
from piecewise_graph.splitter.splitting_ops import bind_arguments, written_arguments
from piecewise_graph.telemetry import counters


def piecewise(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    **_future: Any,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="piecewise", options={...})`.

    Args:
        gm: the graph that Dynamo traced.
        example_inputs: its arguments as they are now; SymInt where a size is dynamic.
        options: fields of PiecewiseConfig.
        mode: refused; torch.compile's modes belong to Inductor.

    Raises:
        ConfigError: unknown option or impossible value.
    """
    if mode is not None:
        raise ConfigError.mode_given(mode)
    config = PiecewiseConfig.from_options(options)
    code = _torch.current_root_code()
    return build(gm, example_inputs, lambda weights: state_for_trace(config, weights, code))


def build(gm: GraphModule, example_inputs: Sequence[Any], find_state: FindState) -> Callable[..., Any]:
    """One trace: split, compile, ready to run.

    Args:
        find_state: weights of a model -> its model state.
    """
    counters.add("traces")
    _torch.guard_every_weight()
    state = find_state([x for x in example_inputs if isinstance(x, torch.nn.Parameter)])
    compiler = state.config.compiler
    _torch.publish_graph("before_split", gm)
    reason = _keeps_whole(gm, example_inputs)
    merged, merge = gm, Merge()
    if reason is None and state.config.merge_linears:
        merged, merge = merge_linears(gm, example_inputs)
    try:
        graph = split(merged) if reason is None else None
    except Unsplittable as cut:
        reason = cut.reason
    if reason is not None:
        whole, why = _torch.compile_whole(gm, example_inputs, compiler), reason
        weights = [(i, x) for i, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter)]
        return per_model(
            lambda of, bound: UnsplitRuntime(whole, why, of, bound), find_state, weights, example_inputs
        )
    assert graph is not None
    for leak in graph.leaks:
        _warn_leak(leak)
    compiled = compile_split(graph, compiler, state.compiled, state.config.artifact_dir)
    _count(compiled)
    program = replace(_program(gm, example_inputs, compiled), merge=merge)
    static = None if program.contract.symbols else _static_tokens(graph)
    bound = _bound_tensors(graph, example_inputs)
    at_fixed_addresses = _fixed(graph, with_merged(example_inputs, merge.layouts))
    program = specialized(program, static, at_fixed_addresses, state.config, state.compiled)
    return per_model(
        lambda of, tensors: Runtime(program, of, static, tensors), find_state, bound, example_inputs
    )


def reset() -> None:
    """Drop every captured graph of every model; the next calls capture again.

    Reached by torch._dynamo.reset() too, which also makes Dynamo trace anew.
    """
    for state in all_states():
        state.reset()


piecewise.reset = reset  # type: ignore[attr-defined]  # Dynamo looks for it on the backend function


def _keeps_whole(gm: GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """Why a trace must be compiled as one graph."""
    tensors = [x for x in example_inputs if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "grad_enabled"
    if _enables_grad(gm):
        return "grad_enabled_inside"
    if not all(map(_torch.is_plain_tensor, tensors)):
        return "tensor_subclass"
    kinds = {x.device.type for x in tensors if torch.amp.is_autocast_available(x.device.type)}
    if any(map(torch.is_autocast_enabled, kinds)):
        return "autocast"
    return None


def _enables_grad(gm: GraphModule) -> bool:
    """`torch.enable_grad()` inside a graph that runs without grad."""
    switch = _torch.grad_mode_function()
    turned_on = any(node.target is switch and node.args == (True,) for node in gm.graph.nodes)
    return turned_on and not torch.is_grad_enabled()


def _program(gm: GraphModule, example_inputs: Sequence[Any], compiled: CompiledGraph) -> Program:
    graph = compiled.split
    symbols = _symbols(graph)
    token = symbols[0] if len(symbols) == 1 else None
    contract = _contract(gm, graph, symbols)
    blocked = _blocked(compiled, example_inputs, symbols, contract)
    unpaddable = "derived_size" if token is not None and _has_derived_sizes(graph, token) else None
    return Program(compiled, contract, token, _device(graph), liveness(compiled), blocked, unpaddable)


def _symbols(graph: SplitGraph) -> list[sympy.Symbol]:
    """Size symbols of the arguments, in order of appearance."""
    found: dict[sympy.Symbol, None] = {}
    for given in graph.inputs:
        if given.symbol is not None:
            found[given.symbol] = None
        for size in given.spec.shape if given.spec is not None else ():
            found.update(dict.fromkeys(sorted(size.free_symbols, key=str)))
    return list(found)


def _contract(gm: GraphModule, graph: SplitGraph, symbols: list[sympy.Symbol]) -> ShapeContract:
    shape_env = _torch.shape_env_of(gm)
    dims = [
        (index, dim, size)
        for index, given in enumerate(graph.inputs)
        if given.spec is not None and not given.bound
        for dim, size in enumerate(given.spec.shape)
        if size.free_symbols
    ]
    integers = {
        given.symbol: (index, None) for index, given in enumerate(graph.inputs) if given.symbol is not None
    }
    from_shapes = {size: (index, dim) for index, dim, size in reversed(dims) if size.is_Symbol}
    sources = {**integers, **from_shapes}
    known = [symbol for symbol in symbols if symbol in sources]
    ranges = [relaxed_range(_torch.value_range(shape_env, symbol)) for symbol in known]
    guards = _torch.shape_guards(shape_env) if shape_env is not None else ()
    return ShapeContract(
        tuple(known),
        tuple(sources[symbol] for symbol in known),
        tuple(dims),
        tuple(guard for guard in guards if guard.free_symbols <= set(known)),
        tuple(ranges),
        tuple(given.name for given in graph.inputs),
    )


def _blocked(
    compiled: CompiledGraph,
    example_inputs: Sequence[Any],
    symbols: list[sympy.Symbol],
    contract: ShapeContract,
) -> str | None:
    """Why no call of a trace can be replayed; it runs its compiled segments instead."""
    graph = compiled.split
    facts = [compiled.segments[step.index].facts for step in graph.segments]
    if len(symbols) > 1:
        return "second_dynamic_dimension"
    if symbols and not any(given.spec and given.spec.token_dims(symbols[0]) for given in graph.inputs):
        return "no_token_dimension"
    if len({x.device for x in example_inputs if isinstance(x, Tensor)}) > 1:
        return "mixed_devices"
    if any(fact.host_sync for fact in facts):
        return "data_dependent"
    if any(fact.random for fact in facts):
        return "random_numbers"
    return "writes_an_input" if _writes_an_input(compiled) else None


def _writes_an_input(compiled: CompiledGraph) -> bool:
    """A segment writes an argument, or an op writes one that replays would copy.

    Ops may write what is bound by address (a KV cache in a module's buffer): they run on the real one.
    """
    graph = compiled.split
    by_segments = [
        item.slot
        for step in graph.segments
        for index in compiled.segments[step.index].facts.written
        if isinstance(item := step.inputs[index], Ref)
    ]
    by_ops = [
        slot
        for call in graph.op_calls
        for name, value in bind_arguments(call.target, call.args, call.kwargs)
        if name in written_arguments(call.target)
        for slot in references(value)
    ]
    copied = [given for given in graph.arguments_sharing_storage(by_ops) if not given.bound]
    return bool(copied or graph.arguments_sharing_storage(by_segments))


def _has_derived_sizes(graph: SplitGraph, token: sympy.Symbol) -> bool:
    """A splitting op or the caller would get a tensor that cannot be narrowed to the live tokens."""
    return any(graph.spec(slot).is_derived(token) for slot in graph.slots_outside_segments())


def _static_tokens(graph: SplitGraph) -> int:
    """Token count of a trace of fixed shapes, for max_tokens and reports: its longest activation.

    The last dimension of a float activation holds features; integer ones (ids, positions) have none.
    """
    specs = [given.spec for given in graph.inputs if given.spec is not None and not given.bound]
    integer = [spec.shape for spec in specs if not spec.dtype.is_floating_point]
    floating = [spec.shape[: max(len(spec.shape) - 1, 1)] for spec in specs]
    return max((int(size) for shape in integer or floating for size in shape[:2]), default=1)


def _bound_tensors(graph: SplitGraph, example_inputs: Sequence[Any]) -> list[tuple[int, Tensor]]:
    return [
        (index, example_inputs[index])
        for index, given in enumerate(graph.inputs)
        if given.bound and given.constant is None and given.spec is not None and not given.merged
    ]


def _fixed(graph: SplitGraph, args: Sequence[Any]) -> dict[int, Tensor]:
    """Everything that is read at a fixed address, by slot; `args` with merged weights among them."""
    constants = {slot: given.constant for slot, given in enumerate(graph.inputs)}
    given = {slot: value for slot, value in enumerate(args) if graph.inputs[slot].bound}
    return given | {slot: value for slot, value in constants.items() if value is not None}


def _device(graph: SplitGraph) -> torch.device:
    devices = [given.spec.device for given in graph.inputs if given.spec is not None]
    return next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))


def _count(compiled: CompiledGraph) -> None:
    steps = compiled.split.steps
    computing = sum(segment.facts.computes for segment in compiled.segments.values())
    counters.add("segments", computing)
    counters.add("inline_segments", len(compiled.segments) - computing)
    counters.add("op_steps", len(steps) - len(compiled.segments))


def _warn_leak(op: str) -> None:
    import warnings

    warnings.warn(
        f"{op} was left inside a segment and will be captured with it. If it is attention, or writes state "
        f"that changes from call to call, register it first: pg.register_splitting_op({op!r}).",
        LeakWarning,
        stacklevel=2,
    )
