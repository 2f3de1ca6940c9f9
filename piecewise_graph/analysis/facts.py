"""What a segment does, found by running it once on fake tensors.

The facts decide whether a segment can be captured, and how it may be run repeatedly while its padding is
being proved. They cost a few milliseconds per distinct segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch
from piecewise_graph.analysis.op_call import arguments_of
from piecewise_graph.splitter.splitting_ops import written_operands

_COPIES = frozenset({"aten::_to_copy", "aten::copy_", "aten::copy"})
_GROUPED = frozenset({"aten::_grouped_mm", "transformers::grouped_mm_fallback"})
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"})


@dataclass(frozen=True)
class SegmentFacts:
    """Findings about one distinct segment; indices count its inputs or outputs.

    Attributes:
        written: inputs whose storage the segment writes.
        aliased_write: it writes a storage that two of its inputs share.
        strided_write: it writes an input that overlaps itself, or is not row-major and returned as a view.
        entangled_outputs: some output shares storage with an input or another output.
        random: it draws random numbers.
        host_sync: no graph can hold it: it waits for the device, has a data-dependent shape
            (`waits_for_device`), or computes on another device than the graphs of its trace.
        other_device: the last of these.
        floats_become_integers: it casts floats to integers, so a NaN may become an illegal index.
        computes: it does more than make views and allocate.
        size_is_a_number: a size enters the arithmetic (`x / T`), not only shapes.
        uninitialised: outputs that it allocates and does not write, for a splitting op to fill.
    """

    written: frozenset[int]
    aliased_write: bool
    strided_write: bool
    entangled_outputs: bool
    random: bool
    host_sync: bool
    other_device: bool
    floats_become_integers: bool
    computes: bool
    size_is_a_number: bool
    uninitialised: frozenset[int]

    @property
    def compiles(self) -> bool:
        """AOTAutograd, which Inductor begins with, gets its writes right."""
        return not (self.aliased_write or self.strided_write)


class Observations:
    """Notes each op of one run, and draws the facts from them.

    Args:
        device: where graphs of the trace run; None where that is not known.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.elsewhere: set[int] = set()  # ids of tensors on other devices that inputs lead to
        self.written: set[int] = set()
        self.allocated: set[int] = set()
        self.alive: list[Tensor] = []  # a storage that died could lend its id to another one
        self.random = self.host_sync = self.other_device = False
        self.casts = self.computes = self.numbers = False

    def note_input(self, tensor: Tensor) -> None:
        """A tensor that the run is given. One on the host, a number too, is read in every call."""
        if self.device is not None and _torch.device_of(tensor) != self.device:
            self.elsewhere.add(id(tensor))
            self.alive.append(tensor)

    def note(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str | None:
        """Note one call of an op; why no CUDA graph can hold it, in words, or None."""
        if _torch.is_higher_order(op):
            waits = self._runs_elsewhere((args, kwargs), result)
            self._note_graphs(op, args, kwargs)
        else:
            elsewhere = None if op.namespace == "prim" else self._runs_elsewhere((args, kwargs), result)
            waits = waits_for_device(op, args, kwargs, result) or elsewhere
            self._note_op(op, args, kwargs, result)
        self.host_sync |= waits is not None
        return waits

    def _runs_elsewhere(self, given: Any, result: Any) -> str | None:
        """On which other device an op reads or makes something.

        Of a number on the host that the run itself makes, kernels hold the value.
        """
        if self.device is None:
            return None
        taken, made = (
            [leaf for leaf in _torch.flatten(value)[0] if isinstance(leaf, Tensor)]
            for value in (given, result)
        )
        if any(id(tensor) in self.elsewhere for tensor in taken):
            for tensor in made:
                self.note_input(tensor)
        places = {_torch.device_of(t) for t in (*taken, *made) if t.ndim or id(t) in self.elsewhere}
        others = sorted(str(place) for place in places - {self.device})
        self.other_device |= bool(others)
        return f"runs on {others[0]}" if others else None

    def _note_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        arguments, returns = op._schema.arguments, op._schema.returns
        for position, argument in enumerate(arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            self._note_write(argument, value)
            self.numbers |= _is_number(op, argument, value)
        self.random |= _draws_numbers(op, args, kwargs)
        self.casts |= _casts_to_integer(op, args, result)
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        allocates = op._schema.name.partition("::")[2] in _ALLOCATIONS
        if allocates:
            self.allocated.add(_torch.storage_id(result))
            self.alive.append(result)
        makes = isinstance(result, (Tensor, tuple, list)) and not is_view and not allocates
        self.computes |= makes or (not returns and _torch.is_foreign(op))

    def _note_write(self, argument: Any, value: Any) -> None:
        if argument.alias_info is not None and argument.alias_info.is_write:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, Tensor):
                    self.computes = True
                    self.written.add(_torch.storage_id(tensor))
                    self.alive.append(tensor)

    def _note_graphs(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op that runs graphs computes; if one of them writes what it is given, that may be any tensor."""
        self.computes = True
        leaves = _torch.flatten((args, kwargs))[0]
        graphs = (leaf for leaf in leaves if isinstance(leaf, GraphModule))
        if "mutation" in str(op) or any(map(_writes_what_it_is_given, graphs)):
            for tensor in filter(lambda leaf: isinstance(leaf, Tensor), leaves):
                self.written.add(_torch.storage_id(tensor))
                self.alive.append(tensor)

    def facts(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> SegmentFacts:
        """The facts of a run that took `inputs` and returned `outputs`."""
        ids = [_torch.storage_id(x) if isinstance(x, Tensor) else None for x in inputs]
        out_ids = [_torch.storage_id(x) for x in outputs]
        written = frozenset(i for i, storage in enumerate(ids) if storage in self.written)
        return SegmentFacts(
            written=written,
            aliased_write=any(ids.count(ids[i]) > 1 for i in written),
            strided_write=any(_is_strided_write(inputs[i], outputs) for i in written),
            entangled_outputs=len(set(out_ids)) < len(out_ids) or bool(set(out_ids) & set(ids)),
            random=self.random,
            host_sync=self.host_sync,
            other_device=self.other_device,
            floats_become_integers=self.casts,
            computes=self.computes,
            size_is_a_number=self.numbers,
            uninitialised=frozenset(i for i, s in enumerate(out_ids) if s in self.allocated - self.written),
        )


def _writes_what_it_is_given(graph: GraphModule) -> bool:
    """A graph of Dynamo's, a branch of torch.cond for instance, or one inside of it."""
    for part in (module for module in graph.modules() if isinstance(module, GraphModule)):
        given = (_torch.example_value(node) for node in part.graph.find_nodes(op="placeholder"))
        storages = {_torch.storage_id(value) for value in given if isinstance(value, Tensor)}
        for operand in (operand for node in part.graph.nodes for operand in written_operands(node)):
            value = _torch.example_value(operand)
            if not isinstance(value, Tensor) or _torch.storage_id(value) in storages:
                return True
    return False


def _is_strided_write(written: Tensor, outputs: Sequence[Tensor]) -> bool:
    """AOTAutograd writes all of what overlaps itself, and makes views of symbolic sizes row-major."""
    symbolic = filter(_torch.has_symbolic_sizes, outputs)
    returned = any(_torch.share_storage(written, output) for output in symbolic)
    return _torch.overlaps_itself(written) or (returned and not _torch.is_row_major(written))


def waits_for_device(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> str | None:
    """Why no CUDA graph can hold a call of `op`, in words; None where it can."""
    if torch.Tag.data_dependent_output in op.tags:
        return "reads a value back to the host"
    if isinstance(result, Tensor) and _torch.has_unknown_size(result):
        return "makes a size of values"
    leaves, _ = _torch.flatten((args, kwargs, result))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # Of a number on the host that meets tensors on the device, kernels hold the value; a copy waits for it.
    copies = op._schema.name in _COPIES
    devices = {tensor.device.type for tensor in tensors if copies or tensor.ndim or tensor is result}
    if len(devices) > 1:
        return "copies between host and device"
    # In other types than bfloat16 torch has no kernel for all groups, and transformers has a loop.
    native = op._schema.name == "aten::_grouped_mm" and tensors[0].dtype == torch.bfloat16
    if op._schema.name in _GROUPED and "cuda" in devices and not native:
        return "reads where groups end back to the host"
    return None


def observe(gm: GraphModule, inputs: Sequence[Any]) -> SegmentFacts:
    """Run `gm` on its fake `inputs` and report what happened."""
    seen = Observations()
    # Without a tensor argument there is no mode: nothing to fake, and nothing to hurt.
    with _torch.fake_mode_of(gm) or nullcontext(), _torch.observe_ops(seen.note):
        outputs = gm(*inputs)
    return seen.facts(inputs, outputs)


def _draws_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """It is random. Torch calls its attention kernels so, which are not without dropout."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    dropout = arguments_of(op, args, kwargs).get("dropout_p")
    return not (isinstance(dropout, float) and dropout == 0.0)


def _is_number(op: Any, argument: Any, value: Any) -> bool:
    """A symbolic size where the schema wants a number or a tensor; the end of arange is a shape."""
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat)) and not _torch.is_constant(value)
    is_length = op._schema.name == "aten::arange" and argument.name == "end"
    is_operand = any(kind in str(argument.type) for kind in ("Tensor", "number", "float"))
    return symbolic and is_operand and not is_length


def _casts_to_integer(op: Any, args: tuple[Any, ...], result: Any) -> bool:
    if not isinstance(result, Tensor) or op._schema.name != "aten::_to_copy" or not args:
        return False
    return args[0].is_floating_point() and not result.is_floating_point() and result.dtype != torch.bool
