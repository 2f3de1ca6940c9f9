"""Where the tensors lie that graphs read by address, and the check that they still lie there."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from piecewise_graph.compiler.program import Program
from piecewise_graph.errors import AddressMovedError


class Replaced(AddressMovedError):
    """Graphs read a tensor that another object has taken the place of; nothing ran.

    `per_model` answers the call with other graphs; no user of a compiled model sees it.
    """


@dataclass(frozen=True)
class _Known:
    """One capture's bound arguments."""

    addresses: list[int]
    tensors: tuple[weakref.ref[Tensor], ...]


class BoundAddresses:
    """Addresses of a trace's bound arguments (weights, buffers) at its first capture.

    Args:
        indices: which arguments are bound.
        option: `PiecewiseConfig.check`.

    Attributes:
        compared: before a replay. What a trace writes is compared in any case: never to another's cache.
    """

    def __init__(self, program: Program, indices: Sequence[int], option: str) -> None:
        self._program, self._indices = program, tuple(indices)
        self.compared = option != "off" or bool(program.static_writes)
        self._known: _Known | None = None

    def remember(self, args: Sequence[Any]) -> None:
        self._known = _Known(self._found(args), tuple(weakref.ref(args[index]) for index in self._indices))

    def settle(self, args: Sequence[Any]) -> None:
        """`check`, or `remember` where nothing is known; raises like `check`."""
        if self._known is None:
            self.remember(args)
        else:
            self.check(args)

    def forget(self) -> None:
        """Nothing is captured any more."""
        self._known = None

    @property
    def captured(self) -> bool:
        """Graphs read them."""
        return self._known is not None

    def hold(self, args: Sequence[Any]) -> bool:
        """These arguments lie where graphs read them, if any do."""
        return self._known is None or self._found(args) == self._known.addresses

    def check(self, args: Sequence[Any]) -> None:
        """Compare a call's addresses with those that graphs hold, if any do.

        Raises:
            AddressMovedError: naming the first whose storage moved.
            Replaced: none moved, but other tensors stand where captured ones stood.
        """
        found, known = self._found(args), self._known
        if known is None or found == known.addresses:
            return
        places = zip(self._indices, found, known.addresses, known.tensors, strict=True)
        moved = [(index, tensor() is args[index]) for index, now, was, tensor in places if now != was]
        index, is_same = max(moved, key=lambda place: place[1])  # one whose own storage moved comes first
        raise (AddressMovedError if is_same else Replaced).moved(self._program.split.inputs[index].name)

    def _found(self, args: Sequence[Any]) -> list[int]:
        return [args[index].data_ptr() for index in self._indices]
