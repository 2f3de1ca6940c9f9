"""The ways to run one trace, side by side, every step beside the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.compiler.program import in_layout, run_steps
from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.context import ForwardContext, get_forward_context, in_place_of_active
from piecewise_graph.graph_pool import GraphPool, Owner
from piecewise_graph.inspection.differences import Departure, Difference, Side, TraceSides, difference
from piecewise_graph.inspection.saved_state import SavedState, writable
from piecewise_graph.inspection.steps import See, made_by_op, made_by_segment, ops_of, slots_of, step_name
from piecewise_graph.inspection.wide import run_wide, wide_dtype
from piecewise_graph.recorder.static_buffers import narrow
from piecewise_graph.recorder.tape import own_outputs
from piecewise_graph.runtime.captured_context import tensors_in
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.replay import Replay
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.splitter.split_graph import OpCall, OpStep, Ref, SegmentStep

Place = tuple[int, int]  # step, slot; the outputs of the trace stand behind its last step
SIDES = ("eager", "compiled", "tape", "piecewise", "full")


class Comparison:
    """Every side of one trace, on one call's arguments.

    Args:
        given: the arguments in the order of the traced graph; the trace admits them.

    Attributes:
        saved: what the sides may write, as it was before.
    """

    def __init__(self, runtime: Runtime, given: Sequence[Any]) -> None:
        self.runtime, self.program, self.given = runtime, runtime.program, given
        self.sizes, self.tokens = self.program.contract.read_sizes(given), runtime.count(given)
        self.context = get_forward_context()
        fields = dict(self.context.fields)
        self.not_full = ForwardContext(fields, False, self.context.graph_key)
        self.saved = SavedState([*writable(self.program, given), *tensors_in(tuple(fields.values()))])
        self.wanted: dict[Place, Tensor] = {}
        self.eager: dict[Place, Difference] = {}

    def run(self) -> TraceSides:
        """Run every side; each begins in the same state, and that state is put back."""
        steps = len(self.program.split.steps)
        if self.program.blocked == "random_numbers":
            sides = tuple(Side(name, note="random_numbers") for name in SIDES)
            return TraceSides(self.tokens, steps, "none", sides)
        reference = self._reference()
        sides = tuple(self._side(name, getattr(self, f"_{name}")) for name in SIDES)
        return TraceSides(self.tokens, steps, reference, sides)

    def answer(self) -> list[Any]:
        """What the traced graph returns in eager, with all that it writes."""
        return self._walk(lambda step, segment: _torch.uncompiled(step.gm))

    def _reference(self) -> str:
        dtype = wide_dtype(self.program.device)

        def keep(step: int, slot: int, tensor: Tensor) -> None:
            self.wanted[step, slot] = tensor.clone()

        with self.saved.around():
            try:
                self._see_outputs(run_wide(self.program, self._laid_out(), self.sizes, dtype, keep), keep)
            except Exception as error:  # an op of the model's own, in a type that it was not made for
                self.wanted.clear()
                self.saved.restore()
                self._eager(keep)
                return f"eager, because {_first_line(error)}"
        return str(dtype).removeprefix("torch.")

    def _side(self, name: str, run: Callable[[See], str]) -> Side:
        found: dict[Place, Difference] = {}

        def see(step: int, slot: int, tensor: Tensor) -> None:
            if (step, slot) in self.wanted:
                found[step, slot] = difference(tensor, self.wanted[step, slot])

        try:
            with self.saved.around():
                note = run(see)
        except _NotRun as reason:
            return Side(name, note=str(reason))
        except Exception as error:  # whatever it was: the other sides have something to say
            return Side(name, note=f"failed: {_first_line(error)}")
        if name == "eager":
            self.eager = found
        return Side(name, self._output_error(found), self._first_departure(name, found), note)

    def _output_error(self, found: dict[Place, Difference]) -> float:
        last = len(self.program.split.steps)
        return max((each.error for (step, _), each in found.items() if step == last), default=0.0)

    def _first_departure(self, side: str, found: dict[Place, Difference]) -> Departure | None:
        off = {place: each for place, each in found.items() if each.departs(self.eager.get(place))}
        if side == "eager" or not off:
            return None
        first = min(step for step, _ in off)
        place, worst = max(((p, d) for p, d in off.items() if p[0] == first), key=lambda pair: pair[1].error)
        steps = self.program.split.steps
        eager = self.eager[place].error if place in self.eager else 0.0
        name, ops = (step_name(steps[first]), ops_of(steps[first])) if first < len(steps) else ("outputs", ())
        nearer = side if worst.error < eager else "eager"
        return Departure(side, name, worst.error, eager, worst.tensor, worst.at, nearer, ops)

    # --- the sides -------------------------------------------------------------------------------

    def _eager(self, see: See) -> str:
        self._walk(lambda step, segment: _torch.uncompiled(step.gm), see)
        return ""

    def _compiled(self, see: See) -> str:
        tokens = None if self.program.token is None else self.tokens
        self._walk(lambda step, segment: segment.at(tokens), see)
        return ""

    def _tape(self, see: See) -> str:
        self._refuse_blocked()
        made = self._runtime_of_its_own(_WithoutGraphs())
        return self._step_through(made, self._recorded(made, self.not_full), self.not_full, see)

    def _piecewise(self, see: See) -> str:
        return self._graphs(self.not_full, see)

    def _full(self, see: See) -> str:
        if not self.context.full_graph:
            raise _NotRun("the forward context asks for no full graph")
        return self._graphs(self.context, see)

    def _graphs(self, context: ForwardContext, see: See) -> str:
        """What the model has captured for such a call; else what it would capture."""
        self._refuse_blocked()
        replay = self.runtime.replay_for(self.tokens, context)
        if replay is not None and (replay.not_full is None or not context.full_graph):
            return self._step_through(self.runtime, replay, context, see)
        made = self._runtime_of_its_own(GraphPool())
        note = self._step_through(made, self._recorded(made, context), context, see)
        made.drop_graphs()
        made.state.pool.release()
        return f"{note}, captured for this"

    def _refuse_blocked(self) -> None:
        if self.program.blocked is not None:
            raise _NotRun(self.program.blocked)

    def _runtime_of_its_own(self, pool: GraphPool) -> Runtime:
        """The same trace, with nothing captured and no state that the model's calls see."""
        config = replace(
            self.runtime.state.config, pool=pool, capture="lazy", cuda_graphs="auto", check="off",
            outputs="copy", max_graph_bytes=None,
        )  # fmt: skip
        bound = self.program.bound_arguments(self.given)
        return Runtime(
            self.program, ModelState(config), self.runtime.static_tokens, bound, self.runtime.objects
        )

    def _recorded(self, runtime: Runtime, context: ForwardContext) -> Replay:
        replay = None
        for _ in range(2):  # a size that cannot be padded is captured when it comes for the second time
            if replay is None:
                with in_place_of_active(context):
                    runtime(*self.given)
                self.saved.restore()
                replay = runtime.replay_for(self.tokens, context)
        if replay is None:
            raise _NotRun(self._why_not(runtime, context))
        if replay.not_full is not None:
            raise _NotRun(replay.not_full)
        return replay

    def _why_not(self, runtime: Runtime, context: ForwardContext) -> str:
        failed = [why for tapes in runtime.all_tapes() for why in tapes.failed.values()]
        return failed[0] if failed else runtime.decide(self.tokens, context).reason or "not_captured"

    def _step_through(self, runtime: Runtime, replay: Replay, context: ForwardContext, see: See) -> str:
        """Make the calls of a replay one by one, and look at what each step left behind."""
        tape, pool, steps = replay.captured.tape, runtime.state.pool, self.program.split.steps
        kept = SavedState(value for value in replay.bound.outputs if isinstance(value, Tensor))
        with in_place_of_active(context), pool.using() as nested, kept.around():
            if nested:
                raise _NotRun("nested_forward")
            if runtime.state.config.check != "off":
                runtime.addresses.check(self.given)
            if replay.captured.context is not None:
                replay.captured.context.check(context, tape.bucket, self.tokens, thorough=True)
            replay.bound.copy_in.fill(self.given)
            ends = (*tape.steps[1:], len(steps)) if tape.steps else ()
            for position, call in enumerate(replay.bound.calls):
                pool.run_off_default_stream((call,))
                if ends and ends[position] != tape.steps[position]:
                    self._see_static(replay, tape.steps[position], see)
            self._see_outputs(own_outputs(self.program, replay.bound, self.given, copy=False), see)
        return f"bucket {tape.bucket}"

    def _see_static(self, replay: Replay, step: int, see: See) -> None:
        tape, split = replay.captured.tape, self.program.split
        for slot in slots_of(split.steps[step], self.program):
            spec = split.spec(slot)
            live = tape.bucket == self.tokens or not spec.is_derived(self.program.token)
            if live and slot in tape.values:
                see(step, slot, narrow(tape.values[slot], spec, self.program, self.tokens))

    def _walk(
        self,
        code: Callable[[SegmentStep, CompiledSegment], Callable[..., Sequence[Tensor]]],
        see: See = lambda step, slot, tensor: None,
    ) -> list[Any]:
        """Run the trace without graphs, its segments by what `code` says."""
        places = {id(call): index for index, step in enumerate(self.program.split.steps)
                  if isinstance(step, OpStep) for call in step.calls}  # fmt: skip

        def run_segment(step: SegmentStep, segment: CompiledSegment, inputs: list[Any]) -> Sequence[Tensor]:
            outputs = code(step, segment)(*inputs)
            for slot, tensor in made_by_segment(step, segment, outputs):
                see(step.index, slot, tensor)
            return outputs

        def run_op(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = call.target(*args, **kwargs)
            for slot, tensor in made_by_op(call, result, args, kwargs, self.program):
                see(places[id(call)], slot, tensor)
            return result

        outputs = run_steps(
            self.program, self._laid_out(), self.sizes, run_segment=run_segment, run_op=run_op
        )
        self._see_outputs(outputs, see)
        return outputs

    def _laid_out(self) -> Sequence[Any]:
        return in_layout(self.program, self.given, self.sizes)

    def _see_outputs(self, outputs: Sequence[Any], see: See) -> None:
        split = self.program.split
        for item, value in zip(split.outputs, outputs, strict=True):
            if isinstance(item, Ref) and item.slot >= len(split.inputs):
                see(len(split.steps), item.slot, value)


class _NotRun(Exception):
    """A side does not exist for this call, for a reason. Never reaches a user."""


class _WithoutGraphs(GraphPool):
    """On every device: segments run again where a replay would launch their graphs."""

    def join(self, device: torch.device, owner: Owner) -> None:
        self._device = device
        self._owners.add(owner)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
