"""Where the tensors lie that graphs read by address, and the check that they still lie there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from piecewise_graph.compiler.program import Program
from piecewise_graph.errors import AddressMovedError


class BoundAddresses:
    """Addresses of a trace's bound arguments (weights, buffers) at its first capture.

    Args:
        indices: which arguments are bound.
    """

    def __init__(self, program: Program, indices: Sequence[int]) -> None:
        self._program, self._indices = program, tuple(indices)
        self._known: list[int] | None = None

    def remember(self, args: Sequence[Any]) -> None:
        self._known = self._found(args)

    def forget(self) -> None:
        """Nothing is captured any more."""
        self._known = None

    def hold(self, args: Sequence[Any]) -> bool:
        """These arguments lie where graphs read them, if any do."""
        return self._known is None or self._found(args) == self._known

    def check(self, args: Sequence[Any]) -> None:
        """Compare a call's addresses with those that graphs hold, if any do.

        Raises:
            AddressMovedError: naming the first that moved.
        """
        found = self._found(args)
        if self._known is None or found == self._known:
            return
        for index, address, known in zip(self._indices, found, self._known, strict=True):
            if address != known:
                raise AddressMovedError.moved(self._program.split.inputs[index].name)

    def _found(self, args: Sequence[Any]) -> list[int]:
        return [args[index].data_ptr() for index in self._indices]
