"""What a full graph remembers of the forward context, and the check that nothing of it has changed.

Note [What a full graph remembers]
A captured op has read the forward context once, at capture: the addresses of its tensors and every number in
it are part of the graph. So a full graph belongs to the very objects that were in the context then, and keeps
them and their storages alive. A replay under other objects, or after one was moved, would answer for the old
ones; it is refused by name. Tensors in the context are looked at in every replay; those inside of objects, of
which a batch with its KV cache has many, at the first replay of each token count, and always with
check="always".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from piecewise_graph.context import ForwardContext
from piecewise_graph.errors import ContextError

Place = tuple[Any, ...]
_ABSENT = object()
_CONSTANTS = (int, float, str, bytes, type(None))
_DEPTH = 4  # of objects in objects that are looked into


@dataclass(frozen=True)
class CapturedContext:
    """The context of one capture.

    Attributes:
        values: its fields.
        places: per tensor in it, the field's name, the tensor, and where it lay.
        inside: the same for tensors inside of its objects.
        kept: aliases that keep the storages alive, whatever happens to the tensors.
    """

    values: Mapping[str, Any]
    places: tuple[tuple[str, Tensor, Place], ...]
    inside: tuple[tuple[str, Tensor, Place], ...]
    kept: tuple[Tensor, ...]
    asked: tuple[Any, ...] = ()

    @classmethod
    def of(cls, context: ForwardContext) -> CapturedContext:
        """
        Raises:
            ContextError: a field is a list, dict or set, which could change unseen.
        """
        for name, value in context.fields.items():
            if isinstance(value, (list, dict, set)):
                raise ContextError.mutable(name, type(value).__name__)
        tensors = [(name, value) for name, value in context.fields.items() if isinstance(value, Tensor)]
        inner = [
            (name, tensor)
            for name, value in context.fields.items()
            if not isinstance(value, Tensor)
            for tensor in tensors_in(value)
        ]
        return cls(
            dict(context.fields),
            tuple((name, tensor, _place(tensor)) for name, tensor in tensors),
            tuple((name, tensor, _place(tensor)) for name, tensor in inner),
            tuple(tensor.detach() for _, tensor in (*tensors, *inner)),
            tuple(v.check_tokens for v in context.fields.values() if hasattr(v, "check_tokens")),
        )

    def check(self, now: ForwardContext, bucket: int, num_tokens: int, *, thorough: bool) -> None:
        """Refuse a replay under another context than the captured one.

        Raises:
            ContextError: a field is missing, new, another object than at the capture, or was moved.
        """
        found = now.fields
        if len(found) != len(self.values):
            raise ContextError.changed(min(found.keys() ^ self.values.keys()), bucket, now.graph_key)
        for name, value in self.values.items():
            there = found.get(name, _ABSENT)
            if there is not value and not _is_same(there, value):
                raise ContextError.changed(name, bucket, now.graph_key)
        for name, tensor, place in (*self.places, *self.inside) if thorough else self.places:
            if _place(tensor) != place:
                raise ContextError.moved(name, bucket, now.graph_key)
        for ask in self.asked:  # of the very objects that `found` was seen to hold
            ask(num_tokens)


def check_tokens(context: ForwardContext, num_tokens: int) -> None:
    """Ask what is in the context whether it describes this many tokens."""
    for value in context.fields.values():
        check = getattr(value, "check_tokens", None)
        if check is not None:
            check(num_tokens)


def unwritten_in_forward(context: ForwardContext) -> list[Tensor]:
    """Tensors of which objects in the context say that no op writes them unseen."""
    values = [value for value in context.fields.values() if hasattr(value, "unwritten_in_forward")]
    return [tensor for value in values for tensor in value.unwritten_in_forward()]


def _is_same(found: object, captured: object) -> bool:
    """Constants are compared by type and value, tensors by what they address, all else by identity."""
    if found is captured:
        return True
    if isinstance(captured, Tensor) and isinstance(found, Tensor):
        return _place(found) == _place(captured)
    if type(found) is not type(captured):
        return False
    if isinstance(captured, tuple) and isinstance(found, tuple):
        return len(found) == len(captured) and all(map(_is_same, found, captured))
    if isinstance(captured, float):  # 0.0 == -0.0
        return repr(found) == repr(captured)
    return isinstance(captured, _CONSTANTS) and found == captured


def _place(tensor: Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Tensors held by an object's attributes and by tuples, not too deep."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and (is_dataclass(value) or hasattr(value, "__dict__")) and not isinstance(value, type):
        names = [field.name for field in fields(value)] if is_dataclass(value) else vars(value)
        for name in names:
            yield from tensors_in(getattr(value, name, None), depth - 1)
