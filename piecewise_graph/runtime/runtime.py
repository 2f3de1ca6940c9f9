"""Runtime: the callable handed back to Dynamo. One dispatch per forward, then a tape.

Note [The hot path]
For a token count seen before, a call is: look up its replay, compare addresses, copy inputs, run the
list, own the outputs. Everything that can be decided once (bucket, views, copies) was decided when the replay
was bound. Whatever may change between calls (a released pool, a reset) empties the lookup.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from piecewise_graph.compiler.other_forms import without_uncapturable
from piecewise_graph.compiler.program import Program, in_layout
from piecewise_graph.context import ForwardContext, get_forward_context
from piecewise_graph.graph_pool import capturing_elsewhere
from piecewise_graph.recorder.memory_plan import TraceToPlan
from piecewise_graph.recorder.mode import FULL, PIECEWISE
from piecewise_graph.recorder.padding_proofs import PADDING_REASONS
from piecewise_graph.recorder.tape import own_outputs
from piecewise_graph.recorder.workspace import Workspace
from piecewise_graph.runtime.bound_addresses import BoundAddresses
from piecewise_graph.runtime.bucket_capture import capture_bucket, on_all_ranks
from piecewise_graph.runtime.budget import over_budget, plan_before_capture, planned_bytes
from piecewise_graph.runtime.dispatch import Action, Decision, Situation, decide, never_replayed
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.replay import Replay
from piecewise_graph.runtime.several_sizes import SeveralSizes
from piecewise_graph.runtime.side_channel import Purpose, undoes_writes, undoing_writes
from piecewise_graph.runtime.tapes import TapeSet
from piecewise_graph.runtime.without_graphs import Rehearsals, WithoutGraphs
from piecewise_graph.sizes import Sizes, kept
from piecewise_graph.telemetry import count_fallback, counters

log = logging.getLogger(__name__)

_MOST_EXACT_SIZES = 32  # that cannot be padded and have graphs at a time, beside the capture sizes


class Runtime:
    """Runs one trace.

    Args:
        program: the compiled trace.
        state: of the model; pool, proofs and configuration come from it.
        static_tokens: token count of a trace of fixed shapes; None where a size is dynamic.
        bound: the tensors that graphs read by address, with their argument indices.
        objects: opaque arguments by index, the same in every call.
        rehearsals: of the program, where another runtime of it may have had one.
    """

    def __init__(
        self,
        program: Program,
        state: ModelState,
        static_tokens: int | None,
        bound: Sequence[tuple[int, Tensor]],
        objects: Mapping[int, Any],
        rehearsals: Rehearsals | None = None,
    ) -> None:
        self.program, self.state, self.objects = program, state, objects
        self._whole = program  # with nothing cut out of it by captures that failed
        self.pool = state.pool_for(program.device)
        self.static_tokens = static_tokens
        self.fallbacks: Counter[str] = Counter()
        self.bound = {index: weakref.ref(tensor) for index, tensor in bound}
        self.generation = 0  # rises when a replay that was handed out may be out of date
        self.addresses = BoundAddresses(program, list(self.bound), state.config.check)
        self.invalid = frozenset(
            size
            for size in self.sizes
            if program.token and program.contract.size_violation(program.sizes_at(size))
        )
        weights = tuple(id(tensor) for index, tensor in bound if index not in program.static_writes)
        self.several = SeveralSizes.of(program, state, self.addresses, hash(weights))
        self._not_full = FULL.unsupported(program)
        self._start(rehearsals or Rehearsals())
        state.add(self)

    def _start(self, rehearsals: Rehearsals) -> None:
        """With nothing captured."""
        self._piecewise, self._full = TapeSet(PIECEWISE), dict[Hashable, TapeSet]()
        workspace = Workspace.empty(self.program, self.pool, self.state.proofs, max(self.sizes))
        uncaptured = WithoutGraphs(workspace, self.sizes, self.invalid, self._not_full, rehearsals)
        self._workspace, self._without_graphs = workspace, uncaptured

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets of this trace; one for a trace of fixed shapes."""
        if self.static_tokens is None:
            return self.state.config.sizes
        return (self.static_tokens,) if self.static_tokens <= self.state.config.max_tokens else (0,)

    def __call__(self, *args: Any) -> list[Any]:
        """Run one forward; `args` and the result are in the order of Dynamo's graph.

        Raises:
            ShapeMiss: the trace is not valid for these shapes; nothing ran.
        """
        if self.program.static_writes and undoes_writes():
            with undoing_writes(False), kept([args[index] for index in self.program.static_writes]):
                return self(*args)
        sizes = self.program.contract.admit(args)
        self.state.channel.admitted()
        if self.several and (outputs := self.several.run(sizes, args, self._of)) is not None:
            return outputs
        num_tokens, context = self._count(sizes), get_forward_context()
        with self.pool.using() as nested:
            ready = self.tapes_for(context).ready.get(num_tokens)
            elsewhere = capturing_elsewhere(self.program.device)
            if nested:
                reason = "captured_by_caller" if elsewhere else "nested_forward"
                return self._run_compiled(args, sizes, num_tokens, reason, context)
            if ready is None or self._stands_in(ready) or elsewhere:
                return self._decide_and_run(args, sizes, num_tokens, context)
            return self._replay(ready, args, context)

    def _of(self, program: Program, args: Sequence[Any]) -> Runtime:
        """A runtime of a form of this trace with fewer sizes."""
        bound = [(index, args[index]) for index in self.bound]
        return Runtime(program, self.state, program.static_tokens, bound, self.objects)

    @property
    def blocked(self) -> str | None:
        """See `Trace`."""
        return self.program.blocked if self.several is None else None

    def tapes_for(self, context: ForwardContext) -> TapeSet:
        """The tapes of the mode and key that `context` asks for."""
        if not context.full_graph:
            return self._piecewise
        key = context.graph_key
        return self._full.get(key) or self._full.setdefault(key, TapeSet(FULL, key))

    def all_tapes(self) -> tuple[TapeSet, ...]:
        return self._piecewise, *self._full.values()

    def decide(self, num_tokens: int, context: ForwardContext | None = None) -> Decision:
        """What a call of `num_tokens` tokens would do now, under `context` (default: the active one).

        Nothing is planned, captured or run.
        """
        if capturing_elsewhere(self.program.device):
            return Decision(Action.COMPILED, None, "captured_by_caller")
        context, program, state = context or get_forward_context(), self.program, self.state
        blocked = program.blocked or ("cuda_graphs_off" if state.config.cuda_graphs == "off" else None)
        if reason := never_replayed(num_tokens, self.sizes, blocked):  # before what is captured is collected
            return Decision(Action.COMPILED, reason=reason)
        piecewise = self._piecewise.captured(program, state.proofs, self.sizes)
        asked = self.tapes_for(context) if context.full_graph else None
        given = Situation(
            self.sizes,
            state.may_capture(),
            piecewise,
            asked.captured(program, state.proofs, self.sizes) if asked is not None else None,
            blocked,
            self._not_full,
            self.invalid,
            over_budget(state),
            state.returning,
        )
        return decide(num_tokens, given)

    def replay_for(self, num_tokens: int, context: ForwardContext) -> Replay | None:
        """What would serve such a call now; None where no tape would."""
        ready = self.tapes_for(context).ready.get(num_tokens)
        if ready is None:
            decision = self.decide(num_tokens, context)
            if decision.action is Action.REPLAY:
                ready = self._bind(decision, num_tokens, context)
        return ready

    def drop_graphs(self) -> None:
        """Forget tapes, their buffers, and what could not be captured; the next calls capture again."""
        self._begin_again(self._whole)
        for each in self.several.runtimes if self.several is not None else ():
            each.drop_graphs()

    def _begin_again(self, program: Program) -> None:
        self.program = program
        self._start(Rehearsals())
        self.addresses.forget()
        self.generation += 1

    def served(self) -> dict[str, int]:
        """See `Trace.served`."""
        buckets = [bucket for tapes in self.all_tapes() for bucket in tapes.buckets.values()]
        return {"graphs": sum(b.tape.graphs for b in buckets), "replays": sum(b.replays for b in buckets)}

    def buffer_bytes(self) -> int:
        """Bytes of owned buffers outside of the graph pool."""
        return self._workspace.bytes()

    def to_plan(self, number: int) -> TraceToPlan | None:
        """See `Trace.to_plan`."""
        served = [size for size in self.sizes if size not in self.invalid and size > 0]
        if self.program.blocked is not None or not served:
            return None
        return TraceToPlan(number, self.program, self._weights, served, max(self.sizes), self.state.proofs)

    def count(self, args: Sequence[Any]) -> int:
        """Tokens of a call with these arguments."""
        return self._count(self.program.contract.read_sizes(args))

    def _count(self, sizes: Sizes) -> int:
        return sizes[self.program.token] if self.program.token is not None else self.static_tokens or 0

    def _weights(self) -> Sequence[Any]:
        """A call's arguments with the weights in their places, and None for activations."""
        weights = {index: weight() for index, weight in self.bound.items()}
        return self.program.weights_alone({**weights, **self.objects})

    def _stands_in(self, ready: Replay) -> bool:
        """It is piecewise only because no full graph was captured, and one may be captured now."""
        return ready.not_full == "not_captured" and self.state.may_capture()

    def _decide_and_run(
        self, args: Sequence[Any], sizes: Sizes, num_tokens: int, context: ForwardContext
    ) -> list[Any]:
        decision = self.decide(num_tokens, context)
        touches_budget = decision.action is Action.CAPTURE or decision.reason == "over_budget"
        if touches_budget and plan_before_capture(self.state):
            decision = self.decide(num_tokens, context)
        if decision.action is Action.REPLAY:
            return self._replay(self._bind(decision, num_tokens, context), args, context)
        if decision.not_full is not None:
            counters.add("not_full", reason=decision.not_full)
        if decision.action is Action.CAPTURE:
            return self._capture(args, num_tokens, decision, context)
        assert decision.reason is not None
        return self._run_compiled(args, sizes, num_tokens, decision.reason, context)

    def _bind(self, decision: Decision, num_tokens: int, context: ForwardContext) -> Replay:
        assert decision.bucket is not None
        asked, config = self.tapes_for(context), self.state.config
        tapes = asked if decision.mode is asked.mode else self._piecewise
        ready = asked.ready[num_tokens] = Replay(
            tapes.buckets[decision.bucket],
            num_tokens,
            addresses=self.addresses,
            pool=self.pool,
            ranks=self.program.ranks,
            not_full=decision.not_full,
            check_always=config.check == "always",
        )
        return ready

    def _replay(self, ready: Replay, args: Sequence[Any], context: ForwardContext) -> list[Any]:
        ready.check(context, args if self.addresses.compared else None)
        ready.bound.copy_in.fill(args)
        ready.launch()
        # Behind a graph break, another trace of the model overwrites the memory that they share.
        copy = self.state.config.outputs == "copy" or self.program.breaks
        return own_outputs(self.program, ready.bound, args, copy=copy)

    def _run_compiled(
        self, args: Sequence[Any], sizes: Sizes, num_tokens: int, reason: str, context: ForwardContext
    ) -> list[Any]:
        if self.state.channel.purpose is not Purpose.WARM_UP:
            self._count_fallback(reason, num_tokens)
        return self._without_graphs.run(args, sizes, num_tokens, reason, context)

    def _capture(
        self, args: Sequence[Any], num_tokens: int, decision: Decision, context: ForwardContext
    ) -> list[Any]:
        """Answer the call uncaptured and record its bucket along the way."""
        program, state, bucket = self.program, self.state, decision.bucket
        assert bucket is not None
        self.pool.join(program.device, self)
        if self.addresses.compared:
            self.addresses.check(args)
        tapes = self.tapes_for(context) if decision.mode is FULL else self._piecewise
        capture = partial(
            capture_bucket,
            self._workspace,
            tapes,
            in_layout(program, args, program.sizes_at(num_tokens)),
            num_tokens,
            bucket,
            context,
            padded=self._without_graphs.pads(num_tokens, bucket, context),
            watch_ops=not self._piecewise.buckets,
            rehearsed=self._without_graphs.rehearsals.done,
            planned=planned_bytes(state, self, bucket) if decision.mode is PIECEWISE else None,
        )
        outcome = on_all_ranks(program.ranks, bucket, capture)
        if outcome.uncapturable and self._cut_out(outcome.uncapturable, args):
            if self.program.has_effects:
                return outcome.outputs  # which a second forward would have twice; the next call captures
            sizes = self.program.contract.read_sizes(args)
            return self._decide_and_run(args, sizes, num_tokens, context)
        self._without_graphs.rehearsals.done = True
        if outcome.reason is not None:
            self._count_fallback(outcome.reason, num_tokens)
        elif outcome.failure is not None:
            tapes.failed[bucket] = outcome.failure
            log.info("not captured: %d tokens, %s: %s", bucket, tapes.name, outcome.failure)
            counters.add("failed_captures")
        elif outcome.captured is not None:
            tapes.buckets[bucket] = outcome.captured
            counters.add("captures", outcome.captured.tape.graphs)
            counters.add("tapes")
            state.returning.add(num_tokens)  # for another trace that serves it the next time
            tapes.drop_exact(self.sizes, _MOST_EXACT_SIZES)
            self.addresses.remember(args)
            self._forget_ready()
        return outcome.outputs

    def _cut_out(self, uncapturable: Mapping[str, str], args: Sequence[Any]) -> bool:
        """Have these nodes run between graphs from now on; False where that is impossible, or no news."""
        state = self.state
        cut = without_uncapturable(self.program, uncapturable, args, state.config, state.compiled)
        if cut is None:
            return False
        self._begin_again(cut)
        return True

    def _forget_ready(self) -> None:
        """Another tape may serve a token count better than the one that is bound to it."""
        self.generation += 1
        for tapes in self.all_tapes():
            tapes.ready.clear()

    def _count_fallback(self, reason: str, num_tokens: int) -> None:
        count_fallback(self.fallbacks, reason)
        cannot_pad = reason in PADDING_REASONS or reason == "bucket_outside_trace"
        if cannot_pad and self.state.config.max_graph_bytes is None:
            self.state.returning.add(num_tokens)  # the next call of this size may have graphs of its own
