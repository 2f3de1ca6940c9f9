"""What a batch's attention and a speculative round need to know, computed on the device.

Batches: `extend_batch`, `kv_indices`, `advance`. A round: `draft_steps`, `select_branches` per level of a
tree, `build_tree`, then one of `accept_greedy`, `accept_chain`, `accept_tree`. Each is one launch.
"""

from .errors import MetadataError
from .metadata_buffers import Accepted, Batch, Branches, DraftSteps, ExtendRows, PagedKV, Tree
from .metadata_ops import (
    MetadataOp,
    accept_chain,
    accept_greedy,
    accept_tree,
    advance,
    build_tree,
    draft_steps,
    extend_batch,
    kv_indices,
    select_branches,
)

__all__ = [
    "Accepted",
    "Batch",
    "Branches",
    "DraftSteps",
    "ExtendRows",
    "MetadataError",
    "MetadataOp",
    "PagedKV",
    "Tree",
    "accept_chain",
    "accept_greedy",
    "accept_tree",
    "advance",
    "build_tree",
    "draft_steps",
    "extend_batch",
    "kv_indices",
    "select_branches",
]
