"""Weights that graphs read by address: kept alive, and compared before they are read again."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

import piecewise_graph as pg

from .module_state import ModuleState
from .target import TargetModel

DECODER, HEAD, DRAFT = "target.decoder", "target.head", "draft"  # parts, which are held one by one


@dataclass(frozen=True)
class _Seen:
    """What modules held, so that the usual case, nothing was replaced or moved, is found without any names.

    Attributes:
        tables: of the modules, their parameters, buffers and submodules; `empty`, those without any.
        contents: of the tables.
        plain, wrapping: the tensors among the contents, with and without an address of their own.
        addresses: of all that have one.
        state: what the modules hold beside.
    """

    tables: list[dict[str, Any]]
    empty: list[dict[str, Any]]
    contents: list[Any]
    plain: list[Tensor]
    wrapping: list[Tensor]
    addresses: list[int]
    state: ModuleState

    @classmethod
    def of(cls, model: nn.Module) -> _Seen:
        each = ((module._parameters, module._buffers, module._modules) for module in model.modules())
        all_tables = [table for three in each for table in three]
        tables = [table for table in all_tables if table]
        contents = _contents(tables)
        tensors = [each for each in contents if isinstance(each, Tensor)]
        plain = [tensor for tensor in tensors if not hasattr(tensor, "__tensor_flatten__")]
        wrapping = [tensor for tensor in tensors if hasattr(tensor, "__tensor_flatten__")]
        empty = [table for table in all_tables if not table]
        addresses = _addresses(plain, wrapping)
        return cls(tables, empty, contents, plain, wrapping, addresses, ModuleState.of(model))

    @property
    def is_unchanged(self) -> bool:
        """The modules hold the same objects, and these lie where they lay."""
        now = _contents(self.tables)
        same = len(now) == len(self.contents) and all(map(operator.is_, now, self.contents))
        if not same or any(self.empty) or not self.state.is_unchanged:
            return False
        return _addresses(self.plain, self.wrapping) == self.addresses


class Weights:
    """Parameters and buffers of target and draft, as they lay when graphs that read them were captured.

    A part is held once its forward is compiled. `merge_linears` moves weights then, and leaves those apart
    whose memory another one holds.

    Args:
        draft: None without a draft.
    """

    def __init__(self, target: TargetModel, draft: Any) -> None:
        self._target, self._draft = target, draft
        self._held: dict[str, dict[str, Tensor]] = {}
        self._seen: dict[str, _Seen] = {}
        self._is_suspect = False  # modules were replaced, and no check has passed since

    def hold(self, *parts: str) -> None:
        """Keep the memory of weights, so that their addresses stay theirs while graphs read them.

        Args:
            parts: some of `DECODER`, `HEAD` and `DRAFT`; none = all.
        """
        for part, module in self._parts().items():
            if part not in self._held and (part in parts or not parts):
                self._held[part] = {name: tensor.detach() for name, tensor in _tensors(part, module)}
                self._seen[part] = _Seen.of(module)

    def parameters(self) -> Iterator[Tensor]:
        """Those of all parts, in plain tensors."""
        return chain.from_iterable(_inner(x) for part in self._parts().values() for x in part.parameters())

    def check(self) -> None:
        """Compare all weights and modules with what graphs were made of. Quick: it is done per request.

        Raises:
            AddressMovedError: a weight lies elsewhere now, and graphs would read the old one.
            SpeculatorError: a module holds other things beside weights now (`module_state`), or the target
                was changed in a way that needs a new speculator.
        """
        self._is_suspect |= self._target.follow()
        if self._is_suspect or not all(seen.is_unchanged for seen in self._seen.values()):
            modules = self._parts()
            for part, held in self._held.items():
                _compare(held, dict(_tensors(part, modules[part])))
                self._seen[part].state.check(part, modules[part])
            # What was replaced lies where it lay, and is what it was.
            self._seen = {part: _Seen.of(modules[part]) for part in self._held}
        self._target.check_vocabulary()
        self._is_suspect = False

    def check_copied(self) -> None:
        """`check`, if modules were replaced that the target has copied the parents of. It is done per step.

        Raises:
            AddressMovedError, SpeculatorError: see `check`.
        """
        self._is_suspect |= self._target.follow()
        if self._is_suspect:
            self.check()

    def drop_graphs(self) -> None:
        """Called by the pool: nothing is captured any more."""
        self._held, self._seen = {}, {}

    def _parts(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {DECODER: self._target.decoder, HEAD: self._target.head}
        return found if self._draft is None else found | {DRAFT: self._draft}


def _compare(held: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Refuse weights that were moved, added or removed, and those that lie there in another layout."""
    for name in [*found, *held]:
        if name not in held or name not in found or _place(held[name]) != _place(found[name]):
            raise pg.errors.AddressMovedError.moved(name)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _tensors(part: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for kind in (module.named_parameters, module.named_buffers):
        for name, tensor in kind(remove_duplicate=False):
            for index, inner in enumerate(_inner(tensor)):
                yield f"{part}.{name}" + (f" (part {index})" if index else ""), inner


def _contents(tables: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, tables)))


def _addresses(plain: Iterable[Tensor], wrapping: Iterable[Tensor]) -> list[int]:
    inner = chain.from_iterable(map(_inner, wrapping))
    return [tensor.data_ptr() for tensor in chain(plain, inner)]


def _inner(tensor: Any) -> Iterator[Tensor]:
    """Where it lies: one that wraps others, as sharded and quantised ones do, has no address of its own."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for inner in (getattr(tensor, name) for name in flatten()[0]):
        if isinstance(inner, Tensor):  # the mesh of a sharded one is none
            yield from _inner(inner)
