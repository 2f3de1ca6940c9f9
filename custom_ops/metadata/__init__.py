"""What a batch's attention and a speculative round need to know, computed on the device.

A batch: `extend_batch`. A round: `gather_requests`, `draft_steps`, `select_branches` per level of a tree,
`build_tree`, then one of `accept_greedy`, `accept_chain`, `accept_tree`, and `scatter_accepted`. Each is one
launch.
"""

from ..errors import MetadataError
from .accept_ops import accept_chain, accept_greedy, accept_tree
from .draft_ops import build_tree, draft_steps, extend_batch, select_branches
from .metadata_buffers import Accepted, Batch, Branches, DraftSteps, ExtendRows, Gathered, RequestState, Tree
from .op_dispatch import MetadataOp
from .request_ops import gather_requests, scatter_accepted

__all__ = [
    "Accepted",
    "Batch",
    "Branches",
    "DraftSteps",
    "ExtendRows",
    "Gathered",
    "MetadataError",
    "MetadataOp",
    "RequestState",
    "Tree",
    "accept_chain",
    "accept_greedy",
    "accept_tree",
    "build_tree",
    "draft_steps",
    "extend_batch",
    "gather_requests",
    "scatter_accepted",
    "select_branches",
]
