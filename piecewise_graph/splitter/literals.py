"""Numbers that a trace makes of nothing (`torch.tensor(0.5)`) and that each segment makes for itself.

Kernels hold the value of such a number, which lies on the host. As an argument of a segment it could not be
told from one that changes with every call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piecewise_graph import _torch
from piecewise_graph.splitter.splitting_ops import may_write

_MAKERS = frozenset({torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.zeros, torch.ones, torch.full})


def literals_of(gm: GraphModule) -> frozenset[Node]:
    """Those of `gm`; what is written is none."""
    made = [node for node in gm.graph.nodes if node.target in _MAKERS and not node.all_input_nodes]
    found = [node for node in made if _is_number_on_host(_torch.example_value(node))]
    return frozenset(node for node in found if not _is_written(node))


def _is_number_on_host(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu"


def _is_written(node: Node) -> bool:
    """In place, itself or through a view of it."""
    value = _torch.example_value(node)
    sharing = [n for n in node.graph.nodes if _torch.share_storage(_torch.example_value(n), value)]
    return any(may_write(user) for shared in sharing for user in shared.users)
