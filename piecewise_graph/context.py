"""The forward context: what a batch's splitting ops need beside their tensor arguments.

A compiled graph fixes the arguments of its ops, but an attention op needs per-batch metadata (lengths,
block tables, masks). The caller puts it here around the forward; the op reads it when it runs.
Frozen and scoped: one batch, one context, no nesting, nothing left behind by an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from piecewise_graph.errors import ContextError


class ForwardContext:
    """Read-only fields of one batch, as attributes."""

    __slots__ = ("_fields",)

    def __init__(self, fields: dict[str, Any]) -> None:
        object.__setattr__(self, "_fields", MappingProxyType(dict(fields)))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._fields[name]
        except KeyError:
            raise ContextError.missing_field(name, self._fields) from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"forward context is frozen; pass {name}= to pg.forward_context")

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)


_EMPTY = ForwardContext({})
_current: ContextVar[ForwardContext] = ContextVar("piecewise_forward_context", default=_EMPTY)


@contextmanager
def forward_context(**fields: Any) -> Iterator[ForwardContext]:
    """Make `fields` visible to splitting ops inside the `with` block.

    Raises:
        ContextError: if a forward context is active already.
    """
    if _current.get() is not _EMPTY:
        raise ContextError.nested()
    token = _current.set(ForwardContext(fields))
    try:
        yield _current.get()
    finally:
        _current.reset(token)


def get_forward_context() -> ForwardContext:
    """The active context; outside of one, an empty context whose fields are all missing."""
    return _current.get()
