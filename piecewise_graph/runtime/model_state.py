"""ModelState: the traces of one compiled model, and what they share.

Dynamo may trace one model several times (fixed shapes first, then dynamic ones, T = 1, another grad mode).
All its traces share a pool, the compiled structures and the padding proofs. `pg.compile` makes the state
itself. Plain torch.compile does not tell a backend which model it compiles. There, traces belong together
when they bind a parameter in common or come from the same code.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import CodeType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.graph_pool import GraphPool
from piecewise_graph.reasons import remedy
from piecewise_graph.recorder.memory_plan import Plan, TraceToPlan
from piecewise_graph.recorder.padding_proofs import PaddingProofs
from piecewise_graph.runtime.latest import Latest
from piecewise_graph.runtime.side_channel import Purpose, SideChannel

FindState: TypeAlias = "Callable[[Sequence[Tensor]], ModelState]"

_states: weakref.WeakSet[ModelState] = weakref.WeakSet()
_numbers = itertools.count()
# Twice as many as have graphs: one that returns later than that would be dropped before it returns again.
_MOST_MET = 64
log = logging.getLogger(__name__)


class Trace(Protocol):
    """One graph that Dynamo traced, as the state of its model knows it.

    Attributes:
        bound: the tensors that it reads by address, by their argument index.
        fallbacks: reason -> calls served without a tape.
        blocked: why no call is ever replayed, or None.
    """

    fallbacks: Counter[str]

    @property
    def bound(self) -> Mapping[int, weakref.ref[Tensor]]: ...

    @property
    def blocked(self) -> str | None: ...

    def __call__(self, *args: Any) -> Any: ...

    def drop_graphs(self) -> None: ...

    def served(self) -> Mapping[str, int]:
        """How many "graphs" it has, and their "replays" so far."""

    def to_plan(self, number: int) -> TraceToPlan | None:
        """What planning its memory needs; None where it is never captured."""


class ModelState:
    """What the traces of one model share.

    Attributes:
        pool: where they capture; parts on another device have one of their own (`pool_for`).
        compiled: structure key -> compiled segment.
        proofs: which structures may be padded.
        sealed: pg.capture is done; nothing is captured lazily any more.
        channel: between the traces and those who call the model.
        signatures: of the graphs that pg.compile traced since Dynamo forgot its traces (one_token.py).
        fallbacks: reason -> calls that reached no trace, and those of traces that ended.
        ended: what graphs served that went with a tensor that they read (a static KV cache), by "traces",
            "graphs" and "replays".
        plan: the latest one, or None.
        returning: token counts that came before, in any trace: where they cannot be padded, they may get
            graphs of their own.
        combinations: of sizes that came before, in any trace: of a trace without buckets they get graphs.
        floats: values of each float that Dynamo left open, by its source (compiler/constant_floats.py).
    """

    def __init__(self, config: PiecewiseConfig, *, code: CodeType | None = None) -> None:
        self.config = config
        self.code = code
        self.pool = config.pool or GraphPool()
        self._pools: dict[torch.device, GraphPool] = {}
        self.compiled: dict[str, CompiledSegment] = {}
        self.proofs = PaddingProofs()
        self.sealed = False
        self.channel = SideChannel()
        self.fallbacks: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.signatures: list[tuple[Any, ...]] = []
        self.plan: Plan | None = None
        self.returning: set[int] = set()
        self.combinations = Latest(_MOST_MET)
        self.floats: dict[str, set[float]] = {}
        self.number = next(_numbers)
        self._traces: list[weakref.ref[Trace]] = []
        self._bound: Mapping[int, weakref.ref[Tensor]] = {}  # by the trace that came last
        self._warned = config.cuda_graphs == "off"
        _states.add(self)

    def add(self, trace: Trace) -> None:
        alive = [ref for ref in self._traces if ref() is not None]  # runtimes of single sizes come and go
        self._traces, self._bound = [*alive, weakref.ref(trace)], trace.bound
        reasons = [each.blocked for each in self.traces]
        if not self._warned and all(reasons):
            self._warned = True
            log.warning(
                "no call of this model is replayed so far: %s; %s", reasons[-1], remedy(str(reasons[-1]))
            )

    @property
    def traces(self) -> tuple[Trace, ...]:
        """The live traces, oldest first."""
        return tuple(trace for ref in self._traces if (trace := ref()) is not None)

    def end(self, traces: Iterable[Trace]) -> None:
        """Keep what these served; they go with a tensor that they read."""
        for trace in traces:
            self.ended.update(traces=1, **trace.served())
            self.fallbacks.update(trace.fallbacks)

    def binds(self, ids: Set[int]) -> bool:
        """A trace reads one of the tensors of these ids by address, or the one that came last did."""
        return any(ids & alive_ids(bound) for bound in (self._bound, *(trace.bound for trace in self.traces)))

    @property
    def pools(self) -> tuple[GraphPool, ...]:
        """One per device of the model's traces, the model's own first."""
        return tuple({id(pool): pool for pool in (self.pool, *self._pools.values())}.values())

    def pool_for(self, device: torch.device) -> GraphPool:
        """Where traces on `device` capture. A pool serves one device, and a model may keep a part on the CPU.

        The first device gets the model's pool. A given pool that serves another GPU refuses the capture; the
        CPU's stand-ins leave such a pool alone.
        """
        if device not in self._pools:
            fits = self.pool.device in (None, device) or device.type != "cpu"
            is_free = self.pool not in self._pools.values()
            self._pools[device] = self.pool if is_free and fits else GraphPool(poison=self.pool.poison)
        return self._pools[device]

    def pool_bytes(self) -> int:
        """Device bytes of captured graphs, over all devices."""
        return sum(pool.bytes() for pool in self.pools)

    def may_capture(self) -> bool:
        """A bucket may be captured now: lazily, or because pg.capture asks for it."""
        if self.channel.purpose is Purpose.SERVE:
            return self.config.capture == "lazy" and not self.sealed
        return self.channel.purpose is Purpose.CAPTURE

    def drop_graphs(self) -> None:
        for trace in self.traces:
            trace.drop_graphs()

    def reset(self) -> None:
        """Forget captures and seals, so that the next calls capture again."""
        self.drop_graphs()
        for pool in self.pools:
            pool.drop_graphs()  # what GraphPool.capture_call captured beside the model, too
        self.sealed = False
        self.floats.clear()


def state_for_trace(config: PiecewiseConfig, bound: Sequence[Tensor], code: CodeType | None) -> ModelState:
    """The state that a plain torch.compile trace belongs to; a new one where there is none."""
    candidates = states_binding(bound) if bound else states_from(code)
    same_options = (state for state in candidates if state.config == config)
    found = next(same_options, None)
    return found if found is not None else ModelState(config, code=code)


def states_binding(tensors: Sequence[Tensor]) -> Iterator[ModelState]:
    """Live states with a trace that binds one of `tensors`, or the latest of which did, oldest first."""
    wanted = {id(tensor) for tensor in tensors}
    return (state for state in all_states() if state.binds(wanted))


def alive_ids(bound: Mapping[int, weakref.ref[Tensor]]) -> set[int]:
    """Ids of the tensors that a trace reads by address; of one that died, the id may be used again."""
    return {id(tensor) for ref in bound.values() if (tensor := ref()) is not None}


def states_from(code: CodeType | None) -> Iterator[ModelState]:
    """Live states traced from `code`, oldest first."""
    return (state for state in all_states() if code is not None and state.code is code)


def all_states() -> tuple[ModelState, ...]:
    return tuple(sorted(_states, key=lambda state: state.number))
