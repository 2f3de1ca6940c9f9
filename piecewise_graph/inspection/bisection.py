"""pg.bisect: where a compiled model departs from the model itself, and who is nearer to the truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch
from piecewise_graph.errors import NotCompiledError
from piecewise_graph.frontend.state_lookup import original_of, state_of
from piecewise_graph.inspection.differences import Bisection, Side, TraceSides, whole_model
from piecewise_graph.inspection.errors import BisectError
from piecewise_graph.inspection.saved_state import SavedState, copied
from piecewise_graph.inspection.sides import Comparison
from piecewise_graph.runtime.model_state import ModelState
from piecewise_graph.runtime.runtime import Runtime
from piecewise_graph.telemetry import counters


def bisect(compiled: Any, *inputs: Any, **kwargs: Any) -> Bisection:
    """Run one call in every way that exists, each step beside a float64 reference.

    The ways are: the model itself; the traced graphs in eager; their compiled segments; a replay's calls
    without graphs; the captured graphs, piecewise and, where the forward context asks for it, full. What the
    model has captured is what runs; what it has not is captured apart and dropped. Weights, buffers, inputs,
    tensors in the forward context, random state and counters are left as they were. Splitting ops run about
    ten times.

    Args:
        compiled: what pg.compile or torch.compile(..., backend="piecewise") returned.
        inputs, kwargs: of the call, made under the same torch.no_grad and forward context.

    Raises:
        NotCompiledError: the object was not compiled by this backend, or torch.compile's was never called.
        BisectError: the call reaches no graph.
    """
    state, model = state_of(compiled), original_of(compiled)
    if state is None or model is None:
        raise NotCompiledError.unknown(repr(compiled)[:80].splitlines()[0])
    compared = _Compared()
    leaves, _ = _torch.flatten((inputs, kwargs))
    buffers = list(model.buffers()) if isinstance(model, torch.nn.Module) else []
    saved = SavedState([leaf for leaf in [*leaves, *buffers] if isinstance(leaf, Tensor)])
    with counters.unmoved(), _fallbacks_unmoved(state), saved.around():
        try:
            with state.channel.answering(compared.answer):
                found = _outputs(compiled, inputs, kwargs)
        finally:
            compared.restore()
        saved.restore()
        with torch.compiler.set_stance("force_eager"):  # a module may be compiled in place
            wanted = _outputs(model, inputs, kwargs)
    if not compared.traces:
        raise BisectError.no_graph()
    error, departure = whole_model(found, wanted)
    departures = [side.departure for trace in compared.traces for side in trace.sides if side.departure]
    return Bisection(tuple(compared.traces), error, departure or next(iter(departures), None))


class _Compared:
    """Answers the graphs of one call, one after another, and compares their sides."""

    def __init__(self) -> None:
        self.traces: list[TraceSides] = []
        self._saved: list[SavedState] = []

    def answer(self, trace: Any, args: Sequence[Any]) -> Any:
        """As the trace would, in eager.

        Raises:
            ShapeMiss: the trace is not valid for these shapes; nothing ran.
        """
        if not isinstance(trace, Runtime):
            trace.state.channel.admitted()
            self._saved.append(SavedState(x for x in args if type(x) is Tensor))
            self.traces.append(TraceSides(0, 1, "none", (Side("compiled", note=trace.blocked),)))
            return trace.run(*args)
        trace.program.contract.admit(args)
        trace.state.channel.admitted()
        comparison = Comparison(trace, args)
        self._saved.append(comparison.saved)
        self.traces.append(comparison.run())
        return comparison.answer()

    def restore(self) -> None:
        for saved in reversed(self._saved):
            saved.restore()


def _outputs(call: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call returns, apart from what it is given."""
    returned = call(*map(copied, inputs), **{name: copied(value) for name, value in kwargs.items()})
    return [leaf.clone() for leaf in _torch.flatten(returned)[0] if isinstance(leaf, Tensor)]


@contextmanager
def _fallbacks_unmoved(state: ModelState) -> Iterator[None]:
    before = Counter(state.fallbacks)
    try:
        yield
    finally:
        state.fallbacks = before
