"""`torch.ops.piecewise.attention`: attention over a paged KV cache; importing this registers it."""

from piecewise_graph import register_splitting_op

from .attention_op import attention as attention, bind
from .batch import AttentionBatch as AttentionBatch
from .batch_buffers import BatchBuffers as BatchBuffers, make_batch as make_batch
from .implementations import compile_ahead as compile_ahead

register_splitting_op("piecewise::attention", capturable=True, bind=bind)

__all__ = ["AttentionBatch", "BatchBuffers", "attention", "compile_ahead", "make_batch"]
