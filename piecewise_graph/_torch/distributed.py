"""Process groups by name, and tensors that are sharded over a mesh of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.fx import Node

from piecewise_graph._torch.graphs import example_value


def process_group(name: str) -> Any:
    """The group of this process that graphs call `name`.

    Raises:
        RuntimeError, ValueError: there is none.
    """
    resolve: Any = distributed.distributed_c10d._resolve_process_group
    return resolve(name)


def gather(whole: Tensor, part: Tensor, group: Any) -> None:
    """Fill `whole` with every rank's `part`, by rank. Torch 2.13 has another name for it."""
    run = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    run(whole, part, group=group)


def shareable_memory(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of this rank that others can be let write to.

    Raises:
        RuntimeError: there is no room, or the device is no GPU.
    """
    from torch.distributed import _symmetric_memory as symmetric

    memory: Tensor = symmetric.empty(size, dtype=dtype, device=device)
    return memory


def addresses_of_peers(memory: Tensor, group: Any) -> Sequence[int]:
    """Where the shareable memory of each rank of a group lies for this one. Collective, without multicast.

    Raises:
        RuntimeError: the devices cannot reach each other's memory.
    """
    from torch.distributed import _symmetric_memory as symmetric

    shared: Any = symmetric.rendezvous(memory, group.group_name)
    return list(shared.buffer_ptrs)


def is_sharded(value: Any) -> bool:
    """A tensor of which each rank holds a part, or all (DTensor)."""
    api = sys.modules.get("torch.distributed.tensor")  # who has such a tensor has loaded it
    return api is not None and isinstance(value, api.DTensor)


def makes_sharded_of_local(node: Node) -> bool:
    """The node declares what each rank holds to be a sharded tensor: `DTensor.from_local`."""
    return _named(node, "from_local") and is_sharded(example_value(node))


def moves_shards(node: Node) -> bool:
    """The node gives a sharded tensor other placements: `DTensor.redistribute`."""
    return _named(node, "redistribute") and is_sharded(example_value(node))


def takes_local(node: Node) -> bool:
    """The node returns what this rank holds of a sharded tensor: `DTensor.to_local`."""
    return _named(node, "to_local") and not is_sharded(example_value(node))


def forget_conditions_of_shards(shape_env: Any) -> None:
    """Have the trace no longer rely on what DTensor asked about sizes, to choose among placements.

    A dimension may be sharded if it has a row for each rank. DTensor asks for that of all dimensions.
    """
    from torch.utils._sympy.value_ranges import ValueRanges

    shape_env.guards[:] = [guard for guard in shape_env.guards if not _asked_by_shards(guard.sloc)]
    for symbol, asked in shape_env.var_to_range_sloc.items():
        bounds = shape_env.var_to_range[symbol]
        if _asked_by_shards(asked.lower) and bounds.lower > 2:
            shape_env.var_to_range[symbol] = ValueRanges(2, bounds.upper)  # as of any size
    shape_env._update_version_counter()


def _asked_by_shards(location: Any) -> bool:
    frame = getattr(location, "framework_loc", None)
    return os.path.join("torch", "distributed", "tensor") in str(getattr(frame, "filename", ""))


def functional_collective(node: Node) -> str | None:
    """The collective of torch for graphs that a node calls, such as "all_reduce"; None of another node."""
    space, _, rest = str(node.target).partition(".")
    called = node.op == "call_function" and space == "_c10d_functional"
    return rest.removesuffix(".default") if called else None


def _named(node: Node, method: str) -> bool:
    """A method, or the function that Dynamo calls in its place: "prim_m", or "prim m" in torch 2.11."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.removeprefix("prim").lstrip("_ ") == method
