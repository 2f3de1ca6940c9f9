"""`torch.ops.piecewise.attention`: attention over a paged KV cache; importing this registers it."""

from piecewise_graph import register_splitting_op

from .batch import AttentionBatch as AttentionBatch
from .buffers import BatchBuffers as BatchBuffers
from .buffers import make_batch as make_batch
from .ops import attention as attention
from .ops import bind

register_splitting_op("piecewise::attention", capturable=True, bind=bind)

__all__ = ["AttentionBatch", "BatchBuffers", "attention", "make_batch"]
