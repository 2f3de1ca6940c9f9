"""An op's signature, declared once: the parameters of its function, with the shape and dtype of each tensor.

From the declaration follow the schema of `torch.library`, the flat arguments, the allocation of bundles and
the check of a call. A dimension is a product of letters, each with an offset or none: "B", "B+1", "(S-1)*k".
The check learns a letter from the first dimension in which it is the only unknown one. The letters are
explained in `metadata_buffers.py`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_type_hints

import torch
from torch import Tensor

from ..errors import MetadataError

_FACTOR = re.compile(r"([A-Za-z])([+-]\d+)?")
_Bundle = TypeVar("_Bundle", bound="Bundle")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and permitted dtypes of a tensor; it is allocated with the first of these.

    Attributes:
        strided: its strides are any. All others are contiguous.
    """

    shape: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    strided: bool = False


def ints(*shape: str) -> TensorSpec:
    return TensorSpec(shape, (torch.int32,))


def columns(size: str) -> TensorSpec:
    """One dimension, which may be a column of a matrix."""
    return TensorSpec((size,), (torch.int32,), strided=True)


def ids(*shape: str) -> TensorSpec:
    """Token ids: argmax and topk make int64."""
    return TensorSpec(shape, (torch.int32, torch.int64))


def floats(*shape: str) -> TensorSpec:
    return TensorSpec(shape, (torch.float32,))


def bools(*shape: str) -> TensorSpec:
    return TensorSpec(shape, (torch.bool,))


class Bundle:
    """Tensors (and integers) that ops take as one argument. Subclasses are frozen dataclasses."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The fields, in order: the order in which ops take them."""
        return tuple(vars(self).values())

    @classmethod
    @cache
    def declared(cls) -> tuple[tuple[str, TensorSpec | None], ...]:
        """Fields by name, in order; None for an integer."""
        hints = get_type_hints(cls, include_extras=True)
        return tuple((name, _spec(hint)) for name, hint in hints.items())

    @classmethod
    def zeros(cls: type[_Bundle], device: torch.device, **sizes: int) -> _Bundle:
        """Allocate every field; `sizes` gives each letter its number."""
        specs = [spec for _, spec in cls.declared()]
        return cls(
            *(
                torch.zeros([_size(dim, sizes) for dim in spec.shape], dtype=spec.dtypes[0], device=device)
                for spec in specs
                if spec is not None
            )
        )


# All of a tensor that a check looks at: shape, strides (None if it is contiguous), dtype, device. Plain
# tuples are no work for the garbage collector, and the cache of checked calls keeps many.
Layout = tuple[tuple[int, ...], "tuple[int, ...] | None", torch.dtype, torch.device]


def layout_of(value: Any) -> Any:
    """A tensor's layout; an integer or None as it is."""
    if not isinstance(value, Tensor):
        return value
    strides = None if value.is_contiguous() else value.stride()
    return tuple(value.shape), strides, value.dtype, value.device


@dataclass(frozen=True)
class Call:
    """What is known of a call whose arguments fit together, whatever its tensors hold.

    Attributes:
        op: name of the op.
        shapes: of tensors by name, without the tensors that were not passed.
        sizes: what each letter, each dimension and each integer argument amounts to.
    """

    op: str
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]

    def expect(self, name: str, *shape: int) -> None:
        """Refuse another shape of this tensor."""
        if self.shapes[name] != shape:
            raise MetadataError.wrong_shape(self.op, name, self.shapes[name], shape)


@dataclass(frozen=True)
class _Parameter:
    """A parameter of the function; `bundle` is None unless it takes one, of `width` fields."""

    name: str
    bundle: type[Bundle] | None
    width: int


class Signature:
    """What an op takes.

    Args:
        function: annotated with bundles, `int`, and `Annotated[Tensor, TensorSpec]`. A tensor whose default
            is None is optional.
        writes: tensors that the op writes in place, next to the bundle named `out`.

    Attributes:
        schema: for `torch.library`.
    """

    def __init__(self, function: Callable[..., None], writes: Collection[str]) -> None:
        self.name = function.__name__
        self._python = inspect.signature(function, eval_str=True)
        self._parameters: list[_Parameter] = []
        self._specs: dict[str, TensorSpec | None] = {}  # None: an integer
        declarations = [self._declare(parameter, writes) for parameter in self._python.parameters.values()]
        self.schema = f"{self.name}({', '.join(text for texts in declarations for text in texts)}) -> ()"

    def flatten(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The op's arguments, in the order of its schema."""
        if kwargs or len(args) < len(self._parameters):
            bound = self._python.bind(*args, **kwargs)
            bound.apply_defaults()
            args = tuple(bound.arguments.values())
        flat: list[Any] = []
        for parameter, value in zip(self._parameters, args, strict=True):
            if parameter.bundle is None:
                flat.append(value)
            else:
                flat += value.args
        return tuple(flat)

    def unflatten(self, flat: Sequence[Any]) -> dict[str, Any]:
        """The function's arguments by name."""
        found, start = {}, 0
        for parameter in self._parameters:
            values = flat[start : start + parameter.width]
            found[parameter.name] = parameter.bundle(*values) if parameter.bundle else values[0]
            start += parameter.width
        return found

    def check(self, layouts: Sequence[Layout | int | None]) -> Call:
        """Match shapes, dtypes, devices and strides with the declaration.

        Raises:
            MetadataError: they do not fit together.
        """
        given = dict(zip(self._specs, layouts, strict=True))
        tensors = {name: value for name, value in given.items() if isinstance(value, tuple)}
        shapes = {name: shape for name, (shape, *_) in tensors.items()}
        sizes = {name: value for name, value in given.items() if isinstance(value, int)}
        _check_batch(self.name, shapes, sizes)
        device = tensors["requests"][-1]
        for name, layout in tensors.items():
            self._check_tensor(name, layout, device, sizes)
        return Call(self.name, shapes, sizes)

    def _check_tensor(self, name: str, layout: Layout, device: torch.device, sizes: dict[str, int]) -> None:
        spec, (shape, strides, dtype, found_device) = self._specs[name], layout
        assert spec is not None
        if not _fits(spec.shape, shape, sizes):
            wanted = [_shown(dim, sizes) for dim in spec.shape]
            raise MetadataError.wrong_shape(self.name, name, shape, wanted)
        if dtype not in spec.dtypes:
            raise MetadataError.wrong_dtype(self.name, name, dtype, spec.dtypes)
        if found_device != device:
            raise MetadataError.wrong_device(self.name, name, found_device, device)
        if strides is not None and not spec.strided:
            raise MetadataError.not_contiguous(self.name, name, strides)

    def _declare(self, parameter: inspect.Parameter, writes: Collection[str]) -> list[str]:
        """Schema of one parameter's flat arguments."""
        kind = parameter.annotation
        bundle = kind if isinstance(kind, type) and issubclass(kind, Bundle) else None
        fields = bundle.declared() if bundle else ((parameter.name, _spec(kind)),)
        self._parameters.append(_Parameter(parameter.name, bundle, len(fields)))
        texts = []
        for field, spec in fields:
            name = f"{parameter.name}.{field}" if field in self._specs else field
            written = spec is not None and ((bundle and parameter.name == "out") or name in writes)
            alias = f"({chr(ord('a') + len(self._specs))}!)" if written else ""
            optional = "?" if parameter.default is None else ""
            self._specs[name] = spec
            texts.append(f"{'Tensor' if spec else 'int'}{alias}{optional} {name.replace('.', '_')}")
        return texts


def _spec(annotation: Any) -> TensorSpec | None:
    found: TensorSpec | None = next(iter(getattr(annotation, "__metadata__", ())), None)
    return found


def _check_batch(op: str, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> None:
    if 0 in shapes["requests"]:
        raise MetadataError.no_requests(op)
    table = shapes.get("table")
    if table is not None and (len(table) != 2 or 0 in table):
        raise MetadataError.wrong_table(op, table)
    if sizes.get("page_size", 1) < 1:
        raise MetadataError.wrong_page_size(op, sizes["page_size"])


def _fits(dims: Sequence[str], shape: Sequence[int], sizes: dict[str, int]) -> bool:
    return len(dims) == len(shape) and all(
        _learn(dim, found, sizes) for dim, found in zip(dims, shape, strict=True)
    )


def _learn(dim: str, found: int, sizes: dict[str, int]) -> bool:
    """Whether `dim` can be `found`. A letter that is not known yet follows from it."""
    for letter, offset in _factors(dim):
        if letter not in sizes:
            others = _size(dim, {**sizes, letter: 1 - offset})
            if others == 0 or found % others:
                return False
            sizes[letter] = found // others - offset
    sizes[dim] = _size(dim, sizes)
    return sizes[dim] == found


def _size(dim: str, sizes: Mapping[str, int]) -> int:
    size = 1
    for letter, offset in _factors(dim):
        size *= sizes[letter] + offset
    return size


def _shown(dim: str, sizes: Mapping[str, int]) -> str:
    known = all(letter in sizes for letter, _ in _factors(dim))
    return str(_size(dim, sizes)) if known else dim


@cache
def _factors(dim: str) -> tuple[tuple[str, int], ...]:
    return tuple((letter, int(offset or 0)) for letter, offset in _FACTOR.findall(dim))
