"""ExactSizes: runtimes for single combinations of sizes, of a trace that has no buckets.

A batch and a length that both vary, or a trace behind a graph break whose sizes follow from the tokens in a
way that nothing tells, cannot be padded. A combination that returns gets graphs of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

from piecewise_graph.compiler.other_forms import at_sizes
from piecewise_graph.compiler.program import Program
from piecewise_graph.runtime.bound_addresses import Replaced
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.side_channel import Purpose
from piecewise_graph.sizes import Sizes

_MOST_COMBINATIONS = 32  # of one trace, the latest used
_MOST_SEEN = 64  # a combination that returns later than that would be dropped before it returns again

Run = Callable[..., list[Any]]
Make = Callable[[Program, Sequence[Any]], Run]
Key = tuple[int, ...]


class ExactSizes:
    """The latest combinations of sizes of one trace, and what serves those that returned.

    Args:
        program: of the trace.
        state: of the model.
    """

    def __init__(self, program: Program, state: ModelState) -> None:
        self._program, self._state = program, state
        self._lock = Lock()  # other threads call the model too
        self._made: OrderedDict[Key, Run] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()

    def run(self, sizes: Sizes, args: Sequence[Any], make: Make) -> list[Any] | None:
        """A call's outputs; None where its sizes are met for the first time, unless by pg.capture.

        Args:
            make: a program for one combination and a call's arguments -> its runtime.
        """
        at_once = self._state.channel.purpose is Purpose.CAPTURE
        key = tuple(sizes.values())
        with self._lock:
            found = self._made.get(key)
            if found is None and (at_once or key in self._seen):
                found = make(at_sizes(self._program, sizes), args)
            _use(self._seen, key, None, _MOST_SEEN)
            if found is not None:
                _use(self._made, key, found, _MOST_COMBINATIONS)
        if found is None:
            return None
        try:
            return found(*args)
        except Replaced:  # a weight, before anything ran: it is as if the sizes came for the first time
            self._made.pop(key, None)
            return None


def _use(kept: OrderedDict[Key, Any], key: Key, value: Any, most: int) -> None:
    """Keep `value` as the latest one, and no more than `most`."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
