"""What modules hold beside weights, compared before graphs that took it for granted are replayed again.

Note [What is compared]
A trace takes numbers, strings and functions that modules hold for constants: a scale, an activation, which
adapter is active, whether it is merged. So these are compared, also inside of lists, dicts and sets, with the
classes of modules, their forward hooks, and which tensors they hold as plain attributes. Of other objects,
such as a configuration, the class alone is compared.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpeculatorError

_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}  # tables of weights, submodules and hooks
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# transformers leaves hooks behind that do nothing until a caller asks for hidden states or attentions.
_INERT = "transformers.utils.output_capturing"
_CONTAINERS = (dict, list, tuple, set, frozenset)
_CONSTANTS = (
    bool, int, float, complex, str, bytes, range, slice, type(None), Enum, torch.dtype, torch.device,
    torch.layout, type, FunctionType, BuiltinFunctionType, MethodType,
)  # fmt: skip
_CLASS = "its class"
_MISSING = object()
_DEPTH = 4  # of containers in containers


@dataclass(frozen=True)
class ModuleState:
    """The attributes of a model's modules at one moment.

    Attributes:
        owners, names: of every attribute, the `__dict__` that it lies in, and its name there.
        inner: hooks, and attributes that are containers.
        sizes: of `owners` and `inner`.
        contents: of `owners`, then of `inner`. To be compared by identity.
        described: copies, by module and attribute. To be compared by value.
    """

    owners: list[dict[str, Any]]
    names: list[str]
    inner: list[Any]
    sizes: list[int]
    contents: list[Any]
    described: Mapping[tuple[str, str], Any]

    @classmethod
    def of(cls, model: nn.Module) -> ModuleState:
        modules = [*model.modules()]
        pairs = [(vars(module), name) for module in modules for name in _names(module)]
        owners, names = [owner for owner, _ in pairs], [name for _, name in pairs]
        hooks = [vars(module)[kind] for module in modules for kind in _HOOKS]
        inner = [*hooks, *chain.from_iterable(_containers(owner[name]) for owner, name in pairs)]
        contents = [*map(dict.get, owners, names), *_members(inner)]
        return cls(owners, names, inner, [*map(len, (*owners, *inner))], contents, dict(_described(model)))

    @property
    def is_unchanged(self) -> bool:
        """The modules hold the same objects. Quick; an equal object in the place of one is a change."""
        if [*map(len, (*self.owners, *self.inner))] != self.sizes:
            return False
        now = chain(map(dict.get, self.owners, self.names), _members(self.inner))
        return all(map(operator.is_, now, self.contents))

    def check(self, name: str, model: nn.Module) -> None:
        """Compare by value. An attribute that was added counts if a class defines it otherwise.

        Args:
            name: of the model in errors.

        Raises:
            SpeculatorError: something has another value now.
        """
        found = dict(_described(model))
        added = (key for key in found if key not in self.described and _defines(model, *key))
        for key in [*self.described, *added]:
            was, now = self.described.get(key, _MISSING), found.get(key, _MISSING)
            if was != now:
                module = ".".join(filter(None, (name, key[0])))
                raise SpeculatorError.changed(module, key[1], *map(_text, (was, now)))


def _names(module: nn.Module) -> list[str]:
    left_out = (*_OF_MODULES, *getattr(type(module), "SCRATCH", ()))
    return [name for name in vars(module) if name not in left_out]


def _containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """`value` and the containers in it."""
    if depth and isinstance(value, _CONTAINERS):
        yield value
        for member in _members([value]):
            yield from _containers(member, depth - 1)


def _members(containers: Iterable[Any]) -> Iterator[Any]:
    """Of dicts, keys and values."""
    for container in containers:
        yield from container
        if isinstance(container, dict):
            yield from container.values()


def _described(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in model.named_modules():
        yield (path, _CLASS), type(module)
        for kind in _HOOKS:
            hooks = vars(module)[kind].values()
            yield (path, kind), [hook for hook in hooks if getattr(hook, "__module__", None) != _INERT]
        for name in _names(module):
            yield (path, name), _copied(vars(module)[name])


def _defines(model: nn.Module, path: str, name: str) -> bool:
    """A class defines this attribute; of a module that was added, the class itself is one that counts."""
    return name == _CLASS or hasattr(type(model.get_submodule(path)), name)


def _text(value: Any) -> str:
    return "nothing" if value is _MISSING else reprlib.repr(value)


def _copied(value: Any, depth: int = _DEPTH) -> Any:
    """What is compared of a value, as it is now."""
    if isinstance(value, _CONSTANTS):
        return value if value == value else "nan"
    if isinstance(value, (Tensor, nn.Module)):
        return type(value), id(value)  # `contents` keeps it alive
    if isinstance(value, partial):
        return value.func, _copied(value.args), _copied(value.keywords)
    if not depth or not isinstance(value, _CONTAINERS):
        return type(value)
    if isinstance(value, dict):
        return {key: _copied(inner, depth - 1) for key, inner in value.items()}
    return frozenset(value) if isinstance(value, (set, frozenset)) else [_copied(x, depth - 1) for x in value]
