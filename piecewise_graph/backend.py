"""The Dynamo backend: composes the stages, from a traced graph to the callable that Dynamo calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.compiler.build_program import build_program
from piecewise_graph.compiler.constant_floats import take_floats_for_constants
from piecewise_graph.compiler.summed_norms import summed_norms
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.errors import ConfigError
from piecewise_graph.ranks.exchange import Ranks, ranks_of_groups
from piecewise_graph.ranks.peer_memory import prepare
from piecewise_graph.ranks.summed_norm import prepare_norms
from piecewise_graph.runtime.model_state import FindState, all_states, state_for_trace
from piecewise_graph.runtime.per_model import per_model, unsplit_per_model
from piecewise_graph.runtime.unsplit import UnsplitRuntime
from piecewise_graph.splitter.local_shards import with_local_shards
from piecewise_graph.splitter.returned_views import without_returned_views
from piecewise_graph.splitter.waited_collectives import groups_of, sums_of, with_waited_collectives
from piecewise_graph.splitter.wrapper_weights import without_wrappers
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
    _torch.tell_of_reset(piecewise)
    _torch.raise_recompile_limit()
    code = _torch.function_code(_torch.current_root_code())
    with _torch.constants_of_one_trace():
        return build(gm, example_inputs, partial(state_for_trace, config, code=code), floats_are_guarded=True)


def build(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    find_state: FindState,
    *,
    floats_are_guarded: bool = False,
) -> Callable[..., Any]:
    """One trace: split, compile, ready to run.

    Args:
        find_state: weights of a model -> what its traces share.
        floats_are_guarded: Dynamo's guards on numbers stay, so that floats may become constants.
    """
    _torch.guard_every_weight()
    returned = without_returned_views(gm)
    return returned.added_to(_build(returned.gm, example_inputs, find_state, floats_are_guarded))


def _build(
    gm: GraphModule, example_inputs: Sequence[Any], find_state: FindState, floats_are_guarded: bool
) -> Callable[..., Any]:
    plain = without_wrappers(gm, example_inputs)
    args, weights = plain.arguments(example_inputs), plain.weights(example_inputs)
    state = find_state([args[index] for index in weights])
    if floats_are_guarded:
        take_floats_for_constants(gm, state.floats)
    counters.add("traces")
    _torch.publish_graph("before_split", gm)
    ranks = ranks_of_groups(groups_of(plain.gm), state.config.rank_timeout)
    with ranks.together("compile a trace"):
        local = with_waited_collectives(with_local_shards(plain.gm))
        _prepare_sums(local, ranks, state.config)
        program = build_program(local, args, state.config, state.compiled, ranks)
    forms = ranks.answers("how a trace is served", program if isinstance(program, str) else program.form)
    if any(form != forms[0] for form in forms):
        program = "ranks_differ"
    if isinstance(program, str):
        with ranks.together("compile a trace as one graph"):
            return _unsplit(gm, example_inputs, program, find_state, state.config)
    forward = per_model(program, find_state, args, weights)
    return plain.taking_apart(forward) if plain.layouts else forward


def _prepare_sums(gm: GraphModule, ranks: Ranks, config: PiecewiseConfig) -> None:
    """Make the memory that sums over ranks of a trace will go through. Collective."""
    for group, like in sums_of(gm):
        prepare(ranks, _torch.process_group(group), like, config.rank_timeout)
    for each in summed_norms(gm.graph) if config.compiler == "inductor" else ():
        like, group = _torch.example_value(each.added), _torch.process_group(str(each.added.args[1]))
        prepare_norms(ranks, group, like, config.rank_timeout)


def _unsplit(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    reason: str,
    find_state: FindState,
    config: PiecewiseConfig,
) -> Callable[..., Any]:
    """A trace that stays whole."""
    # AOTAutograd takes what dropout in eval mode returns for a copy, and what is written to it is lost.
    compiler = "eager" if reason == "writes_an_input" else config.compiler
    whole = _torch.compile_whole(gm, example_inputs, compiler)
    weights = [(i, x) for i, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter)]
    return unsplit_per_model(
        lambda of, bound: UnsplitRuntime(whole, reason, of, bound), find_state, weights, example_inputs
    )


def reset() -> None:
    """Drop every captured graph of every model; the next calls capture again.

    Reached by torch._dynamo.reset() too, which also makes Dynamo trace anew.
    """
    for state in all_states():
        state.reset()
    if distributed.is_available() and distributed.is_initialized():
        gc.collect()  # a process group whose collectives lie in a graph, unreachable or not, would not end


piecewise.reset = reset  # type: ignore[attr-defined]  # Dynamo looks for it on the backend function
