"""`torch.ops.piecewise.attention`: attention over a paged KV cache; importing this registers it."""

from piecewise_graph import register_splitting_op

from .attention_op import attention as attention, bind, compile_call_ahead
from .batch import AttentionBatch as AttentionBatch
from .batch_buffers import BatchBuffers as BatchBuffers, make_batch as make_batch
from .graph_calls import attend_in_graph as attend_in_graph, expect_graph_calls as expect_graph_calls
from .implementations import compile_ahead as compile_ahead
from .joined_batch import joined as joined

register_splitting_op("piecewise::attention", capturable=True, bind=bind, compile_ahead=compile_call_ahead)

__all__ = [
    "AttentionBatch",
    "BatchBuffers",
    "attend_in_graph",
    "attention",
    "compile_ahead",
    "expect_graph_calls",
    "joined",
    "make_batch",
]
