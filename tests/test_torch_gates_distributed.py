"""What the library takes from torch about process groups and tensors that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import Graph, GraphModule
from traced import dynamic, trace

from piecewise_graph import _torch


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_groups_are_found_by_name_and_gather(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    assert _torch.process_group(group.group_name) is group
    whole, part = torch.zeros(2, 3), torch.randn(2, 3)
    _torch.gather(whole, part, group)
    torch.testing.assert_close(whole, part)
    with pytest.raises((RuntimeError, ValueError)):
        _torch.process_group("no such group")


def test_no_memory_of_a_cpu_is_shareable() -> None:
    with pytest.raises(RuntimeError, match="cpu"):
        _torch.shareable_memory(8, torch.int16, torch.device("cpu"))


@pytest.mark.gpu
def test_addresses_of_peers_tell_where_the_memory_of_each_rank_lies() -> None:
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cuda", torch.cuda.current_device())
        memory = _torch.shareable_memory(8, torch.int16, device)
        assert _torch.addresses_of_peers(memory, distributed.group.WORLD) == [memory.data_ptr()]
        assert memory.dtype == torch.int16 and memory.shape == (8,)
    finally:
        distributed.destroy_process_group()


def test_steps_of_a_sharded_tensor_are_told_by_their_nodes(mesh: DeviceMesh) -> None:
    """Dynamo calls methods of DTensor as such, or functions of its own in their place."""

    def model(x: Tensor) -> Tensor:
        parts = DTensor.from_local(x * 2, mesh, [Shard(1)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local() + 1

    def kinds(gm: GraphModule) -> list[str]:
        kinds = {
            "from": _torch.makes_sharded_of_local,
            "moved": _torch.moves_shards,
            "to": _torch.takes_local,
            "sharded": lambda node: _torch.is_sharded(_torch.example_value(node)),
        }
        return [name for node in gm.graph.nodes for name, is_kind in kinds.items() if is_kind(node)]

    found = trace(model, torch.ones(2, 3), look=kinds).seen
    assert found == [["from", "sharded", "moved", "sharded", "to"]]


def test_functional_collectives_are_told_by_name() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    begun = graph.call_function(torch.ops._c10d_functional.all_reduce, (x, "sum", "0"))
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (begun,))
    found = [_torch.functional_collective(node) for node in graph.nodes]
    assert found == [None, "all_reduce", "wait_tensor"]


def test_conditions_of_the_model_on_sizes_are_not_those_of_shards() -> None:
    """Those of shards are held to be forgotten where ranks are: test_local_shards.py, at one token."""

    def model(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 3 else x

    def forgets(gm: GraphModule) -> bool:
        env: Any = _torch.shape_env_of(gm)
        before = _torch.shape_guards(env), dict(env.var_to_range)
        _torch.forget_conditions_of_shards(env)
        return before != (_torch.shape_guards(env), dict(env.var_to_range))

    assert trace(model, dynamic(8, 3), look=forgets).seen == [False]


def test_fake_results_keep_symbols() -> None:
    def padded(gm: GraphModule) -> tuple[bool, int]:
        (node,) = (node for node in gm.graph.nodes if node.op == "call_function")
        made = _torch.fake_result(
            torch.nn.functional.pad, [_torch.example_value(node), (0, 1)], _torch.fake_mode_of(gm)
        )
        return isinstance(made.shape[0], torch.SymInt), made.shape[1]

    assert trace(lambda x: x * 2, dynamic(8, 3), look=padded).seen == [(True, 4)]
