"""Ops and functions that a graph calls: their kinds, their schemas, and watching them run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket


def propagate(gm: GraphModule, inputs: Sequence[Tensor]) -> None:
    """Give every node of `gm` the fake value that it has for `inputs`; runs nothing."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _Propagation(gm).run(*[mode.from_tensor(tensor) for tensor in inputs])


def propagate_fake(gm: GraphModule, inputs: Sequence[Any], mode: Any) -> None:
    """The same for what Dynamo traces: fake values of `mode`, whose sizes may be symbols."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher(), torch.no_grad():
        _Propagation(gm).run(*inputs, enable_io_processing=False)


def fake_result(function: Callable[..., Any], args: Sequence[Any], mode: Any) -> Any:
    """What `function` returns for fake values of `mode`, whose sizes may be symbols; runs nothing."""
    from torch._dispatch.python import enable_python_dispatcher

    with mode, enable_python_dispatcher(), torch.no_grad():
        return function(*args)


class _Propagation(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


@contextmanager
def observe_ops(on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]) -> Iterator[None]:
    """Call `on_op(op, args, kwargs, result)` after every op that runs inside the block.

    Ops inside of wrapper subclasses are seen, those that the subclasses stand for are not. Of an op that runs
    graphs only the op itself is seen.

    Runs under the Python dispatcher, as Dynamo runs fake tensors. Without it composite ops written in C++
    (matmul) would ask for plain integers and so fix a symbolic size to its value.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observer(TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            result = func(*args, **(kwargs or {}))
            on_op(func, args, kwargs or {}, result)
            return result

    with enable_python_dispatcher(), Observer():
        yield


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Run real tensors in a block that lies inside of a fake mode and of observers."""
    from torch._dispatch.python import no_python_dispatcher
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
        yield


def op_schemas(target: Any) -> list[str] | None:
    """Signatures of an op, or of all its overloads; None for other callables and ops that tracing opens."""
    names = target.overloads() if isinstance(target, OpOverloadPacket) else ()
    ops = [target] if isinstance(target, OpOverload) else [getattr(target, name) for name in names]
    foreign = list(filter(is_foreign, ops))
    opened = any(op._can_decompose() or op.python_key_table or _is_taught_to_inductor(op) for op in foreign)
    return None if opened or not ops else [str(op._schema) for op in ops]


def _is_taught_to_inductor(op: OpOverload) -> bool:
    """Somebody registered what Inductor makes of it: a lowering, or a decomposition."""
    tables = ("lowering", "lowerings"), ("lowering", "user_lowerings"), ("decomposition", "decompositions")
    known = (getattr(sys.modules.get(f"torch._inductor.{module}"), name, {}) for module, name in tables)
    made = (table[op] for table in known if op in table)
    owners = (getattr(getattr(function, "func", function), "__module__", None) for function in made)
    return any(not str(owner).startswith("torch.") for owner in owners)


def is_foreign(target: Any) -> bool:
    """An overload of an op of another library than torch's."""
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prims")


def is_higher_order(target: Any) -> bool:
    """An op that runs graphs."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def inner_graphs(gm: GraphModule, names: Iterable[str]) -> Iterator[GraphModule]:
    """Those attributes of `gm` that are graphs themselves (bodies of higher-order ops)."""
    found = (getattr(gm, name, None) for name in names)
    return (inner for inner in found if isinstance(inner, GraphModule))


def droppable_functions() -> frozenset[Any]:
    """Graph nodes without effect on an inference graph: grad mode switches and usage logging."""
    return frozenset({torch._C._set_grad_enabled, torch._C._log_api_usage_once})


def autocast_functions() -> tuple[Any, Any]:
    """(enter, exit): the graph nodes between which autocast is on."""
    autocast = torch.amp.autocast_mode
    return autocast._enter_autocast, autocast._exit_autocast


def transform_depth(target: Any) -> int:
    """Of a graph node: 1 where it begins a function transform (vmap, jvp), -1 where it ends one, else 0."""
    name = getattr(target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def grad_mode_function() -> Any:
    return torch._C._set_grad_enabled
