"""Wrapper subclasses: tensors that are made of other tensors (torchao's quantised weights, DTensor)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piecewise_graph._torch.graphs import real_object
from piecewise_graph._torch.tensors import functions_while_tracing


def is_wrapper(value: Any) -> bool:
    """A tensor that can be taken apart into other tensors, and put together again."""
    return isinstance(value, Tensor) and hasattr(type(value), "__tensor_flatten__")


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that a wrapper subclass is made of; of any other tensor itself."""
    if not is_wrapper(tensor):
        return [tensor]
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    parts = [getattr(tensor, name) for name in names]
    return [inner for part in parts if isinstance(part, Tensor) for inner in inner_tensors(part)]


def exactly(value: Any) -> Any:
    """What only the same numbers equal: 1, 1.0 and True are equal to Python, as are 0.0 and -0.0.

    Containers and dataclasses are looked into, as they are now; anything else is itself.
    """
    if isinstance(value, (float, complex)):
        return type(value), repr(value)
    if isinstance(value, Mapping):
        return type(value), tuple((exactly(key), exactly(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(exactly, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(exactly, value))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(exactly(getattr(value, field.name)) for field in fields(value))
    return type(value), value


@dataclass(frozen=True)
class Held:
    """A part of a wrapper that is no tensor: the device mesh of a DTensor."""

    value: Any


@dataclass(frozen=True)
class WrapperLayout:
    """How a wrapper subclass is made of its inner tensors; it holds none of them.

    Attributes:
        names, context: what `__tensor_flatten__` returns.
        content: `exactly` the context as it was: it may change, and what is equal may differ.
        shape, stride: of the wrapper.
        inner: of each part, by position: its layout, None for a tensor that is no wrapper, or what it holds.
    """

    kind: type
    names: tuple[str, ...]
    context: Any
    content: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: tuple[WrapperLayout | Held | None, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> WrapperLayout:
        """The layout of a wrapper of constant sizes."""
        wrapper: Any = tensor
        names, context = wrapper.__tensor_flatten__()
        inner = tuple(cls._of_part(getattr(wrapper, name)) for name in names)
        sizes = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return cls(type(tensor), tuple(names), context, exactly(context), *sizes, inner)

    @classmethod
    def _of_part(cls, part: Any) -> WrapperLayout | Held | None:
        if is_wrapper(part):
            return cls.of(part)
        return None if isinstance(part, Tensor) else Held(real_object(part))

    def names_of_parts(self) -> Iterator[tuple[str, ...]]:
        """The way to each tensor that is no wrapper: attribute by attribute, in the order of `take_apart`."""
        for name, inner in zip(self.names, self.inner, strict=True):
            if inner is None:
                yield (name,)
            elif isinstance(inner, WrapperLayout):
                for rest in inner.names_of_parts():
                    yield name, *rest

    def take_apart(self, wrapper: Tensor) -> Iterator[Tensor]:
        """The tensors of a wrapper of this layout."""
        for name, inner in zip(self.names, self.inner, strict=True):
            if inner is None:
                yield getattr(wrapper, name)
            elif isinstance(inner, WrapperLayout):
                yield from inner.take_apart(getattr(wrapper, name))

    def put_together(self, tensors: Iterator[Tensor]) -> Tensor:
        """A wrapper around the next `tensors`."""
        parts = {name: self._part(inner, tensors) for name, inner in zip(self.names, self.inner, strict=True)}
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(parts, self.context, torch.Size(self.shape), self.stride)
        return made

    @staticmethod
    def _part(inner: WrapperLayout | Held | None, tensors: Iterator[Tensor]) -> Any:
        if isinstance(inner, Held):
            return inner.value
        return next(tensors) if inner is None else inner.put_together(tensors)


def put_together(layout: WrapperLayout, *parts: Tensor) -> Tensor:
    """The wrapper of `layout` around its tensors: what a graph calls."""
    return layout.put_together(iter(parts))


def functions_of_wrappers(gm: GraphModule) -> AbstractContextManager[None]:
    """Surround an uncompiled run of `gm`: its wrappers decide what functions do (`__torch_function__`).

    Around it they may be switched off (`traced_functions`). Dynamo leaves those of wrappers to who runs the
    graph; a compiler has traced them.
    """
    has_wrappers = any(node.target is put_together for node in gm.graph.nodes)
    return functions_while_tracing() if has_wrappers else nullcontext()


def uncompiled(gm: GraphModule) -> Callable[..., Any]:
    """`gm` as it stands."""
    if isinstance(functions_of_wrappers(gm), nullcontext):
        return gm.forward

    def forward(*args: Any) -> Any:
        with functions_of_wrappers(gm):
            return gm.forward(*args)

    return forward


def has_constant_sizes(tensor: Tensor) -> bool:
    """Neither the tensor nor, in a wrapper, any tensor in it has a symbolic size."""
    sizes = [size for part in (tensor, *inner_tensors(tensor)) for size in (*part.shape, *part.stride())]
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def meta_of_part(node: Node, way: tuple[str, ...], value: Tensor) -> dict[str, Any]:
    """What Dynamo would note at an argument that is an inner tensor of the argument `node`."""
    from torch._dynamo.source import AttrSource

    source: Any = getattr(node.meta.get("grapharg"), "source", None)
    for name in way if source is not None else ():
        source = AttrSource(source, name)
    return {"example_value": value, "grapharg": SimpleNamespace(source=source)}
