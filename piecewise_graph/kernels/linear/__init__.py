"""Linear layers of a few rows (decode steps), by whichever kernel reads the weight fastest."""

from piecewise_graph.kernels.linear.kernel_configs import (
    MAX_TOKENS as MAX_TOKENS,
    KernelConfig as KernelConfig,
)
from piecewise_graph.kernels.linear.linear_op import linear_few as linear_few

__all__ = ["MAX_TOKENS", "KernelConfig", "linear_few"]
