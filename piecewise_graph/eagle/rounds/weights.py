"""Weights that full graphs read by address: kept alive, and compared before they are read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg


class Weights:
    """Parameters and buffers of the models, as they lay when the first phase was captured.

    Args:
        models: name -> module.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = dict(models)
        self._held: dict[str, Tensor] = {}

    def hold(self) -> None:
        """Keep the memory of all weights, so that their addresses stay theirs while graphs read them."""
        if not self._held:
            self._held = {name: tensor.detach() for name, tensor in self._tensors()}

    def check(self) -> None:
        """Compare the addresses of all weights with those that graphs read.

        Raises:
            AddressMovedError: a weight lies elsewhere now, and graphs would read the old one.
        """
        for name, tensor in self._tensors() if self._held else ():
            held = self._held.get(name)
            if held is None or tensor.data_ptr() != held.data_ptr():
                raise pg.errors.AddressMovedError.moved(name)

    def drop_graphs(self) -> None:
        """Called by the pool: nothing is captured any more."""
        self._held = {}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for model, module in self._models.items():
            for kind in (module.named_parameters, module.named_buffers):
                for name, tensor in kind():
                    for index, part in enumerate(_parts(tensor)):
                        yield f"{model}.{name}" + (f" (part {index})" if index else ""), part


def _parts(tensor: Any) -> Iterator[Tensor]:
    """Where it lies: one that wraps others, as sharded and quantised ones do, has no address of its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # the mesh of a sharded one is none
            yield from _parts(inner)
