"""How people call the arguments of a forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from piecewise_graph import _torch


def describe(tensor: Tensor) -> str:
    """`float32[3, 8] on cpu`."""
    return f"{str(tensor.dtype)[6:]}{list(tensor.shape)} on {tensor.device}"


def forward_signature(compiled: Any) -> inspect.Signature | None:
    model = getattr(compiled, "_model", None) or _torch.original_callable(compiled) or compiled
    try:
        return inspect.signature(model.forward if isinstance(model, torch.nn.Module) else model)
    except (TypeError, ValueError):
        return None


def leaf_names(compiled: Any, structure: Any, count: int) -> list[str]:
    """What people call each leaf of a call: its keyword, or the parameter at its position."""
    args, kwargs = _torch.unflatten(list(range(count)), structure)
    signature = forward_signature(compiled)
    parameters = list(signature.parameters) if signature is not None else []
    names = dict.fromkeys(range(count), "an argument")
    for position, value in enumerate(args):
        name = parameters[position] if position < len(parameters) else f"argument {position}"
        names |= dict.fromkeys(_torch.flatten(value)[0], name)
    for name, value in kwargs.items():
        names |= dict.fromkeys(_torch.flatten(value)[0], name)
    return [names[index] for index in range(count)]
