"""ExactSizes: runtimes for single combinations of sizes, of a trace that has no buckets.

A batch and a length that both vary, or a trace behind a graph break whose sizes follow from the tokens in a
way that nothing tells, cannot be padded. A combination that returns gets graphs of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any

from piecewise_graph.compiler.other_forms import at_sizes
from piecewise_graph.compiler.program import Program
from piecewise_graph.runtime.bound_addresses import Replaced
from piecewise_graph.runtime.latest import Latest
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.sizes import Sizes

_MOST_COMBINATIONS = 32  # of one trace, the latest used

Run = Callable[..., list[Any]]
Make = Callable[[Program, Sequence[Any]], Run]
Key = tuple[int, ...]


class ExactSizes:
    """What serves the combinations of sizes that returned to one trace, the latest ones.

    Args:
        program: of the trace.
        state: of the model.
        weights: tells the tensors that the trace reads and does not write; a combination that comes with
            others is another one.
    """

    def __init__(self, program: Program, state: ModelState, weights: Hashable) -> None:
        self._program, self._state, self._weights = program, state, weights
        # A number that counts on returns with the next cache, where graphs of it would serve one call again.
        self._met = state.combinations if program.blocked != "number_varies" else Latest(_MOST_COMBINATIONS)
        self._lock = Lock()  # other threads call the model too
        self._made: OrderedDict[Key, Run] = OrderedDict()

    @property
    def runtimes(self) -> list[Run]:
        return list(self._made.values())

    def run(self, sizes: Sizes, args: Sequence[Any], make: Make) -> list[Any] | None:
        """A call's outputs; None where the model meets its sizes for the first time, unless by pg.capture.

        Args:
            make: a program for one combination and a call's arguments -> its runtime.
        """
        at_once = self._state.channel.purpose is Purpose.CAPTURE
        key = tuple(sizes.values())
        with self._lock:
            found = self._made.get(key)
            returns = self._met.meet((self._weights, *sizes.items()))
            if found is None and (at_once or returns):
                found = make(at_sizes(self._program, sizes), args)
            if found is not None:
                self._keep(key, found)
        if found is None:
            return None
        try:
            return found(*args)
        except Replaced:  # a weight, before anything ran: it is as if the sizes came for the first time
            self._made.pop(key, None)
            return None

    def _keep(self, key: Key, run: Run) -> None:
        """As the latest one, and no more than the most."""
        self._made[key] = run
        self._made.move_to_end(key)
        if len(self._made) > _MOST_COMBINATIONS:
            self._made.popitem(last=False)
