"""The forward context: what a batch's splitting ops need beside their tensor arguments.

A compiled graph fixes the arguments of its ops, but an attention op needs per-batch metadata (lengths,
block tables, masks). The caller puts it here around the forward; the op reads it when it runs.
A context is frozen and scoped: one per batch, not nested, and gone after an exception.

Two fields are the core's own. `full_graph=True` asks for the forward as one graph, splitting ops included
(FULL mode). `graph_key` distinguishes full graphs with the same token count, for example by query length or
active LoRA. What a captured op reads from the context is captured with it, so a full graph is replayed only
under the objects that it was captured with.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import Tensor

from piecewise_graph.errors import ContextError


class ForwardContext:
    """Read-only fields of one batch, as attributes.

    Attributes:
        full_graph: the caller wants FULL mode.
        graph_key: hashable; graphs of one bucket and different keys are captured apart.
    """

    __slots__ = ("_fields", "full_graph", "graph_key")

    full_graph: bool
    graph_key: Hashable

    def __init__(self, fields: dict[str, Any], full_graph: bool = False, graph_key: Hashable = None) -> None:
        object.__setattr__(self, "_fields", MappingProxyType(dict(fields)))
        object.__setattr__(self, "full_graph", full_graph)
        object.__setattr__(self, "graph_key", graph_key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and Dynamo ask any object for these
            raise AttributeError(name)
        fields = object.__getattribute__(self, "_fields")  # where there is no such slot, not here again
        try:
            return fields[name]
        except KeyError:
            raise ContextError.missing_field(name, fields) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"forward context is frozen; pass {name}= to pg.forward_context")

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields but the core's own."""
        return self._fields


_EMPTY = ForwardContext({})
_current: ContextVar[ForwardContext] = ContextVar("piecewise_forward_context", default=_EMPTY)


@contextmanager
def forward_context(
    *, full_graph: bool = False, graph_key: Hashable = None, **fields: Any
) -> Iterator[ForwardContext]:
    """Make `fields` visible to splitting ops inside the `with` block.

    Args:
        full_graph: run the forward as one graph where every splitting op of the model may be captured.
        graph_key: hashable; distinguishes full graphs with the same token count.
        fields: what the ops read. Under `full_graph`, tensors and objects that hold tensors must be the same
            objects at every replay of a bucket and key; write into them in place. The method
            `check_tokens(num_tokens)` of an object that has one is called before each such replay, and may
            refuse by raising.

    Raises:
        ContextError: if a forward context is active already.
    """
    if _current.get() is not _EMPTY:
        raise ContextError.nested()
    for name in fields:
        if hasattr(ForwardContext, name):
            raise ContextError.reserved(name)
    if not _is_key(graph_key):
        raise ContextError.bad_key(graph_key)
    token = _current.set(ForwardContext(fields, full_graph, graph_key))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


@contextmanager
def in_place_of_active(context: ForwardContext) -> Iterator[None]:
    """Make `context` the active one inside the `with` block, whatever is active outside."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


def _is_key(key: object) -> bool:
    """`key` can tell graphs apart: it is hashable, equals itself, and is no tensor (equal by identity)."""
    try:
        hash(key)
    except TypeError:
        return False
    return not isinstance(key, Tensor) and key == key


def get_forward_context() -> ForwardContext:
    """The active context; outside of one, an empty context whose fields are all missing."""
    return _current.get()
