"""Which buckets `max_graph_bytes` has room for: when a plan is made, and what it says.

A plan runs the model's segments on zeros. It is made by pg.plan, by pg.capture and before a lazy capture, and
never by a question (`Runtime.decide`, pg.explain).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import replace

from piecewise_graph.ranks.exchange import ALONE
from piecewise_graph.recorder.memory_plan import Plan, make_plan
from piecewise_graph.runtime.model_state import ModelState, Trace
from piecewise_graph.runtime.side_channel import Purpose


def plan_sizes(state: ModelState, sizes: Iterable[int]) -> Plan:
    """Plan `sizes` for all traces of a model, and keep the plan."""
    given = [trace.to_plan(number) for number, trace in enumerate(state.traces)]
    traces = [trace for trace in given if trace is not None]
    budget = state.config.max_graph_bytes
    ranks = next((trace.program.ranks for trace in traces if trace.program.ranks.several), ALONE)
    with ranks.together("plan what graphs will take"):
        plan = make_plan(traces, sizes, budget=budget, all_traces=len(given))
    dropped = ChainMap(*ranks.answers("drop buckets from the plan", plan.dropped))
    kept = tuple(bucket for bucket in plan.buckets if bucket.tokens not in dropped)
    plan = replace(plan, buckets=kept, dropped=dict(dropped))
    if ranks.several:
        each = ranks.answers("say what the plan takes", (plan.pool_bytes, plan.buffer_bytes))
        plan = replace(plan, ranks=tuple(each))
    state.plan = plan
    return plan


def current_plan(state: ModelState, sizes: Iterable[int]) -> Plan:
    """The plan of these sizes; made anew where the latest one is of other sizes, or a trace came since."""
    plan, wanted = state.plan, set(sizes)
    fits = plan is not None and set(plan.sizes) == wanted and plan.traces == len(state.traces)
    return plan if plan is not None and fits else plan_sizes(state, wanted)


def plan_before_capture(state: ModelState) -> bool:
    """Make the plan that a budget needs before a lazy capture; False where nothing was planned."""
    if state.config.max_graph_bytes is None or not state.may_capture():
        return False
    before = state.plan
    if before is not None and state.channel.purpose is Purpose.CAPTURE:
        return current_plan(state, before.sizes) is not before
    given = [trace.to_plan(number) for number, trace in enumerate(state.traces)]
    return current_plan(state, {size for trace in given if trace for size in trace.sizes}) is not before


def over_budget(state: ModelState) -> Mapping[int, str]:
    """Buckets that the budget forbids, with the reason, as far as a plan was made."""
    has_budget = state.config.max_graph_bytes is not None
    return state.plan.dropped if has_budget and state.plan is not None else {}


def planned_bytes(state: ModelState, trace: Trace, bucket: int) -> int | None:
    """What the plan says that `bucket` of a trace adds to the pool; None where it says nothing."""
    traces = dict(enumerate(state.traces))
    planned = state.plan.buckets if state.plan else ()
    found = (b.graph_bytes for b in planned if b.tokens == bucket and traces.get(b.trace) is trace)
    return next(found, None)
