"""Tensor parallel on more ranks than a model has KV heads: each rank holds the one whose queries it has.

The plans of transformers cut the key and value projections into as many parts as there are ranks, whatever a
head is. Where that leaves less than a head to a rank, attention cannot run. So such a rank is given all rows
of its head; others hold the same ones.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from piecewise_graph import _torch
from piecewise_graph.errors import RankError

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def with_whole_kv_heads(model: Any) -> None:
    """Let the attention layers of a sharded model, as transformers names their parts, have whole KV heads.

    Its `state_dict` still has the sharded weights. Collective where a layer has to be changed.

    Raises:
        RankError: the ranks cannot share the heads evenly.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if all(hasattr(module, name) for name in (*_PROJECTIONS, "head_dim")) and _has_part_of_a_head(module):
            _give_whole_head(module)


def _has_part_of_a_head(module: Any) -> bool:
    """Asked of sizes that are the same on all ranks: what follows is collective."""
    weight: Any = getattr(module.k_proj, "weight", None)
    if not _torch.is_sharded(weight) or len(weight.placements) != 1 or not weight.placements[0].is_shard(0):
        return False
    return weight.shape[0] % (int(module.head_dim) * weight.device_mesh.size()) != 0


def _give_whole_head(module: Any) -> None:
    weight, width = module.k_proj.weight, int(module.head_dim)
    group, heads = weight.device_mesh.get_group(), weight.shape[0] // width
    queries, cut = divmod(int(module.q_proj.weight.shape[0]), width * group.size())
    if group.size() % heads or cut:
        raise RankError.heads(group.size(), heads)
    start = group.rank() * heads // group.size() * width
    for projection in (module.k_proj, module.v_proj):
        _hold(projection, start, width)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = queries


def _hold(projection: nn.Linear, start: int, length: int) -> None:
    """These rows alone; what is saved stays the sharded parameters."""
    sharded = dict(projection.named_parameters(recurse=False))
    for name, parameter in sharded.items():
        whole: Any = parameter
        rows = whole.full_tensor()[start : start + length].clone()
        setattr(projection, name, nn.Parameter(rows, requires_grad=False))

    def save_sharded(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        state.update({prefix + name: parameter.detach() for name, parameter in sharded.items()})

    projection.register_state_dict_post_hook(save_sharded)
