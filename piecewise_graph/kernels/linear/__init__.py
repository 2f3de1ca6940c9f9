"""Linear layers of a few rows (decode steps), by whichever kernel reads the weight fastest."""

from piecewise_graph.kernels.linear.linear_op import linear_few as linear_few
from piecewise_graph.kernels.linear.plans import MAX_TOKENS as MAX_TOKENS
from piecewise_graph.kernels.linear.plans import Plan as Plan

__all__ = ["MAX_TOKENS", "Plan", "linear_few"]
