"""Family: the traces of one compiled model, and what they share.

Dynamo may trace one model several times (fixed shapes first, then dynamic ones, T = 1, another grad mode).
All its traces share a pool, the compiled structures and the padding verdicts. `pg.compile` makes a family
itself; for plain torch.compile, which tells a backend nothing about who calls it, traces belong together
when they bind a parameter in common or come from the same code.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from piecewise_graph.compiler.segments import CompiledSegment
from piecewise_graph.config import PiecewiseConfig
from piecewise_graph.graph_pool import GraphPool

if TYPE_CHECKING:
    from piecewise_graph.recorder.memory_plan import Plan
    from piecewise_graph.runtime.runtime import Runtime
    from piecewise_graph.runtime.unsplit import WholeRuntime

    AnyRuntime: TypeAlias = Runtime | WholeRuntime

FindFamily: TypeAlias = "Callable[[Sequence[Tensor]], Family]"

_families: weakref.WeakSet[Family] = weakref.WeakSet()
_numbers = itertools.count()


class Family:
    """What the traces of one model share.

    Attributes:
        pool: where they capture.
        compiled: structure key -> compiled segment.
        verdicts: (structure key, bucket) -> why it must not be padded, None where that was proven harmless.
        sealed: pg.capture is done; nothing is captured lazily any more.
        capturing: pg.capture is under way: True captures, False only traces, None otherwise.
        tracing: calls end before they run anything; they are made for their trace alone.
        signatures: of the graphs that pg.compile traced (one_token.py).
        fallbacks: reason -> calls that reached no trace.
        plan: the latest one, or None.
        ran: graphs that ran since pg.compile last set it to 0.
        observed: where pg.freeze wants (runtime, arguments, outputs) of every graph that runs, or None.
    """

    def __init__(self, config: PiecewiseConfig, *, code: CodeType | None = None) -> None:
        self.config = config
        self.code = code
        self.pool = config.pool or GraphPool()
        self.compiled: dict[str, CompiledSegment] = {}
        self.verdicts: dict[tuple[str, int], str | None] = {}
        self.sealed = False
        self.capturing: bool | None = None
        self.tracing = False
        self.fallbacks: Counter[str] = Counter()
        self.signatures: list[tuple[Any, ...]] = []
        self.plan: Plan | None = None
        self.ran = 0
        self.observed: list[tuple[AnyRuntime, Sequence[Any], Sequence[Any]]] | None = None
        self.number = next(_numbers)
        self._runtimes: list[weakref.ref[AnyRuntime]] = []
        _families.add(self)

    def add(self, runtime: AnyRuntime) -> None:
        self._runtimes.append(weakref.ref(runtime))

    @property
    def runtimes(self) -> tuple[AnyRuntime, ...]:
        """The live traces, oldest first."""
        return tuple(runtime for ref in self._runtimes if (runtime := ref()) is not None)

    @contextmanager
    def observing(self) -> Iterator[list[tuple[AnyRuntime, Sequence[Any], Sequence[Any]]]]:
        """Collect (runtime, arguments, outputs) of the graphs that run inside the block."""
        found: list[tuple[AnyRuntime, Sequence[Any], Sequence[Any]]] = []
        self.observed = found
        try:
            yield found
        finally:
            self.observed = None

    def may_capture(self) -> bool:
        if self.capturing is not None:
            return self.capturing
        return self.config.capture == "lazy" and not self.sealed

    def drop_graphs(self) -> None:
        for runtime in self.runtimes:
            runtime.drop_graphs()

    def reset(self) -> None:
        """Forget captures and seals, so that the next calls capture again."""
        self.drop_graphs()
        self.pool.drop_graphs()  # those of phases around this model, too (eagle/rounds/phase_runner.py)
        self.sealed = False


def family_of(config: PiecewiseConfig, bound: Sequence[Tensor], code: CodeType | None) -> Family:
    """The family that a plain torch.compile trace belongs to; a new one where there is none."""
    for family in families_binding(bound):
        if family.config == config:
            return family
    if not bound:
        for family in families_from(code):
            if family.config == config:
                return family
    return Family(config, code=code)


def families_binding(tensors: Sequence[Tensor]) -> Iterator[Family]:
    """Live families of which some trace binds one of `tensors`."""
    wanted = {id(tensor) for tensor in tensors}
    for family in sorted(_families, key=lambda f: f.number):
        if any(wanted & runtime.bound_ids for runtime in family.runtimes):
            yield family


def families_from(code: CodeType | None) -> Iterator[Family]:
    """Live families traced from `code`."""
    for family in sorted(_families, key=lambda f: f.number):
        if code is not None and family.code is code:
            yield family


def all_families() -> tuple[Family, ...]:
    return tuple(sorted(_families, key=lambda f: f.number))
