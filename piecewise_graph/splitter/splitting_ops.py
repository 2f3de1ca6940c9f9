"""The registry of splitting ops and the checks of their contract.

A splitting op (attention, usually) is where a graph is cut: it runs between captured segments, on
tensors narrowed to the real token count. Two kinds work:

* out-style, `ns::op(..., Tensor(a!) out) -> ()`: the segment before allocates `out`; nothing is copied.
* functional, `ns::op(...) -> Tensor`: the runtime copies the result into a buffer of its own, so that
  third-party ops work unchanged. `F.scaled_dot_product_attention` is registered like this.
"""

from __future__ import annotations

import inspect
import logging
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from piecewise_graph._torch import (
    OpOverload,
    OpOverloadPacket,
    example_value,
    is_dynamo_control_flow,
)
from piecewise_graph.errors import SplittingOpError
from piecewise_graph.splitter.dense_keys import scaled_dot_product_attention

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplittingOp:
    """One registered op.

    Attributes:
        name: "namespace::name".
        padded: the op wants the bucket's full size and handles padded rows itself.
        capturable: it may also be captured, where a forward context allows it (implies `padded`).
        bind: the op's arguments and `num_tokens=` -> a call of no arguments that does the same, made once
            per bucket and token count; it saves the dispatcher and all work that depends on the arguments
            alone.
        compile_ahead: the op's arguments, tensors among them without data -> None; has kernels compiled in
            other threads that such a call will launch.
    """

    name: str
    padded: bool = False
    capturable: bool = False
    bind: Callable[..., Callable[[], Any]] | None = None
    compile_ahead: Callable[..., None] | None = None


TORCH_ATTENTION = "aten::scaled_dot_product_attention"
# Where a node notes that graphs are not cut at it, though its op is registered (decode_steps.py).
INSIDE = "piecewise_inside"
_registry: dict[str, SplittingOp] = {}
_undefined: set[str] = set()  # registered before torch knew them, so not checked yet
_builtins: dict[Callable[..., Any], str] = {}


def register_splitting_op(
    name: str,
    *,
    padded: bool = False,
    capturable: bool = False,
    bind: Callable[..., Callable[[], Any]] | None = None,
    compile_ahead: Callable[..., None] | None = None,
) -> SplittingOp:
    """Cut graphs at `name` from the next trace on.

    Args:
        name: "namespace::name". An op that torch does not know yet is checked in the first graph that calls
            it.
        padded: call it with padded rows (it has to keep them harmless itself).
        capturable: allow it inside a captured graph, where the forward context says `full_graph=True`;
            implies `padded`.
        bind: called with the op's arguments and the keyword `num_tokens` (how many rows are live), once per
            bucket and token count; returns a call of no arguments that replays make instead of the op. For
            ops whose dispatch is worth saving.
        compile_ahead: called with the arguments of each call in a trace before the trace's segments are
            compiled. It has the op's kernels compiled in other threads meanwhile. Tensors are fake ones, and
            sizes and numbers may be symbolic. What it raises is logged, and the model goes on.

    Raises:
        SplittingOpError: no name of an op, or a schema that cannot be true.
    """
    packet = _resolve(name)
    if packet is None:
        _undefined.add(name)
        log.info("splitting op %s is not defined yet; it is checked in the first graph that calls it", name)
    else:
        _check_schemas(name, packet)
    op = SplittingOp(name, padded or capturable, capturable, bind, compile_ahead)
    _registry[name] = op
    _builtins.update(dict.fromkeys(_python_callables(name), name))
    return op


def splitting_op_of(node: Node) -> SplittingOp | None:
    """The registered op that `node` calls, or None.

    Raises:
        SplittingOpError: the op was registered before it was defined, with a schema that cannot be true.
    """
    if node.op != "call_function" or INSIDE in node.meta:
        return None
    name = _op_name(node.target)
    if name in _undefined and (packet := _resolve(name)) is not None:
        _check_schemas(name, packet)
        _undefined.remove(name)
    return _registry.get(name) if name else None


def compile_ops_ahead(gm: GraphModule) -> None:
    """Have the kernels compiled in other threads that the splitting ops of a traced graph will launch."""
    for node in gm.graph.nodes:
        op = splitting_op_of(node)
        if op is None or op.compile_ahead is None:
            continue
        args, kwargs = map_arg((node.args, node.kwargs), example_value)
        try:
            op.compile_ahead(*args, **kwargs)
        except Exception as error:
            if is_dynamo_control_flow(error):
                raise
            log.warning(
                "compile_ahead of %s failed; its kernels are compiled when called: %r", op.name, error
            )


def _op_name(target: Any) -> str | None:
    """Match packets, overloads and the Python builtins that reach Dynamo graphs as they are."""
    if isinstance(target, OpOverload):
        return target._schema.name
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    try:
        return _builtins.get(target)
    except TypeError:  # an unhashable callable is no builtin
        return None


def called_name(node: Node) -> str:
    """The qualified name of the op that `node` calls; of another function, or a method, its own name."""
    overload = op_overload(node.target) if node.op == "call_function" else None
    return overload._schema.name if overload else str(getattr(node.target, "__name__", node.target))


def op_overload(target: Any) -> OpOverload | None:
    """The overload whose schema describes `target`, where there is exactly one to choose."""
    if isinstance(target, OpOverload):
        return target
    name = _op_name(target)
    if name is None:
        return None
    packet = target if isinstance(target, OpOverloadPacket) else _resolve(name)
    return None if packet is None else getattr(packet, packet.overloads()[0])


def callable_of(op: SplittingOp, target: Callable[..., Any]) -> Callable[..., Any]:
    """What runs in place of `target`, the op as it stands in a graph.

    One resolved overload dispatches faster than a packet, and Python builtins stay as they are.
    """
    if op.name == TORCH_ATTENTION:
        return scaled_dot_product_attention
    return (op_overload(target) if isinstance(target, OpOverloadPacket) else None) or target


def written_arguments(target: Any) -> frozenset[str]:
    """Names of the arguments that the op's schema says it writes."""
    overload = op_overload(target)
    return frozenset() if overload is None else frozenset(_written(overload._schema))


def bind_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(argument name, value) pairs of a call, positions resolved through the schema."""
    overload = op_overload(target)
    names = [a.name for a in overload._schema.arguments] if overload is not None else []
    for index, value in enumerate(args):
        yield (names[index] if index < len(names) else f"argument {index}"), value
    yield from kwargs.items()


def is_plain_attention(op: SplittingOp, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A call of `F.scaled_dot_product_attention` without dropout: it depends on its arguments alone."""
    given = dict(bind_arguments(target, args, kwargs))
    return op.name == TORCH_ATTENTION and given.get("dropout_p", 0.0) == 0.0


# --- what stays inside a segment ------------------------------------------------------------------

# Names of ops and arguments that suggest an attention call that was not registered.
_ATTENTION = re.compile(r"flash_attn|flashinfer|attention|\bmha_", re.IGNORECASE)
_ATTENTION_ARGUMENTS = frozenset({"block_table", "block_tables", "cu_seqlens", "cu_seqlens_q", "kv_indices"})
_OWN_NAMESPACES = frozenset({"aten", "prims", "prim", "inductor"})
_IN_PLACE_OPERATORS = frozenset(
    {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}
)


# Arguments that make a function of torch.nn.functional write: activations, embeddings, batch norms.
_WRITING_SWITCHES = ("inplace", "max_norm", "training")
_signature = cache(inspect.signature)  # a model calls few functions over and over


def may_write(node: Node) -> bool:
    """An in-place call, which must run even if its result is not read."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    overload = op_overload(node.target)
    if overload is not None:
        return overload._schema.is_mutable
    name = getattr(node.target, "__name__", "")
    in_place_name = name.endswith("_") and not name.endswith("__")
    return in_place_name or node.target in _IN_PLACE_OPERATORS or "out" in node.kwargs or _is_in_place(node)


def _is_in_place(node: Node) -> bool:
    """`F.relu(x, inplace=True)`, `F.embedding(..., max_norm=1.0)`: functions that a switch makes write."""
    if not callable(node.target):
        return False
    try:
        given = _signature(node.target).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin has no signature; its keywords are known
        given = dict(node.kwargs)
    return any(given.get(switch) not in (None, False) for switch in _WRITING_SWITCHES)


def written_operands(node: Node) -> list[Node]:
    """What an in-place call may write of its operands: by the op's schema, where there is one."""
    if not may_write(node):
        return []
    if node.op == "call_method" or node.target in _IN_PLACE_OPERATORS:
        return node.all_input_nodes[:1]
    written, given = written_arguments(node.target), bind_arguments(node.target, node.args, node.kwargs)
    if not written:  # `F.silu(input=x, inplace=True)`, `F.embedding(ids, weight, max_norm=1)`
        return node.all_input_nodes
    values = [value for name, value in given if name in written]
    listed = [each for value in values for each in (value if isinstance(value, (tuple, list)) else (value,))]
    return [operand for operand in node.all_input_nodes if operand in listed]


def changes_shape_in_place(node: Node) -> bool:
    """`h.t_()`: the tensor itself has another shape from then on, which a graph's values never have."""
    name = called_name(node).rpartition("::")[2]
    op = getattr(torch.ops.aten, name, None) if node.op.startswith("call_") and name.endswith("_") else None
    if not isinstance(op, OpOverloadPacket) or name == "detach_":  # `__eq__` is a method of any object
        return False
    return any(torch.Tag.inplace_view in getattr(op, overload).tags for overload in op.overloads())


def leaked_op(node: Node) -> str | None:
    """The name of an op that looks as if it should have been a splitting op; None for all others."""
    overload = op_overload(node.target) if node.op == "call_function" else None
    if overload is None:
        name = getattr(node.target, "__name__", "")
        return name if _ATTENTION.search(name) else None
    name, arguments = overload._schema.name, {a.name for a in overload._schema.arguments}
    writes = overload.namespace not in _OWN_NAMESPACES and overload._schema.is_mutable
    looks_like_attention = _ATTENTION.search(name) or arguments & _ATTENTION_ARGUMENTS
    return name if name not in _registry and (writes or looks_like_attention) else None


# --- checks -----------------------------------------------------------------------------------------


def _resolve(name: str) -> OpOverloadPacket | None:
    """The op; None where torch does not know it (yet)."""
    namespace, _, op = name.partition("::")
    if not namespace or not op:
        raise SplittingOpError.bad_name(name)
    return getattr(getattr(torch.ops, namespace), op, None)


def _check_schemas(name: str, packet: OpOverloadPacket) -> None:
    for overload in packet.overloads():
        _check_schema(name, getattr(packet, overload)._schema)


def _check_schema(name: str, schema: Any) -> None:
    if not schema.returns and not list(_written(schema)):
        raise SplittingOpError.no_effect(name, str(schema))
    if any(r.alias_info is not None for r in schema.returns) and not _is_out_overload(schema):
        raise SplittingOpError.returns_alias(name, str(schema))


def _written(schema: Any) -> Iterator[str]:
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield argument.name


def _is_out_overload(schema: Any) -> bool:
    """`op.out(..., *, Tensor(a!) out) -> Tensor(a!)`: torch's own convention, harmless here."""
    return schema.overload_name.endswith("out") and bool(list(_written(schema)))


def _python_callables(name: str) -> Iterator[Callable[..., Any]]:
    """Builtins such as F.scaled_dot_product_attention stand in Dynamo graphs unconverted."""
    namespace, _, op = name.partition("::")
    if namespace == "aten":
        for module in (torch.nn.functional, torch, Tensor):
            candidate = getattr(module, op, None)
            if callable(candidate):
                yield candidate


register_splitting_op(TORCH_ATTENTION)
_builtins[scaled_dot_product_attention] = TORCH_ATTENTION
