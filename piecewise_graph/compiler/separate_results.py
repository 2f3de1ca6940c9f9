"""Results in memory of their own, wherever the graph that was compiled has them so.

Inductor makes one tensor of two copies of a third. Nothing inside a segment can tell; an op behind it that
writes one of them in place can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from piecewise_graph import _torch

RunSegment = Callable[..., Sequence[Tensor]]


def separated(run: RunSegment, gm: GraphModule) -> RunSegment:
    """`run`, compiled from `gm`, whose results share memory only where those of `gm` do."""
    taken = {_torch.storage_id(x) for x in _torch.argument_values(gm) if isinstance(x, Tensor)}
    owners = enumerate(map(_torch.storage_id, _torch.returned_values(gm)))
    made = {index: owner for index, owner in owners if owner not in taken}
    if len(set(made.values())) < 2:
        return run

    def run_separated(*inputs: Any) -> Sequence[Tensor]:
        results = run(*inputs)
        found = {(_torch.storage_id(results[index]), owner) for index, owner in made.items()}
        is_separate = len(found) == len({storage for storage, _ in found})
        return results if is_separate else _separate(results, made)

    return run_separated


def _separate(results: Sequence[Tensor], made: Mapping[int, int]) -> Sequence[Tensor]:
    """The first owner of a storage keeps it, every other one gets a copy of all of it.

    So views of one owner stay views of one another, whatever their dtypes.
    """
    separate, first = list(results), dict[int, int]()
    copies: dict[tuple[int, int], torch.UntypedStorage] = {}
    for index, owner in made.items():
        result = results[index]
        storage = _torch.storage_id(result)
        if first.setdefault(storage, owner) != owner:
            if (storage, owner) not in copies:
                whole = torch.empty(0, dtype=torch.uint8, device=result.device).set_(result.untyped_storage())
                copies[storage, owner] = whole.clone().untyped_storage()
            place = result.storage_offset(), result.shape, result.stride()
            separate[index] = result.new_empty(0).set_(copies[storage, owner], *place)
    return separate
