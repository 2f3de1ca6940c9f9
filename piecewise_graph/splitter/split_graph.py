"""What splitting produces: steps over numbered values. Plain data that does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph.sizes import Sizes, TensorSpec, substitute
from piecewise_graph.splitter.splitting_ops import SplittingOp, is_plain_attention


@dataclass(frozen=True)
class Ref:
    """The tensor in value slot `slot`."""

    slot: int


@dataclass(frozen=True)
class Opaque:
    """The opaque argument in value slot `slot`."""

    slot: int


@dataclass(frozen=True)
class Size:
    """An integer, or an answer about some (`T > 64`), that depends on the trace's size symbols."""

    expr: sympy.Basic


@dataclass(frozen=True)
class Input:
    """One argument of the traced graph, in Dynamo's order; tensors take the slot of their index.

    Attributes:
        name: the source as a person writes it, `self.model.embed_tokens.weight` or `input_ids`.
        spec: layout of a tensor; None for an integer.
        bound: read at a fixed address (weights, buffers, constants) rather than copied in.
        constant: the tensor itself, where the graph and not the caller holds it.
        symbol: the size symbol of an integer argument.
        merged: a tensor made up of several arguments (merged_weights.py); follows the trace's own arguments.
        opaque: neither tensor nor number, an object that torch passes through: a layer's name, a device mesh.
    """

    name: str
    spec: TensorSpec | None
    bound: bool
    constant: Tensor | None = None
    symbol: sympy.Symbol | None = None
    merged: bool = False
    opaque: bool = False


@dataclass(frozen=True)
class SegmentStep:
    """A compute segment: `gm(*inputs)` returns one tensor per slot of `outputs`.

    Attributes:
        padded: replays give it the bucket's rows; else the live ones.
        origins: name of a node of `gm` -> name of the node of the trace that it copies.
    """

    index: int
    gm: GraphModule
    inputs: tuple[Ref | Size | Opaque, ...]
    outputs: tuple[int, ...]
    padded: bool = True
    origins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpCall:
    """One call of a splitting op; Ref, Size and Opaque stand nested in `args` and `kwargs`.

    Attributes:
        outputs: (index into the returned tuple, or None for a lone tensor; slot) of results that are used.
        module: path of the module that calls it, as far as Dynamo says; else "".
    """

    op: SplittingOp
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[tuple[int | None, int], ...]
    module: str = ""


def is_torch_attention(call: OpCall) -> bool:
    """It calls `F.scaled_dot_product_attention` without dropout: it depends on its arguments alone."""
    return is_plain_attention(call.op, call.target, call.args, call.kwargs)


@dataclass(frozen=True)
class OpStep:
    """Adjacent splitting ops, run between segments."""

    calls: tuple[OpCall, ...]


Step = SegmentStep | OpStep


@dataclass(frozen=True)
class SplitGraph:
    """The traced graph as steps.

    Attributes:
        inputs: arguments, then constants that the graph holds.
        specs: layout of the tensor in each slot; None for slots of integers.
        storages: a number per slot; tensors with the same number share a storage.
        outputs: per graph output a Ref, a Size or a constant.
        leaks: attention-like or mutating ops that were left inside a segment.
    """

    inputs: tuple[Input, ...]
    specs: tuple[TensorSpec | None, ...]
    storages: tuple[int | None, ...]
    steps: tuple[Step, ...]
    outputs: tuple[Any, ...]
    leaks: tuple[str, ...]

    @property
    def segments(self) -> tuple[SegmentStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, SegmentStep))

    @property
    def op_calls(self) -> tuple[OpCall, ...]:
        return tuple(call for step in self.steps if isinstance(step, OpStep) for call in step.calls)

    @property
    def is_cut_at_attention(self) -> bool:
        """It has splitting ops, all of them torch's own attention without dropout."""
        return bool(self.op_calls) and all(map(is_torch_attention, self.op_calls))

    @cached_property
    def activations(self) -> tuple[tuple[int, TensorSpec], ...]:
        """(index, layout) of the tensors that a call passes and replays copy."""
        given = enumerate(self.inputs)
        return tuple((index, x.spec) for index, x in given if x.spec is not None and not x.bound)

    @cached_property
    def device(self) -> torch.device:
        """Where its graphs run: the first GPU among the devices of its arguments, else the host."""
        devices = [given.spec.device for given in self.inputs if given.spec is not None]
        gpus = [device for device in devices if device.type not in ("cpu", "meta")]
        hosts = [device for device in devices if device.type == "cpu"]
        return next(iter([*gpus, *hosts, *devices]), torch.device("cpu"))

    @cached_property
    def has_other_devices(self) -> bool:
        """An argument, or what crosses a cut, lies on another device: its readers run there, uncaptured."""
        constants = {slot for slot, given in enumerate(self.inputs) if given.constant is not None}
        return any(
            spec is not None and slot not in constants and spec.device != self.device
            for slot, spec in enumerate(self.specs)
        )

    @cached_property
    def opaque(self) -> tuple[int, ...]:
        """Indices of the opaque arguments."""
        return tuple(index for index, given in enumerate(self.inputs) if given.opaque)

    @cached_property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Size symbols of the arguments, in order of appearance."""
        shapes = ((given.symbol,) if given.spec is None else given.spec.shape for given in self.inputs)
        sizes = (size for shape in shapes for size in shape if size is not None)
        return tuple(dict.fromkeys(found for size in sizes for found in sorted(size.free_symbols, key=str)))

    @cached_property
    def shared_results(self) -> frozenset[int]:
        """Slots of results that lie in the memory of an argument, or of another result."""
        slots = [slot for slot in dict.fromkeys(references(self.outputs)) if slot >= len(self.inputs)]
        made = [self.storages[slot] for slot in slots]
        given = {self.storages[slot] for slot, x in enumerate(self.inputs) if x.spec is not None}
        return frozenset(s for s, at in zip(slots, made, strict=True) if at in given or made.count(at) > 1)

    def spec(self, slot: int) -> TensorSpec:
        """Layout of the tensor in `slot`, as a `Ref` names it."""
        spec = self.specs[slot]
        assert spec is not None
        return spec

    def strides_vary(self, step: SegmentStep, written: Iterable[int]) -> bool:
        """The strides of what lies in the memory of its inputs `written` depend on the token count."""
        slots = {index: item.slot for index, item in enumerate(step.inputs) if isinstance(item, Ref)}
        storages = {self.storages[slots[index]] for index in written}
        specs = [self.spec(slot) for slot in slots.values() if self.storages[slot] in storages]
        return any(spec.strides_vary(symbol) for spec in specs for symbol in self.symbols)

    def arguments_sharing_storage(self, slots: Iterable[int]) -> list[Input]:
        """The arguments that lie, wholly or as a view, in the storages of `slots`."""
        written = {self.storages[slot] for slot in slots}
        tensors = (i for i, given in enumerate(self.inputs) if given.spec is not None)
        return [self.inputs[index] for index in tensors if self.storages[index] in written]


def with_numbers(graph: SplitGraph, sizes: Sizes) -> SplitGraph:
    """`graph` with these symbols taken for numbers; its segments, which are given sizes, stay the same."""

    def at(item: Ref | Size | Opaque) -> Ref | Size | Opaque:
        return Size(substitute(item.expr, sizes)) if isinstance(item, Size) else item

    def step_at(step: Step) -> Step:
        if isinstance(step, SegmentStep):
            return replace(step, inputs=resolve(step.inputs, at))
        calls = (replace(c, args=resolve(c.args, at), kwargs=resolve(c.kwargs, at)) for c in step.calls)
        return replace(step, calls=tuple(calls))

    specs = tuple(spec and spec.with_numbers(sizes) for spec in graph.specs)
    inputs = tuple(
        replace(given, spec=specs[slot], symbol=None if given.symbol in sizes else given.symbol)
        for slot, given in enumerate(graph.inputs)
    )
    steps, outputs = tuple(map(step_at, graph.steps)), resolve(graph.outputs, at)
    return replace(graph, inputs=inputs, specs=specs, steps=steps, outputs=outputs)


def resolve(structure: Any, put: Callable[[Ref | Size | Opaque], Any]) -> Any:
    """`structure` with what `put` makes of it in the place of every Ref, Size and Opaque in it."""
    if isinstance(structure, (Ref, Size, Opaque)):
        return put(structure)
    if isinstance(structure, (tuple, list)):
        return type(structure)(resolve(item, put) for item in structure)
    if isinstance(structure, dict):
        return {key: resolve(value, put) for key, value in structure.items()}
    if isinstance(structure, slice):
        return slice(*(resolve(part, put) for part in (structure.start, structure.stop, structure.step)))
    return structure


def references(structure: Any) -> list[int]:
    """Slots of all tensors that `structure` mentions."""
    found: list[int] = []

    def note(item: Ref | Size | Opaque) -> None:
        if isinstance(item, Ref):
            found.append(item.slot)

    resolve(structure, note)
    return found
