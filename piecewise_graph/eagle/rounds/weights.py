"""Weights that full graphs read by address: kept alive, and compared before they are read again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg


@dataclass(frozen=True)
class _Seen:
    """What modules held, so that the usual case, nothing was replaced or moved, is found without any names.

    Attributes:
        tables: of the modules, their parameters, buffers and submodules; `empty`, those without any.
        contents: of the tables.
        plain, wrapping: the tensors among the contents, with and without an address of their own.
        addresses: of all that have one.
    """

    tables: list[dict[str, Any]]
    empty: list[dict[str, Any]]
    contents: list[Any]
    plain: list[Tensor]
    wrapping: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, models: Iterable[nn.Module]) -> _Seen:
        modules = (module for model in models for module in model.modules())
        each = ((module._parameters, module._buffers, module._modules) for module in modules)
        all_tables = [table for three in each for table in three]
        tables = [table for table in all_tables if table]
        contents = _contents(tables)
        tensors = [each for each in contents if isinstance(each, Tensor)]
        plain = [tensor for tensor in tensors if not hasattr(tensor, "__tensor_flatten__")]
        wrapping = [tensor for tensor in tensors if hasattr(tensor, "__tensor_flatten__")]
        empty = [table for table in all_tables if not table]
        return cls(tables, empty, contents, plain, wrapping, _addresses(plain, wrapping))

    @property
    def is_unchanged(self) -> bool:
        """The modules hold the same objects, and these lie where they lay."""
        now = _contents(self.tables)
        same = len(now) == len(self.contents) and all(map(operator.is_, now, self.contents))
        return same and not any(self.empty) and _addresses(self.plain, self.wrapping) == self.addresses


class Weights:
    """Parameters and buffers of the models, as they lay when the first phase was captured.

    Args:
        models: name -> module.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._models = dict(models)
        self._held: dict[str, Tensor] = {}
        self._seen = _Seen.of(())

    def hold(self) -> None:
        """Keep the memory of all weights, so that their addresses stay theirs while graphs read them."""
        if not self._held:
            self._held = {name: tensor.detach() for name, tensor in self._tensors()}
            self._seen = _Seen.of(self._models.values())

    def check(self) -> None:
        """Compare the addresses of all weights with those that graphs read. Quick: it is done per request.

        Raises:
            AddressMovedError: a weight lies elsewhere now, and graphs would read the old one.
        """
        if self._seen.is_unchanged:
            return
        for name, tensor in self._tensors():
            held = self._held.get(name)
            if held is None or tensor.data_ptr() != held.data_ptr():
                raise pg.errors.AddressMovedError.moved(name)
        self._seen = _Seen.of(self._models.values())  # what was replaced lies where it lay

    def drop_graphs(self) -> None:
        """Called by the pool: nothing is captured any more."""
        self._held, self._seen = {}, _Seen.of(())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for model, module in self._models.items():
            for kind in (module.named_parameters, module.named_buffers):
                for name, tensor in kind():
                    for index, part in enumerate(_parts(tensor)):
                        yield f"{model}.{name}" + (f" (part {index})" if index else ""), part


def _contents(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _addresses(plain: Iterable[Tensor], wrapping: Iterable[Tensor]) -> list[int]:
    inner = chain.from_iterable(map(_parts, wrapping))
    return [tensor.data_ptr() for tensor in chain(plain, inner)]


def _parts(tensor: Any) -> Iterator[Tensor]:
    """Where it lies: one that wraps others, as sharded and quantised ones do, has no address of its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # the mesh of a sharded one is none
            yield from _parts(inner)
