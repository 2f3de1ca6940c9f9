"""ModelAttributes: what a compiled model does not have itself, its model has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

# Methods of torch.nn.Module that return what they are called on.
_RETURN_SELF = frozenset((
    "apply", "bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "ipu", "mtia", "requires_grad_",
    "share_memory", "to", "to_empty", "train", "type", "xpu",
))  # fmt: skip


class ModelAttributes:
    """Base of a wrapper that sets its own attributes first, and `_model` last.

    A module's forward reads its attributes: `compiled.scale = 2.0` sets it there, as with torch.compile. What
    is set on the wrapper of anything else stays on the wrapper. Names that both have are the wrapper's.
    """

    _model: Callable[..., Any]

    def __getattr__(self, name: str) -> Any:
        model = self.__dict__["_model"]
        found = getattr(model, name)
        returns_self = name in _RETURN_SELF and isinstance(model, torch.nn.Module) and callable(found)
        return _for_wrapper(found, model, self) if returns_self else found

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            self.__dict__[name] = value
        else:
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name) if self._owns(name) else delattr(self._model, name)

    def _owns(self, name: str) -> bool:
        own = self.__dict__
        model = own.get("_model")
        return name in own or not isinstance(model, torch.nn.Module) or hasattr(type(self), name)


def _for_wrapper(method: Callable[..., Any], model: Any, wrapper: Any) -> Callable[..., Any]:
    """`compiled.eval()` and `compiled.to(...)` return what they are called on, which is not the model."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return wrapper if result is model else result

    return call
