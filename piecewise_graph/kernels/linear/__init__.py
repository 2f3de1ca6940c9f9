"""Linear layers of a few rows (decode steps), by whichever kernel reads the weight fastest."""

from piecewise_graph.kernels.linear.kernel_configs import MAX_TOKENS, KernelConfig
from piecewise_graph.kernels.linear.linear_op import DTYPES, compile_ahead, linear_few, linears, swiglu
from piecewise_graph.kernels.linear.norm_op import compile_ahead as compile_norm_ahead

__all__ = [
    "DTYPES",
    "MAX_TOKENS",
    "KernelConfig",
    "compile_ahead",
    "compile_norm_ahead",
    "linear_few",
    "linears",
    "swiglu",
]
