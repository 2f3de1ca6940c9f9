"""How a runtime tells pg.compile that a call needs another trace, or that it was made for its trace alone."""

from __future__ import annotations

from piecewise_graph.errors import InputError


class ShapeMiss(InputError):
    """A call reached a trace that is not valid for its shapes; pg.compile answers with another trace.

    Attributes:
        sizes_differ: dimensions differ that were equal when the trace was made.
        num_tokens: of the call, 0 where the trace has no token symbol.
    """

    def __init__(self, what: str, *, sizes_differ: bool, num_tokens: int) -> None:
        shown = InputError.shape_contract(what)
        super().__init__(shown.what, shown.remedy)
        self.sizes_differ, self.num_tokens = sizes_differ, num_tokens


class TracedOnly(Exception):
    """Ends a call that was made for its trace alone, before anything ran."""
