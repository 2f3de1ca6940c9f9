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
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from torch import Tensor

from piecewise_graph.errors import ContextError


class ForwardContext:
    """Read-only fields of one batch, as attributes.

    Attributes:
        fields: all fields but the core's own.
        full_graph: the caller wants FULL mode.
        graph_key: hashable; graphs of one bucket and different keys are captured apart.
    """

    __slots__ = ("fields", "full_graph", "graph_key")

    fields: Mapping[str, Any]
    full_graph: bool
    graph_key: Hashable

    def __init__(self, fields: dict[str, Any], full_graph: bool = False, graph_key: Hashable = None) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(fields)))
        object.__setattr__(self, "full_graph", full_graph)
        object.__setattr__(self, "graph_key", graph_key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and Dynamo ask any object for these
            raise AttributeError(name)
        fields = object.__getattribute__(self, "fields")  # where there is no such slot, not here again
        try:
            return fields[name]
        except KeyError:
            raise ContextError.missing_field(name, fields) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"forward context is frozen; pass {name}= to pg.forward_context")

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


_EMPTY = ForwardContext({})
_current: ContextVar[ForwardContext] = ContextVar("piecewise_forward_context", default=_EMPTY)


class forward_context(ContextDecorator):
    """Make `fields` visible to splitting ops inside the `with` block.

    A loop whose fields stay the same may make one of these and enter it at every step, in any thread: it
    keeps nothing of a block.

    Args:
        full_graph: run the forward as one graph where every splitting op of the model may be captured.
        graph_key: hashable; distinguishes full graphs with the same token count.
        fields: what the ops read. Under `full_graph`, tensors and objects that hold tensors must be the same
            objects at every replay of a bucket and key; write into them in place. The method
            `check_tokens(num_tokens)` of an object that has one is called before each such replay, and may
            refuse by raising. Tensors that its method `unwritten_in_forward()` returns may be read before the
            kernels in front are done; nothing in the forward may write them unseen.

    Raises:
        ContextError: a field or the key cannot be what it is; on entering, a forward context is active.
    """

    def __init__(self, *, full_graph: bool = False, graph_key: Hashable = None, **fields: Any) -> None:
        for name in fields:
            if hasattr(ForwardContext, name):
                raise ContextError.reserved(name)
        if not _is_key(graph_key):
            raise ContextError.bad_key(graph_key)
        self._context = ForwardContext(fields, full_graph, graph_key)

    def __enter__(self) -> ForwardContext:
        if _current.get() is not _EMPTY:
            raise ContextError.nested()
        _current.set(self._context)
        return self._context

    def __exit__(self, *_: object) -> None:
        _current.set(_EMPTY)  # as nothing else was active on entering


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
