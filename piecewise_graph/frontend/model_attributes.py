"""ModelAttributes: what a compiled model does not have itself, its model has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class ModelAttributes:
    """Base of a wrapper that sets its own attributes first, and `_model` last.

    The forward reads the model's attributes: `compiled.scale = 2.0` sets it there, as with torch.compile.
    What is set on the wrapper of a function stays on the wrapper.
    """

    _model: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_model"]
        found = getattr(model, name)
        return _for_wrapper(found, model, self) if getattr(found, "__self__", None) is model else found

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value) if self._owns(name) else setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name) if self._owns(name) else delattr(self._model, name)

    def _owns(self, name: str) -> bool:
        model = self.__dict__.get("_model")
        known = model is None or name in self.__dict__ or hasattr(type(self), name)
        return known or inspect.isroutine(model)


def _for_wrapper(method: Callable[..., Any], model: Any, wrapper: Any) -> Callable[..., Any]:
    """`compiled.eval()` and `compiled.to(...)` return what they are called on, which is not the model."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return wrapper if result is model else result

    return call
