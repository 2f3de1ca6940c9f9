"""`torch.ops.piecewise.attention`: out-style causal attention; importing this registers it to split at."""

from piecewise_graph import register_splitting_op

from .ops import attention as attention

register_splitting_op("piecewise::attention")

__all__ = ["attention"]
