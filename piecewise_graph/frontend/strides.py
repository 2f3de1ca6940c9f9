"""Arguments whose strides are those that their shape implies: else Dynamo would trace them anew."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def with_plain_strides(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A slice of length 1 keeps the strides of what it was cut from; Dynamo would trace it anew."""
    return tuple(map(plain_strides, args)), {name: plain_strides(value) for name, value in kwargs.items()}


def plain_strides(value: Any) -> Any:
    """A contiguous tensor with the strides that its shape implies."""
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return value
    step = 1
    strides: list[int] = []
    for size in reversed(value.shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return value if list(value.stride()) == strides else value.as_strided(value.shape, strides)
